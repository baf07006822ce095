"""The device plugin with a thousand ids: a made-up server of 8 HCAs with 125 slots each.

The plugin and the kubelet stand-in are separate processes; the client makes plain gRPC calls. Each
row is also given as a multiple of an empty call to the same server, which shows the machine's
share. On a virtual machine, CPUs that wake up late or are taken away slow down every row. Such
phases last seconds, so the methods alternate in rounds, and each target has a count of the rounds
that met it.

Allocate writes to disk once. The next row writes a file of the same size in the same way, without
the plugin, so it shows how busy the disk is with other programs' writes.
Run as root: `python -m bench.devices`.
"""

import argparse
import statistics
import tempfile
import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import msgspec

from base import files
from base.paths import Paths
from bench.processes import quantile
from deviceplugin import checkpoint
from deviceplugin.api import v1beta1_pb2, v1beta1_pb2_grpc
from deviceplugin.kubelet.pod_resources import open_channel
from tests.host.deviceplugin.processes import configure, made_server, running
from tests.kubelet import Kubelet
from tests.unit.host import servers

RESOURCE = "rdma/hca"
SLOTS = 125
IDS = SLOTS * len(servers.DGX_HCAS)
ROUNDS = 10
LISTS, CALLS, WRITES, RESTARTS = 100, 500, 100, 10  # per round; restarts in total
MOST_ALLOCATE = 3.5  # times the empty call, in the median


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    measure()


def measure() -> None:
    """Measure and print every row."""
    head = f"{'median':>12}{'p99':>12}{'x empty':>9}"
    print(f"\n{f'device plugin, {IDS} ids, {ROUNDS} rounds':42}{head}", flush=True)
    with _serving() as (paths, kubelet, stub):
        _calls(stub, paths)
        _restarts(kubelet)


@contextmanager
def _serving() -> Iterator[tuple[Paths, Kubelet, v1beta1_pb2_grpc.DevicePluginStub]]:
    """The server with plugin and kubelet. The directories that a node keeps in memory, such as
    /sys and /run, are in memory here too."""
    with (
        tempfile.TemporaryDirectory(prefix="pfb", dir="/dev/shm") as memory,  # short, for sockets
        tempfile.TemporaryDirectory(prefix="pfb", dir="/var/tmp") as state,
    ):
        paths = msgspec.structs.replace(made_server(Path(memory)), state=Path(state))
        configure(paths, {"name": RESOURCE, "slots": SLOTS})
        with Kubelet(paths.kubelet) as kubelet, running(paths):
            kubelet.wait(lambda: kubelet.allocatable(RESOURCE) == IDS)
            endpoint = kubelet.endpoint(RESOURCE)
            assert endpoint is not None
            with open_channel(endpoint.socket) as channel:
                stub = v1beta1_pb2_grpc.DevicePluginStub(channel)  # type: ignore[no-untyped-call]
                yield paths, kubelet, stub


def _calls(stub: v1beta1_pb2_grpc.DevicePluginStub, paths: Paths) -> None:
    """Measure the rows of single calls."""
    choose = v1beta1_pb2.PreferredAllocationRequest(
        container_requests=[
            v1beta1_pb2.ContainerPreferredAllocationRequest(
                available_deviceIDs=_ids(8), allocation_size=8
            )
        ]
    )
    empty: list[list[float]] = []
    lists: list[list[float]] = []
    chosen: list[list[float]] = []
    allocated: list[list[float]] = []
    written: list[list[float]] = []
    for _ in range(ROUNDS):
        empty.append(_times(CALLS, lambda: stub.GetDevicePluginOptions(v1beta1_pb2.Empty())))
        lists.append(_lists(stub))
        chosen.append(_times(CALLS, lambda: stub.GetPreferredAllocation(choose)))
        allocated.append(_allocations(stub, paths))
        written.append(_writes(paths))
    base = statistics.median(chain.from_iterable(empty))
    _row("empty method (GetDevicePluginOptions)", empty, base)
    _row(f"first ListAndWatch of {IDS}", lists, base, 0.050)
    _row("GetPreferredAllocation, 8 of 64, 8 GPUs", chosen, base, 0.005)
    met = sum(
        statistics.median(ours) <= MOST_ALLOCATE * statistics.median(of_round)
        for ours, of_round in zip(allocated, empty, strict=True)
    )
    comment = f"median <= {MOST_ALLOCATE} x empty in {met} of {ROUNDS} rounds"
    _row("Allocate, the checkpoint on disk", allocated, base, comment=comment)
    _row("  writing that file, without the plugin", written, base)


