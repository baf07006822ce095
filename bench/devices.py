"""The device plugin under a thousand ids: a made-up server of 8 HCAs with 125 slots each.

Plugin and kubelet stand-in are processes of their own; what is timed are gRPC calls of a raw
client. The empty method of the same server is what a call costs at least, so its row says what the
machine adds: a virtual CPU that is woken late, or taken away, is in every row. Such spells last
seconds, so calls are made in rounds, the methods in turn, and of each row is told in how many
rounds the 99th percentile was what it is to be. Run as root: `python -m bench.devices`.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeVar

import grpc
import msgspec

from base.paths import Paths
from bench.processes import quantile
from deviceplugin import checkpoint
from deviceplugin.api import v1beta1_pb2, v1beta1_pb2_grpc
from tests.kubelet import Kubelet
from tests.unit.host import servers

CHECKOUT = Path(__file__).resolve().parent.parent
RESOURCE = "rdma/hca"
SLOTS = 125
IDS = SLOTS * len(servers.DGX_HCAS)
ROUNDS = 10
LISTS, CALLS, RESTARTS = 100, 500, 10  # of a round; restarts in all

T = TypeVar("T")


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    measure()


def measure() -> None:
    """Every row."""
    head = f"{'median':>12}{'p99':>12}{'x empty':>9}"
    print(f"\n{f'device plugin, {IDS} ids, {ROUNDS} rounds':42}{head}", flush=True)
    with _serving("/var/tmp") as (paths, kubelet, stub):
        _calls(stub, paths)
        _restarts(kubelet)
    with _serving("/dev/shm") as (paths, _, stub):
        empty, allocated = [], []
        for _ in range(ROUNDS):
            empty.append(_empty(stub))
            allocated.append(_allocations(stub, paths))
        _row("Allocate, the state in memory", allocated, _median(empty), 0.003)


@contextmanager
def _serving(directory: str) -> Iterator[tuple[Paths, Kubelet, v1beta1_pb2_grpc.DevicePluginStub]]:
    """The server with plugin and kubelet, the state below that directory.

    What a node has in memory is in memory here: /sys, /run, and so on.
    """
    with (
        tempfile.TemporaryDirectory(prefix="pfb", dir="/dev/shm") as memory,  # short, for sockets
        tempfile.TemporaryDirectory(prefix="pfb", dir=directory) as state,
    ):
        paths = msgspec.structs.replace(_server(Path(memory)), state=Path(state))
        with Kubelet(paths.kubelet) as kubelet, _plugin(paths):
            kubelet.wait(lambda: kubelet.allocatable(RESOURCE) == IDS)
            endpoint = kubelet.endpoint(RESOURCE)
            assert endpoint is not None
            with grpc.insecure_channel(f"unix:{endpoint.socket}") as channel:
                stub = v1beta1_pb2_grpc.DevicePluginStub(channel)  # type: ignore[no-untyped-call]
                yield paths, kubelet, stub


def _calls(stub: v1beta1_pb2_grpc.DevicePluginStub, paths: Paths) -> None:
    """The rows of single calls."""
    choose = v1beta1_pb2.PreferredAllocationRequest(
        container_requests=[
            v1beta1_pb2.ContainerPreferredAllocationRequest(
                available_deviceIDs=_ids(8), allocation_size=8
            )
        ]
    )
    empty: list[list[float]] = []
    lists: list[list[float]] = []
    near: list[list[float]] = []
    alone: list[list[float]] = []
    allocated: list[list[float]] = []
    gpus = paths.proc / "driver"
    hidden = gpus.with_name("no-driver")
    for _ in range(ROUNDS):
        empty.append(_empty(stub))
        lists.append(_lists(stub))
        near.append(_times(CALLS, lambda _: stub.GetPreferredAllocation(choose)))
        gpus.rename(hidden)
        alone.append(_times(CALLS, lambda _: stub.GetPreferredAllocation(choose)))
        hidden.rename(gpus)
        allocated.append(_allocations(stub, paths))
    base = _median(empty)
    _row("empty method (GetDevicePluginOptions)", empty, base)
    _row(f"first ListAndWatch of {IDS}", lists, base, 0.050)
    _row("GetPreferredAllocation, 8 of 64, 8 GPUs", near, base, 0.005)
    _row("  no GPUs, so the kubelet is not asked", alone, base, 0.005)
    _row(f"Allocate, {CALLS} one after another", allocated, base, 0.003)


def _empty(stub: v1beta1_pb2_grpc.DevicePluginStub) -> list[float]:
    return _times(CALLS, lambda _: stub.GetDevicePluginOptions(v1beta1_pb2.Empty()))


def _lists(stub: v1beta1_pb2_grpc.DevicePluginStub) -> list[float]:
    """From the call to the first list."""

    def once(_: int) -> None:
        call = stub.ListAndWatch(v1beta1_pb2.Empty())
        assert len(next(call).devices) == IDS
        call.cancel()

    return _times(LISTS, once)


def _allocations(stub: v1beta1_pb2_grpc.DevicePluginStub, paths: Paths) -> list[float]:
    """The seconds of each; an id that is held is given to somebody else."""
    requests = [
        v1beta1_pb2.AllocateRequest(
            container_requests=[v1beta1_pb2.ContainerAllocateRequest(devices_ids=[id_])]
        )
        for id_ in _ids(SLOTS)[:CALLS]
    ]
    seconds = _each(requests, stub.Allocate)
    held = checkpoint.read(paths).allocations
    assert {one.id for one in held} == set(_ids(SLOTS)[:CALLS])
    return seconds


def _restarts(kubelet: Kubelet) -> None:
    """From the begin of the kubelet's start to the resource being allocatable again."""

    def once() -> None:
        kubelet.start()
        kubelet.wait(lambda: kubelet.allocatable(RESOURCE) == IDS)

    seconds = []
    for number in range(RESTARTS):
        kubelet.stop()
        # Either it has noticed that the kubelet is gone, or not yet.
        time.sleep(0.3 * (number % 3))
        seconds.append(_timed(once))
    _row("kubelet.sock again, until allocatable", [seconds], None, 1.0)


