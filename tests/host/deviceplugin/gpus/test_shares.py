"""Pools of mode slices and units on real sockets: each container has one GPU, with room for it."""

import inspect
import random
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

from agent.observe.metrics import Lasting
from base.paths import Paths
from deviceplugin import checkpoint, ledger, plugin
from deviceplugin.kubelet import records
from gpu import limit_service
from gpu.gpu_pool import GpuPoolConfig, Shape
from tests.host.deviceplugin.gpus.gpu_node import (
    COMPUTE,
    GIB,
    MEMORY,
    GpuNode,
    await_restarted,
    bound,
    compared,
    container,
    edits,
    given,
    gpu_node_of,
    units,
)
from tests.kubelet.devices import FirstOne, NotStarted, PodRejected
from tests.kubelet.kubelet import Kubelet
from tests.unit.host.servers import gpu_uuid
from tests.waiting import until

SMALL, LARGE = "podfabric.io/gpu-2g-25", "podfabric.io/gpu-4g-50"


@pytest.fixture
def node(paths: Paths, kubelet: Kubelet) -> Iterator[GpuNode]:
    """Two GPUs with 8 units of memory each."""
    new_node = GpuNode(paths, [units(8)])
    kubelet.wait(lambda: kubelet.allocatable(MEMORY) == 16 and kubelet.allocatable(COMPUTE) == 200)
    yield new_node
    new_node.plugin.close()


@pytest.fixture
def slices(paths: Paths, kubelet: Kubelet) -> Iterator[GpuNode]:
    """Two GPUs of 8 GiB, in slices of two shapes."""
    shapes = (
        Shape(resource=SMALL, memory=2 * GIB, compute=25),
        Shape(resource=LARGE, memory=4 * GIB, compute=50),
    )
    new_node = GpuNode(paths, [GpuPoolConfig(shapes=shapes, memory=8 * GIB, reserve=0)])
    kubelet.wait(lambda: kubelet.allocatable(SMALL) == 8 and kubelet.allocatable(LARGE) == 4)
    yield new_node
    new_node.plugin.close()


def first_of_two(seed: int) -> str:
    """The one of both resources that a kubelet with this seed allocates first."""
    order = [MEMORY, COMPUTE]
    random.Random(seed).shuffle(order)
    return order[0]


def states(node: GpuNode) -> dict[Path, tuple[int, ...]]:
    """The identity of each of the groups' files, which changes with a write or a replacement."""
    found = {path: path.stat() for path in (node.paths.run / "gpu").rglob("*")}
    return {path: (of.st_ino, of.st_mtime_ns, of.st_ctime_ns) for path, of in found.items()}


@pytest.mark.parametrize("first", [MEMORY, COMPUTE])
def test_alnairs_pod_has_memory_and_time_of_one_gpu_in_both_orders(
    paths: Paths, first: str
) -> None:
    seed = next(seed for seed in range(99) if first_of_two(seed) == first)
    with Kubelet(paths.kubelet, seed=seed) as kubelet:
        node = GpuNode(paths, [units(8)])
        try:
            kubelet.wait(lambda: kubelet.allocatable(MEMORY) and kubelet.allocatable(COMPUTE))
            pod = kubelet.admit("trainer", [container(memory=2, compute=50)])
            calls = [call.resource for call in kubelet.calls if call.method == "Allocate"]
            assert calls[0] == first
            assert bound(paths) == {gpu_uuid(0): (2, 50)}
            (limits,) = node.groups.limits().values()
            assert limits == (gpu_uuid(0), 2 * GIB, 0.5)
            assert gpu_node_of(edits(paths, pod)) == "/dev/nvidia0"
        finally:
            node.plugin.close()


def test_containers_have_alnairs_variables(node: GpuNode, kubelet: Kubelet) -> None:
    pods = [kubelet.admit(name, [container(memory=2, compute=30)]) for name in ("a", "b")]
    pods.append(kubelet.admit("c", [container(memory=1)]))
    variables = [dict(each.split("=") for each in edits(node.paths, pod)["env"]) for pod in pods]
    time = "ALNAIR_VGPU_COMPUTE_PERCENTILE"
    assert [each.get(time) for each in variables] == ["30", "30", None]
    assert {each["ALNAIR_ID"] for each in variables} == node.groups.limits().keys()
    assert len(node.groups.limits()) == 3
    assert {*chain.from_iterable(variables)} - {"NVIDIA_VISIBLE_DEVICES"} == {time, "ALNAIR_ID"}


