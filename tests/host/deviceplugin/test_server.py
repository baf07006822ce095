"""A pool's gRPC server, called correctly and incorrectly."""

import functools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from base.paths import Paths
from deviceplugin.api import v1beta1_pb2 as api
from deviceplugin.api import v1beta1_pb2_grpc
from deviceplugin.kubelet import plugin_server
from deviceplugin.kubelet.plugin_server import Streams
from deviceplugin.kubelet.plugin_sockets import Listener
from deviceplugin.kubelet.pod_resources import open_channel
from deviceplugin.kubelet.registration import PluginServer
from tests.host.deviceplugin.pool import Pool
from tests.kubelet import Kubelet
from tests.waiting import PATIENCE


class Plugin:
    """A pool that is served but not registered, and its client."""

    def __init__(self, root: Path, pool: Pool) -> None:
        (root / "device-plugins").mkdir(parents=True)
        self.pool = pool
        self.server = PluginServer(Paths(kubelet=root), pool)
        self.server.start()
        self.wait = Kubelet(root).wait
        self.wait(lambda: self.server.state().socket)
        self.channel = open_channel(Path(self.server.state().socket), max_receive=-1)
        self.stub = v1beta1_pb2_grpc.DevicePluginStub(self.channel)  # type: ignore[no-untyped-call]

    def watch(self) -> Any:  # noqa: ANN401 - grpc has no public name for it
        """A stream of lists, with `cancel`."""
        return self.stub.ListAndWatch(api.Empty(), timeout=PATIENCE)

    def allocate(self, *requests: list[str]) -> api.AllocateResponse:
        """Call Allocate once."""
        answer: api.AllocateResponse = self.stub.Allocate(
            api.AllocateRequest(
                container_requests=[
                    api.ContainerAllocateRequest(devices_ids=ids) for ids in requests
                ]
            )
        )
        return answer

    def preferred(self, available: list[str], must_include: list[str], size: int) -> list[str]:
        """Call GetPreferredAllocation once."""
        answer = self.stub.GetPreferredAllocation(
            api.PreferredAllocationRequest(
                container_requests=[
                    api.ContainerPreferredAllocationRequest(
                        available_deviceIDs=available,
                        must_include_deviceIDs=must_include,
                        allocation_size=size,
                    )
                ]
            )
        )
        return list(answer.container_responses[0].deviceIDs)


@pytest.fixture
def plugin(root: Path) -> Iterator[Plugin]:
    """Four devices, served."""
    plugin = Plugin(root, Pool())
    yield plugin
    plugin.channel.close()
    plugin.server.close()


def shown(answer: api.ListAndWatchResponse) -> dict[str, str]:
    return {device.ID: device.health for device in answer.devices}


def test_many_changes_make_few_lists_and_the_last_is_the_newest(plugin: Plugin) -> None:
    stream = plugin.watch()
    next(stream)
    began = time.monotonic()
    for number in range(200):
        plugin.pool.devices = [(str(index), True, ()) for index in range(number + 5)]
        plugin.server.changed()
    lists = 0
    for answer in stream:
        lists += 1
        if len(answer.devices) == 204:
            break
    assert lists <= 2 + (time.monotonic() - began) / plugin_server.COALESCE


def test_a_list_that_does_not_differ_is_not_sent(plugin: Plugin) -> None:
    stream = plugin.watch()
    next(stream)
    plugin.pool.set("1", False)
    plugin.pool.set("1", True)
    plugin.server.changed()  # it is compared from here on
    plugin.server.changed()
    time.sleep(plugin_server.COALESCE * 2)  # it would have been sent by now
    plugin.pool.set("3", False)
    plugin.server.changed()
    assert shown(next(stream))["3"] == "Unhealthy"


def test_a_list_is_sent_again_if_it_is_wanted(plugin: Plugin) -> None:
    """A repeated list makes the kubelet write its checkpoint."""
    first, second = plugin.watch(), plugin.watch()
    before = next(first), next(second)
    plugin.server.changed(again=True)
    plugin.server.changed()
    assert (next(first), next(second)) == before
    plugin.server.changed()
    time.sleep(plugin_server.COALESCE * 2)  # it would have been sent again by now
    plugin.pool.set("3", False)
    plugin.server.changed()
    assert shown(next(first))["3"] == "Unhealthy"


def test_streams_without_end_keep_no_other_call_from_its_answer(plugin: Plugin) -> None:
    readers = []
    for _ in range(plugin_server.MOST_STREAMS + 5):
        readers.append(plugin.watch())
        next(readers[-1])
    plugin.wait(lambda: plugin.server.state().streams == plugin_server.MOST_STREAMS)
    assert plugin.stub.GetDevicePluginOptions(
        api.Empty(), timeout=PATIENCE
    ).get_preferred_allocation_available
    assert plugin.allocate(["0"]).container_responses[0].envs == {"IDS": "0"}
    assert [list(reader) for reader in readers[:5]] == [[]] * 5  # the oldest streams were ended


def test_a_list_that_cannot_be_made_is_sent_once_it_can(plugin: Plugin) -> None:
    plugin.pool.broken.add("listing")
    stream = plugin.watch()
    time.sleep(plugin_server.COALESCE)  # so that it is tried first
    plugin.pool.broken.clear()
    plugin.server.changed()
    assert len(shown(next(stream))) == 4


