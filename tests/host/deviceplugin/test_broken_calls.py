"""Callers that hang up, and calls that hang: other calls are answered normally."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from base.paths import Paths
from deviceplugin.api import v1beta1_pb2 as api
from deviceplugin.api import v1beta1_pb2_grpc
from deviceplugin.kubelet.pod_resources import open_channel
from deviceplugin.kubelet.registration import PluginServer
from tests.host.deviceplugin.conftest import Serve
from tests.host.deviceplugin.pool import NAME, Pool
from tests.kubelet import Kubelet
from tests.waiting import PATIENCE, until


class Served:
    """A pool on a socket that no kubelet knows, for any number of callers."""

    def __init__(self, stack: ExitStack, root: Path) -> None:
        (root / "device-plugins").mkdir(parents=True)
        self.pool = Pool()
        self.server = PluginServer(Paths(kubelet=root), self.pool)
        stack.callback(self.server.close)
        self.server.start()
        until(lambda: self.server.state().socket)
        self._stack = stack

    def caller(self) -> grpc.Channel:
        """A new connection."""
        channel = open_channel(Path(self.server.state().socket))
        self._stack.callback(channel.close)
        return channel

    def list(self, channel: grpc.Channel) -> Any:  # noqa: ANN401 - grpc has no public name for it
        """A stream of lists."""
        stub = v1beta1_pb2_grpc.DevicePluginStub(channel)  # type: ignore[no-untyped-call]
        return stub.ListAndWatch(api.Empty(), timeout=PATIENCE)


@pytest.fixture
def served(root: Path) -> Iterator[Served]:
    with ExitStack() as stack:
        yield Served(stack, root)


@contextmanager
def blocked(pool: Pool, *names: str) -> Iterator[dict[str, threading.Event]]:
    """Block these calls of the pool in the block. Each event is set when its call hangs."""
    go_on = threading.Event()
    reached = {name: threading.Event() for name in names}

    def hang(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def hanging(*arguments: Any) -> Any:  # noqa: ANN401 - as of the call
            reached[name].set()
            go_on.wait(10 * PATIENCE)
            return call(*arguments)

        return hanging

    for name in names:
        setattr(pool, name, hang(name, getattr(pool, name)))
    try:
        yield reached
    finally:
        go_on.set()
        for name in names:
            delattr(pool, name)


def healthy(answer: api.ListAndWatchResponse) -> int:
    return sum(device.health == "Healthy" for device in answer.devices)


@pytest.mark.parametrize("end", ["cancel", "hang up"])
def test_a_reader_that_is_gone_later_keeps_no_list_from_the_others(
    served: Served, end: str
) -> None:
    plugin = served
    channel = plugin.caller()
    going, staying = plugin.list(channel), plugin.list(plugin.caller())
    assert [healthy(next(each)) for each in (going, staying)] == [4, 4]
    if end == "cancel":
        going.cancel()
    else:
        channel.close()
    plugin.pool.set("2", False)
    plugin.server.changed()  # while the end of the one may not be known yet
    assert healthy(next(staying)) == 3
    until(lambda: plugin.server.state().streams == 1)
    plugin.pool.set("3", False)
    plugin.server.changed()
    assert healthy(next(staying)) == 2


@pytest.mark.parametrize("lists", [0, 1])
def test_a_kubelet_whose_stream_breaks_has_the_list_again(
    kubelet: Kubelet, serve: Serve, lists: int
) -> None:
    """The stream breaks before the first list was read, or after it."""
    pool = Pool()
    kubelet.start()
    with blocked(pool, "listing") as reached:
        if lists == 0:
            server = serve(pool)
            assert reached["listing"].wait(PATIENCE)
            endpoint = kubelet.wait(lambda: kubelet.endpoint(NAME))
            endpoint.close()
    if lists:
        server = serve(pool)
        kubelet.wait(lambda: kubelet.allocatable(NAME) == 4)
        endpoint = kubelet.endpoint(NAME)
        assert endpoint is not None
        endpoint.close()
    kubelet.wait(lambda: kubelet.endpoint(NAME) is not endpoint)
    kubelet.wait(lambda: kubelet.allocatable(NAME) == 4)
    until(lambda: server.state().streams == 1)
    pool.set("1", False)
    server.changed()
    kubelet.wait(lambda: kubelet.allocatable(NAME) == 3)


def test_options_are_answered_while_every_other_call_hangs(served: Served) -> None:
    plugin = served
    channel = plugin.caller()
    stub = v1beta1_pb2_grpc.DevicePluginStub(channel)  # type: ignore[no-untyped-call]
    with blocked(plugin.pool, "listing", "preferred", "allocate") as reached:
        stream = plugin.list(channel)
        asked = api.ContainerPreferredAllocationRequest(
            available_deviceIDs=["0"], allocation_size=1
        )
        wanted = api.ContainerAllocateRequest(devices_ids=["0"])
        choice = stub.GetPreferredAllocation.future(
            api.PreferredAllocationRequest(container_requests=[asked])
        )
        given = stub.Allocate.future(api.AllocateRequest(container_requests=[wanted]))
        for name, event in reached.items():
            assert event.wait(PATIENCE), name
        assert not stub.GetDevicePluginOptions(api.Empty(), timeout=PATIENCE).pre_start_required
    assert list(choice.result(PATIENCE).container_responses[0].deviceIDs) == ["0"]
    assert given.result(PATIENCE).container_responses[0].envs == {"IDS": "0"}
    assert healthy(next(stream)) == 4