def test_container_sees_its_limits_and_cannot_change_them(node: GpuNode, kubelet: Kubelet) -> None:
    pod = kubelet.admit("trainer", [container(memory=2, compute=50)])
    mounts = edits(node.paths, pod)["mounts"]
    (group,) = node.groups.limits()
    directory = node.paths.run / "gpu" / group
    assert {
        mount["containerPath"]: (mount["hostPath"], mount["options"][0]) for mount in mounts
    } == {
        "/run/podfabric/gpu/limits": (str(directory / "limits"), "ro"),
        "/run/podfabric/gpu/region": (str(directory / "region"), "rw"),
        "/run/podfabric/gpu/agent": (str(directory / "agent"), "ro"),
    }
    assert {gpu.group for gpu in given(node.paths)} == {group}


@pytest.mark.parametrize("first", [MEMORY, COMPUTE])
@pytest.mark.parametrize(
    ("gib", "held", "left"),
    [(3, 0, "3 GiB and 100 %"), (8, 5, "3 GiB and 70 %")],
    ids=["small GPUs", "partly used GPUs"],
)
def test_request_that_fits_on_no_gpu_is_refused_with_the_room_of_each_and_leaves_nothing(
    paths: Paths,
    gib: int,
    held: int,
    left: str,
    first: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both GPUs together have room for it, so the kubelet has the ids for the request."""
    with Kubelet(paths.kubelet) as kubelet:
        kubelet._manager._choice = FirstOne(first)
        node = GpuNode(paths, [units(gib)])
        try:
            kubelet.wait(lambda: kubelet.allocatable(MEMORY) == 2 * gib)
            kubelet.wait(lambda: kubelet.allocatable(COMPUTE) == 200)
            for number in range(2 if held else 0):
                kubelet.admit(f"holder-{number}", [container(memory=held, compute=30)])
            before = checkpoint.read(paths).allocations
            with pytest.raises(PodRejected) as refused:
                kubelet.admit("trainer", [container(memory=4, compute=40)])
            text = str(refused.value)
            assert "no GPU has 4 GiB free" in text
            assert f"nvidia0 has {left}; nvidia1 has {left}" in text
            left_over = [of for of in checkpoint.read(paths).allocations if of not in before]
            # The kubelet itself frees the time that was allocated before.
            assert {of.resource for of in left_over} <= {first} - {MEMORY}
            monkeypatch.setattr(ledger, "YOUNG_GPU", 0.0)
            until(lambda: compared(node) == before, what="end of what the refused pod had")
            assert len(node.groups.limits()) == (2 if held else 0)
            kubelet.admit("modest", [container(memory=3, compute=40)])
            sums = bound(paths)
            assert sum(memory for memory, _ in sums.values()) == 2 * held + 3
            assert max(memory for memory, _ in sums.values()) <= gib
        finally:
            node.plugin.close()


def test_ids_of_two_gpus_are_memory_of_one(node: GpuNode, kubelet: Kubelet) -> None:
    """A kubelet may choose any ids."""
    endpoint = kubelet.endpoint(MEMORY)
    assert endpoint is not None
    endpoint.allocate([f"{gpu_uuid(0)}_0", f"{gpu_uuid(1)}_0"])
    assert len(bound(node.paths)) == 1


def test_time_alone_is_refused(node: GpuNode, kubelet: Kubelet) -> None:
    with pytest.raises(
        NotStarted, match=r"requests GPU time .alnair/vgpu-compute. but no GPU memory"
    ):
        kubelet.admit("trainer", [container(compute=50)])


def test_more_time_than_is_left_is_refused_at_admission(node: GpuNode, kubelet: Kubelet) -> None:
    endpoint = kubelet.endpoint(COMPUTE)
    assert endpoint is not None
    kubelet.admit("first", [container(memory=1, compute=80)])
    with pytest.raises(Exception, match="no GPU has 101 % of its time free"):
        endpoint.allocate(
            [f"{gpu_uuid(number)}_{i}" for number in (0, 1) for i in range(20, 71)][:101]
        )


def test_memory_alone_has_no_limit_of_time(node: GpuNode, kubelet: Kubelet) -> None:
    kubelet.admit("trainer", [container(memory=3)])
    (limits,) = node.groups.limits().values()
    assert limits == (gpu_uuid(0), 3 * GIB, 1.0)


def test_containers_of_a_pod_have_limits_of_their_own(node: GpuNode, kubelet: Kubelet) -> None:
    containers = [container("a", memory=2, compute=20), container("b", memory=3, compute=30)]
    kubelet.admit("trainer", containers)
    assert sorted(limits[1:] for limits in node.groups.limits().values()) == [
        (2 * GIB, 0.2),
        (3 * GIB, 0.3),
    ]


def test_restart_changes_nothing_of_a_running_container(node: GpuNode, kubelet: Kubelet) -> None:
    pod = kubelet.admit("trainer", [container(memory=2, compute=50)])
    files = states(node)
    before = given(node.paths)
    node.groups.gone.clear()
    node.restart()
    await_restarted(kubelet)
    kubelet.wait(lambda: kubelet.allocatable(MEMORY) == 16)
    assert given(node.paths) == before
    assert states(node) == files
    assert node.groups.gone == []
    kubelet.run(pod)  # the container is started again
    assert given(node.paths) == before


def test_a_pod_that_is_gone_holds_nothing_and_is_in_no_metric_within_half_a_minute(
    node: GpuNode, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in comparisons with the kubelet, which run every few seconds. At the first one the
    kubelet writes its checkpoint; at the second one the pod is gone. The next look has no series
    of it (`test_watch`), and a scrape is renewed after a second."""
    pod = kubelet.admit("trainer", [container(memory=2, compute=50)])
    monkeypatch.setattr(ledger, "YOUNG_GPU", 0.0)
    node.plugin.compare()
    assert [tenant.pod.name for tenant in node.plugin.tenants()] == ["trainer"]
    assert len(node.groups.limits()) == 1
    kubelet.remove(pod)
    node.plugin.compare()
    until(lambda: not records.from_checkpoint(node.paths), what="the kubelet's checkpoint")
    node.plugin.compare()
    assert (node.plugin.tenants(), given(node.paths), node.groups.limits()) == ([], [], {})


def test_series_of_a_pod_last_half_a_minute_at_most_by_the_periods() -> None:
    scrape = inspect.signature(Lasting).parameters["seconds"].default
    after = 2 * plugin.COMPARE_SHARES + limit_service.LOOK + scrape
    assert max(after, ledger.YOUNG_GPU + after - plugin.COMPARE_SHARES) <= 30


def test_slot_that_is_given_again_has_a_new_group(node: GpuNode, kubelet: Kubelet) -> None:
    """Memory that an earlier holder left in the region must not be charged to the next one."""
    pod = kubelet.admit("first", [container(memory=8)])
    (group,) = node.groups.limits()
    region = node.paths.run / "gpu" / group / "region"
    region.write_text("of the first")
    kubelet.remove(pod)
    kubelet.admit("second", [container(memory=8)])
    kubelet.admit("third", [container(memory=8)])
    assert [path.read_text() for path in (node.paths.run / "gpu").glob("*/region")] == ["", ""]


def test_full_disk_at_the_start_is_an_error_and_the_next_start_succeeds(
    node: GpuNode, kubelet: Kubelet
) -> None:
    pod = kubelet.admit("trainer", [container(memory=2, compute=50)], start=False)
    node.groups.broken = True
    with pytest.raises(NotStarted, match="No space left on device"):
        kubelet.run(pod)
    node.groups.broken = False
    kubelet.run(pod)
    (limits,) = node.groups.limits().values()
    assert limits == (gpu_uuid(0), 2 * GIB, 0.5)


def test_slice_is_memory_and_time(slices: GpuNode, kubelet: Kubelet) -> None:
    kubelet.admit("trainer", [container(others={SMALL: 1})])
    (limits,) = slices.groups.limits().values()
    assert limits == (gpu_uuid(0), 2 * GIB, 0.25)


def test_two_slices_of_a_container_are_of_one_gpu(slices: GpuNode, kubelet: Kubelet) -> None:
    kubelet.admit("first", [container(others={SMALL: 3})])
    kubelet.admit("second", [container(others={SMALL: 2})])
    assert bound(slices.paths) == {gpu_uuid(0): (6, 75), gpu_uuid(1): (4, 50)}


def test_slices_of_the_other_shape_become_unhealthy_as_room_is_used(
    slices: GpuNode, kubelet: Kubelet
) -> None:
    kubelet.admit("first", [container(others={LARGE: 1})])
    kubelet.wait(lambda: kubelet.allocatable(SMALL) == 6)
    kubelet.admit("second", [container(others={SMALL: 1})])
    kubelet.wait(lambda: kubelet.allocatable(LARGE) == 3)  # one of them is held
    assert kubelet.capacity(LARGE) == 4


def test_slice_that_does_not_fit_is_refused_though_the_kubelet_has_an_old_list(
    slices: GpuNode, kubelet: Kubelet
) -> None:
    for number in range(3):
        kubelet.admit(f"large-{number}", [container(others={LARGE: 1})])
    small = kubelet.endpoint(SMALL)
    assert small is not None
    ids = sorted(kubelet.devices(SMALL))
    small.allocate(ids[:2])
    with pytest.raises(Exception, match="no GPU has 2 GiB and 25 % of its time free"):
        small.allocate(ids[2:3])


def test_slices_of_two_shapes_are_refused(slices: GpuNode, kubelet: Kubelet) -> None:
    with pytest.raises(NotStarted, match="slices of one shape only"):
        kubelet.admit("trainer", [container(others={SMALL: 1, LARGE: 1})])