@pytest.mark.parametrize(
    ("numa", "sent"), [((), None), ((-1,), None), ((0,), [0]), ((1, 0, 1), [0, 1]), ((-1, 2), [2])]
)
def test_only_existing_numa_nodes_are_listed(
    plugin: Plugin, numa: tuple[int, ...], sent: list[int] | None
) -> None:
    plugin.pool.devices = [("0", True, numa)]
    (device,) = next(plugin.watch()).devices
    assert device.HasField("topology") is (sent is not None)
    assert [node.ID for node in device.topology.nodes] == (sent or [])


def test_a_thousand_devices_are_listed(plugin: Plugin) -> None:
    plugin.pool.devices = [
        (f"0000:3b:00.0-{number}", number != 7, (number % 2,)) for number in range(1000)
    ]
    first = next(plugin.watch())
    assert len(first.devices) == 1000
    assert first.devices[7].health == "Unhealthy"


@pytest.mark.parametrize(
    ("requests", "answers"),
    [
        ([], []),
        ([["1"]], [{"IDS": "1"}]),
        ([["1", "0"], ["3"]], [{"IDS": "0,1"}, {"IDS": "3"}]),
        ([[]], [{}]),
        ([["2"], [], ["2"]], [{"IDS": "2"}, {}, {"IDS": "2"}]),
    ],
)
def test_every_container_request_has_its_response_in_order(
    plugin: Plugin, requests: list[list[str]], answers: list[dict[str, str]]
) -> None:
    got = plugin.allocate(*requests).container_responses
    assert [dict(device.envs) for device in got] == answers


@pytest.mark.parametrize(
    ("ids", "code", "text"),
    [
        (["9"], grpc.StatusCode.INVALID_ARGUMENT, "rdma/hca: 9: the pool has no such device"),
        (["0", "3"], grpc.StatusCode.FAILED_PRECONDITION, "rdma/hca: 3: is not healthy"),
        (["broken"], grpc.StatusCode.INTERNAL, "rdma/hca: RuntimeError: allocate is broken"),
    ],
)
def test_refused_allocation_has_a_reason(
    plugin: Plugin, ids: list[str], code: grpc.StatusCode, text: str
) -> None:
    plugin.pool.set("3", False)
    plugin.pool.broken.update(["allocate"] if ids == ["broken"] else [])
    with pytest.raises(grpc.RpcError) as raised:
        plugin.allocate(["0"], ids)
    assert raised.value.code() is code
    assert raised.value.details() == text
    plugin.pool.broken.clear()
    assert plugin.allocate(["0"]).container_responses


@pytest.mark.parametrize(
    ("available", "must_include", "size", "answer"),
    [
        (["0", "1", "2"], [], 2, ["0", "1"]),
        (["0", "1", "2"], ["2"], 2, ["2", "0"]),
        (["0", "1", "2"], ["2", "1"], 1, ["2"]),
        (["0", "1", "2"], [], 0, []),
        (["0", "1", "2"], [], -1, []),
        (["0", "1", "2"], [], 9, ["0", "1", "2"]),
        (["0", "1"], ["9"], 2, ["0", "1"]),
        (["0", "0", "1"], ["1", "1"], 2, ["1", "0"]),
        ([], [], 3, []),
    ],
)
def test_a_preference_that_fails_is_a_guess_and_no_error(
    plugin: Plugin, available: list[str], must_include: list[str], size: int, answer: list[str]
) -> None:
    plugin.pool.broken.add("preferred")
    assert plugin.preferred(available, must_include, size) == answer


def test_a_question_larger_than_grpcs_own_limit_is_answered(plugin: Plugin) -> None:
    available = [f"{number:063}" for number in range(100_000)]
    assert len(plugin.preferred(available, [], 1)) == 1


def test_pre_start_calls_the_pool_and_reports_its_failure(plugin: Plugin) -> None:
    request = api.PreStartContainerRequest(devices_ids=["1", "2"])
    plugin.stub.PreStartContainer(request, timeout=PATIENCE)
    assert plugin.pool.started == [["1", "2"]]
    plugin.pool.broken.add("pre_start")
    with pytest.raises(grpc.RpcError, match="pre_start is broken"):
        plugin.stub.PreStartContainer(request, timeout=PATIENCE)


def test_readers_see_the_end_when_the_pool_is_closed(plugin: Plugin) -> None:
    stream = plugin.watch()
    next(stream)
    plugin.server.close()
    assert list(stream) == []
    assert plugin.server.state().streams == 0
    assert plugin.server.state().socket == ""


def test_a_stream_that_opens_while_the_pool_is_closed_does_not_hold_it_up(
    plugin: Plugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has accepted the call, and its handler runs after all streams were ended."""
    accepted, ended = threading.Event(), threading.Event()
    turns, end_streams = Streams.turns, Streams.end

    def open_late(streams: Streams, context: grpc.ServicerContext) -> Iterator[bool]:
        accepted.set()
        assert ended.wait(PATIENCE)
        return turns(streams, context)

    def end(streams: Streams) -> None:
        end_streams(streams)
        ended.set()

    monkeypatch.setattr(Streams, "turns", open_late)
    monkeypatch.setattr(Streams, "end", end)
    patient = functools.partialmethod(Listener.close, grace=10 * PATIENCE)
    monkeypatch.setattr(Listener, "close", patient)
    stream = plugin.watch()
    assert accepted.wait(PATIENCE)
    closing = threading.Thread(target=plugin.server.close)
    closing.start()
    closing.join(PATIENCE)
    hung = closing.is_alive()
    stream.cancel()
    closing.join()
    assert not hung