def _lists(stub: v1beta1_pb2_grpc.DevicePluginStub) -> list[float]:
    """Seconds from each call to its first list."""

    def once() -> None:
        call = stub.ListAndWatch(v1beta1_pb2.Empty())
        assert len(next(call).devices) == IDS
        call.cancel()

    return _times(LISTS, once)


def _allocations(stub: v1beta1_pb2_grpc.DevicePluginStub, paths: Paths) -> list[float]:
    """Seconds of each Allocate. An id that is already allocated gets another holder."""
    requests = [
        v1beta1_pb2.AllocateRequest(
            container_requests=[v1beta1_pb2.ContainerAllocateRequest(devices_ids=[id_])]
        )
        for id_ in _ids(SLOTS)[:CALLS]
    ]
    left = iter(requests)
    seconds = timeit.repeat(lambda: stub.Allocate(next(left)), number=1, repeat=CALLS)
    held = checkpoint.read(paths).allocations
    assert {allocation.id for allocation in held} == set(_ids(SLOTS)[:CALLS])
    return seconds


def _writes(paths: Paths) -> list[float]:
    """Seconds to write a file like the checkpoint next to it, and to sync it."""
    content = paths.checkpoint.read_bytes()
    file = paths.devices / "bench"
    seconds = _times(WRITES, lambda: files.write_atomically(file, content, durable=False))
    files.remove(file)
    return seconds


def _restarts(kubelet: Kubelet) -> None:
    """Measure the time from the kubelet's start until the resource is allocatable again."""

    def once() -> None:
        kubelet.start()
        kubelet.wait(lambda: kubelet.allocatable(RESOURCE) == IDS)

    seconds = []
    for number in range(RESTARTS):
        kubelet.stop()
        # The plugin may not have noticed yet that the kubelet has stopped.
        time.sleep(0.3 * (number % 3))
        seconds.append(timeit.timeit(once, number=1))
    _row("kubelet.sock again, until allocatable", [seconds], None, 1.0)


def _ids(each: int) -> list[str]:
    """The first slots of every HCA, alternating between HCAs."""
    return [f"{hca}-{slot}" for slot in range(each) for hca in servers.DGX_HCAS]


def _times(rounds: int, call: Callable[[], object]) -> list[float]:
    """Seconds of each round, after two rounds to warm up. No garbage is collected meanwhile."""
    return timeit.repeat(call, number=1, repeat=rounds + 2)[2:]


def _row(
    label: str,
    rounds: Sequence[Sequence[float]],
    base: float | None,
    target: float | None = None,
    comment: str = "",
) -> None:
    """Print median and p99 of all rounds, the ratio of the medians, and the rounds that met the
    target."""
    seconds = list(chain.from_iterable(rounds))
    median, p99 = statistics.median(seconds), quantile(seconds, 0.99)
    ratio = f"{median / base:9.1f}" if base is not None else f"{'':9}"
    if target is not None:
        met = sum(quantile(of_round, 0.99) < target for of_round in rounds)
        comment = f"p99 < {target * 1e3:.0f} ms in {met} of {len(rounds)} rounds"
    note = f"   {comment}" if comment else ""
    print(f"{label:42}{median * 1e3:9.2f} ms{p99 * 1e3:9.2f} ms{ratio}{note}", flush=True)


if __name__ == "__main__":
    main()