def _ids(each: int) -> list[str]:
    """The first slots of every HCA, HCAs in turn."""
    return [f"{hca}-{slot}" for slot in range(each) for hca in servers.DGX_HCAS]


def _times(rounds: int, call: Callable[[int], object]) -> list[float]:
    """The seconds of each round; two to warm up."""
    for number in range(2):
        call(number)
    return _each(range(rounds), call)


def _each(given: Iterable[T], call: Callable[[T], object]) -> list[float]:
    """The seconds of each call. This process collects its garbage before, not meanwhile."""
    gc.collect()
    gc.disable()
    try:
        return [_timed(partial(call, one)) for one in given]
    finally:
        gc.enable()


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _row(
    label: str,
    rounds: Sequence[Sequence[float]],
    base: float | None,
    target: float | None = None,
) -> None:
    """Median and 99th percentile of all rounds, the ratio of the medians; the rounds on target."""
    seconds = list(chain.from_iterable(rounds))
    median, p99 = statistics.median(seconds), quantile(seconds, 0.99)
    ratio = f"{median / base:9.1f}" if base is not None else f"{'':9}"
    told = ""
    if target is not None:
        met = sum(quantile(one, 0.99) < target for one in rounds)
        told = f"   p99 < {target * 1e3:.0f} ms in {met} of {len(rounds)}"
    print(f"{label:42}{median * 1e3:9.2f} ms{p99 * 1e3:9.2f} ms{ratio}{told}", flush=True)


def _median(rounds: Iterable[Sequence[float]]) -> float:
    return statistics.median(chain.from_iterable(rounds))


def _server(root: Path) -> Paths:
    paths = servers.dgx(root, nodes=True)
    boot_id = paths.proc / "sys/kernel/random/boot_id"
    boot_id.parent.mkdir(parents=True)
    boot_id.write_text("9b6b5c1e-0d5a-4a3f-8f0e-6d5b1b1c9d11\n")
    paths.etc.mkdir(exist_ok=True)
    paths.config.write_text(json.dumps({"pools": [{"name": RESOURCE, "slots": SLOTS}]}))
    return paths


@contextmanager
def _plugin(paths: Paths) -> Iterator[None]:
    """`podfabric device-plugin` on those roots, until the end."""
    roots = {f"PODFABRIC_{name.upper()}": str(getattr(paths, name)) for name in _ROOTS}
    log = paths.kubelet.parent / "plugin.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(Path(sys.executable).with_name("podfabric")), "device-plugin"],
            env={**os.environ, **roots},
            cwd=CHECKOUT,
            stderr=output,
        )
    try:
        yield
    except BaseException:
        sys.stderr.write(log.read_text())
        raise
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


_ROOTS = Paths.__struct_fields__


if __name__ == "__main__":
    main()
