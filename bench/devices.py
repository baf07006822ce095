"""The device plugin with a thousand ids: a made-up server of 8 HCAs with 125 slots each.

Plugin and kubelet stand-in are processes of their own; the client makes plain gRPC calls. Each row
is also given as a multiple of an empty call of the same server, which shows what the machine adds:
on a virtual machine, CPUs that wake up late or are taken away slow down every row. Such phases last
seconds, so the methods take turns in rounds, and each target says in how many rounds it was met.

Allocate waits for the disk once. The row below it writes a file of the same size in the same way,
without the plugin: a disk that is busy with others shows there, too.
Run as root: `python -m bench.devices`.
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

import msgspec

from base import files
from base.paths import Paths
from bench.processes import quantile
from deviceplugin import checkpoint
from deviceplugin.api import v1beta1_pb2, v1beta1_pb2_grpc
from deviceplugin.kubelet.channels import open_channel
from tests.kubelet import Kubelet
from tests.unit.host import servers

CHECKOUT = Path(__file__).resolve().parent.parent
RESOURCE = "rdma/hca"
SLOTS = 125
IDS = SLOTS * len(servers.DGX_HCAS)
ROUNDS = 10
LISTS, CALLS, WRITES, RESTARTS = 100, 500, 100, 10  # of a round; restarts in all
MOST_ALLOCATE = 3.5  # times the empty call, in the median

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
        empty, allocated, written = [], [], []
        for _ in range(ROUNDS):
            empty.append(_empty(stub))
            allocated.append(_allocations(stub, paths))
            written.append(_writes(paths))
        base = _median(empty)
        _allocate_row("Allocate, the checkpoint in memory", allocated, empty)
        _row("  writing that file, without the plugin", written, base)


@contextmanager
def _serving(directory: str) -> Iterator[tuple[Paths, Kubelet, v1beta1_pb2_grpc.DevicePluginStub]]:
    """The server with plugin and kubelet, its state below that directory.

    Directories that a node has in memory, such as /sys and /run, are in memory here.
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
            with open_channel(endpoint.socket) as channel:
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
    written: list[list[float]] = []
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
        written.append(_writes(paths))
    base = _median(empty)
    _row("empty method (GetDevicePluginOptions)", empty, base)
    _row(f"first ListAndWatch of {IDS}", lists, base, 0.050)
    _row("GetPreferredAllocation, 8 of 64, 8 GPUs", near, base, 0.005)
    _row("  no GPUs, so the kubelet is not asked", alone, base, 0.005)
    _allocate_row("Allocate, the checkpoint on disk", allocated, empty)
    _row("  writing that file, without the plugin", written, base)


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
    """The seconds of each. An id that is allocated already gets another holder."""
    requests = [
        v1beta1_pb2.AllocateRequest(
            container_requests=[v1beta1_pb2.ContainerAllocateRequest(devices_ids=[id_])]
        )
        for id_ in _ids(SLOTS)[:CALLS]
    ]
    seconds = _each(requests, stub.Allocate)
    held = checkpoint.read(paths).allocations
    assert {allocation.id for allocation in held} == set(_ids(SLOTS)[:CALLS])
    return seconds


def _writes(paths: Paths) -> list[float]:
    """The seconds of writing a file like the checkpoint beside it, until it is on disk."""
    content = paths.checkpoint.read_bytes()
    file = paths.devices / "bench"
    seconds = _times(WRITES, lambda _: files.write_atomically(file, content, durable=False))
    files.remove(file)
    return seconds


def _restarts(kubelet: Kubelet) -> None:
    """From the kubelet's start until the resource is allocatable again."""

    def once() -> None:
        kubelet.start()
        kubelet.wait(lambda: kubelet.allocatable(RESOURCE) == IDS)

    seconds = []
    for number in range(RESTARTS):
        kubelet.stop()
        # The plugin may or may not have noticed yet that the kubelet is gone.
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


def _each(arguments: Iterable[T], call: Callable[[T], object]) -> list[float]:
    """The seconds of each call. Garbage is collected before them, not meanwhile."""
    gc.collect()
    gc.disable()
    try:
        return [_timed(partial(call, argument)) for argument in arguments]
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
    comment: str = "",
) -> None:
    """Print median and p99 of all rounds, the ratio of the medians, and the rounds on target."""
    seconds = list(chain.from_iterable(rounds))
    median, p99 = statistics.median(seconds), quantile(seconds, 0.99)
    ratio = f"{median / base:9.1f}" if base is not None else f"{'':9}"
    if target is not None:
        met = sum(quantile(of_round, 0.99) < target for of_round in rounds)
        comment = f"p99 < {target * 1e3:.0f} ms in {met} of {len(rounds)} rounds"
    note = f"   {comment}" if comment else ""
    print(f"{label:42}{median * 1e3:9.2f} ms{p99 * 1e3:9.2f} ms{ratio}{note}", flush=True)


def _allocate_row(
    label: str, rounds: Sequence[Sequence[float]], empty: Sequence[Sequence[float]]
) -> None:
    """Print a row whose target is a multiple of the empty call in the same round."""
    met = sum(
        statistics.median(allocated) <= MOST_ALLOCATE * statistics.median(of_round)
        for allocated, of_round in zip(rounds, empty, strict=True)
    )
    comment = f"median <= {MOST_ALLOCATE} x empty in {met} of {len(rounds)} rounds"
    _row(label, rounds, _median(empty), comment=comment)


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
