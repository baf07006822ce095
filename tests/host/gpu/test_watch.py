"""The watch sees real processes in real cgroups that use the stand-in's driver without a shim."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu.driver import nvml
from gpu.driver.nvml import Nvml
from gpu.gpu_pool import Action
from gpu.limits import layout
from gpu.limits.limits_file import Limit
from gpu.limits.living_processes import REMEMBERED
from gpu.watch import gpu_metrics
from gpu.watch.enforcement import Enforcement, OverUse
from gpu.watch.sampled_time import UsedTime
from gpu.watch.usage_watch import TOLERANCE_BYTES, NodeSample, TenantSample, Watch
from tests.host.gpu.driver_root import installed
from tests.host.gpu.pods import GroupsNode, MadeContainer
from tests.standin.driver import Driver, Out
from tests.standin.gpus import GIB, MIB, Behaviour, Failure, Node, gpus
from tests.waiting import PATIENCE, until

CONTEXT = 300 * MIB
TWO = gpus(2, bytes=16 * GIB, reserved_bytes=600 * MIB, context_bytes=CONTEXT)
FIRST, SECOND = (gpu.uuid for gpu in TWO)
MINORS = {FIRST: 0, SECOND: 1}


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Node]:
    with installed(tmp_path / "driver", TWO, Behaviour()) as node:
        yield node


@pytest.fixture
def opened(driver: Node) -> Iterator[Nvml]:
    opened = nvml.open_driver(driver.file.parent)
    yield opened
    opened.close()


@pytest.fixture
def watch(node: GroupsNode) -> Watch:
    of = node.registrar
    return Watch(node.groups, of._tenants, of.living, lambda: MINORS)


def using(node: GroupsNode, driver: Node, container: MadeContainer | None) -> Driver:
    """A process of a container that uses CUDA."""
    process = node.stack.enter_context(Driver(driver.environment))
    if container is not None:
        container.take(process.pid)
    process.start()
    return process


def allocate(process: Driver, size: int) -> int:
    [address] = process.do("cuMemAlloc_v2", Out(8), size)
    return address


def of(sample: NodeSample, group: str) -> TenantSample:
    return next(each for each in sample.tenants if each.tenant.group == group)


def test_drivers_figures_are_attributed_to_containers(
    node: GroupsNode, driver: Node, opened: Nvml, watch: Watch
) -> None:
    limit = Limit(FIRST, 4 * GIB, 0.5)
    a, b = node.container("a", limit=limit), node.container("b", 1, limit=limit)
    node.container("c", limit=Limit(SECOND, 2 * GIB, 1.0))
    allocate(using(node, driver, a), GIB)
    allocate(using(node, driver, a), 2 * GIB)
    allocate(using(node, driver, b), 3 * GIB)
    sample = watch.look(opened)
    assert sample.nvml_up and sample.problem == ""
    assert of(sample, "a").device_bytes == 3 * GIB + 2 * CONTEXT
    assert of(sample, "c").device_bytes == 0
    assert of(sample, "b").device_bytes == 3 * GIB + CONTEXT
    assert [of(sample, "a").limit.compute_share, of(sample, "a").minor] == [0.5, 0]
    assert [gpu.capacity_bytes for gpu in sample.gpus] == [16 * GIB - 600 * MIB] * 2
    assert [gpu.unaccounted for gpu in sample.gpus] == [{}, {}]


def test_the_next_look_after_a_containers_end_shows_nothing_of_it(
    node: GroupsNode, opened: Nvml, watch: Watch
) -> None:
    for group in ("a", "b"):
        node.container(group, limit=Limit(FIRST, GIB, 0.5))
    watch.look(opened)
    node.tenants[:] = [tenant for tenant in node.tenants if tenant.group == "b"]
    sample = watch.look(opened)
    shown = gpu_metrics.families(sample, {}, sample.at, 1e9)
    pods = {each.labels.get("pod") for of in shown for each in of.samples}
    assert pods == {"pod-of-b", None}


def test_a_process_that_holds_no_part_of_a_gpu_is_unaccounted_and_lives(
    node: GroupsNode, driver: Node, opened: Nvml, watch: Watch
) -> None:
    node.container("a", limit=Limit(FIRST, GIB, 1.0))
    stranger = using(node, driver, None)
    allocate(stranger, 2 * GIB)
    enforcement = enforcing(watch, "kill")
    for _ in range(4):
        sample = watch.look(opened)
        enforcement.decide(sample, opened)
    assert sample.gpus[0].unaccounted == {stranger.pid: 2 * GIB + CONTEXT}
    assert of(sample, "a").device_bytes == 0
    assert stranger.process.poll() is None


def enforcing(watch: Watch, action: Action, reported: list[OverUse] | None = None) -> Enforcement:
    reports = reported if reported is not None else []
    return Enforcement(watch.attribution.group_of, reports.append, action=action)


def test_over_use_counts_at_the_second_look_and_is_reported_once(
    node: GroupsNode, driver: Node, opened: Nvml, watch: Watch
) -> None:
    container = node.container("a", limit=Limit(FIRST, GIB, 1.0))
    reported: list[OverUse] = []
    enforcement = enforcing(watch, "report", reported)
    process = using(node, driver, container)
    within = GIB + TOLERANCE_BYTES + GIB // 100 - CONTEXT
    allocate(process, within // (2 * MIB) * 2 * MIB)
    for _ in range(3):
        enforcement.decide(watch.look(opened), opened)
    assert reported == []
    more = allocate(process, 100 * MIB)
    enforcement.decide(watch.look(opened), opened)
    assert reported == []
    for _ in range(3):
        sample = watch.look(opened)
        enforcement.decide(sample, opened)
    assert [(each.tenant.group, each.uuid, each.action) for each in reported] == [
        ("a", FIRST, "report")
    ]
    assert str(reported[0]).startswith("uses 1198 MiB of GPU-00000000-57a0")
    assert 96 * MIB < (of(sample, "a").overuse_bytes or 0) <= 100 * MIB
    assert process.process.poll() is None
    process.do("cuMemFree_v2", more)  # the process ended; the next one is another
    enforcement.decide(watch.look(opened), opened)
    allocate(process, 200 * MIB)
    for _ in range(2):
        enforcement.decide(watch.look(opened), opened)
    assert len(reported) == 2


def test_kill_hits_exactly_the_processes_of_the_container_on_that_gpu(
    node: GroupsNode, driver: Node, opened: Nvml, watch: Watch
) -> None:
    limit = Limit(FIRST, GIB, 1.0)
    a, b = node.container("a", limit=limit), node.container("b", limit=limit)
    over = [using(node, driver, a), using(node, driver, a)]
    allocate(over[0], 2 * GIB)
    elsewhere = node.stack.enter_context(Driver(driver.environment))
    a.take(elsewhere.pid)
    elsewhere.start(device=1)
    neighbour = using(node, driver, b)
    with a.client(node.socket("a")) as without_gpu:
        reported: list[OverUse] = []
        enforcement = enforcing(watch, "kill", reported)
        enforcement.decide(watch.look(opened), opened)
        assert over[0].process.poll() is None
        enforcement.decide(watch.look(opened), opened)
        assert [process.ended()[0] for process in over] == [-signal.SIGKILL] * 2
        for alive in (elsewhere.process, neighbour.process, without_gpu.process):
            assert alive.poll() is None
        assert sorted(reported[0].killed) == sorted(process.pid for process in over)
        assert enforcement.kills == {"a": 2}


def test_overhead_of_a_registered_process_is_reported_to_the_shims(
    node: GroupsNode, driver: Node, opened: Nvml, watch: Watch
) -> None:
    process = using(node, driver, node.container("a", limit=Limit(FIRST, 4 * GIB, 1.0)))
    node.registered("a", 5, process.pid)
    node.claim("a", 5, data=GIB)
    allocate(process, GIB)
    sample = watch.look(opened)
    assert node.groups.read("a").processes[5].overhead_bytes == CONTEXT
    before = (node.groups.root / "a/limits").read_bytes()
    assert of(watch.look(opened), "a").overhead_bytes == CONTEXT
    assert (node.groups.root / "a/limits").read_bytes() == before  # nothing has changed
    assert of(sample, "a").processes == 1


def test_a_lie_about_allocations_makes_no_negative_overhead(
    node: GroupsNode, driver: Node, opened: Nvml, watch: Watch
) -> None:
    process = using(node, driver, node.container("a", limit=Limit(FIRST, 4 * GIB, 1.0)))
    node.registered("a", 5, process.pid)
    node.claim("a", 5, data=2**64 - 1)
    watch.look(opened)
    assert node.groups.read("a").processes[5].overhead_bytes == 0


def test_context_counts_once_with_two_copies_of_the_shim(
    node: GroupsNode, driver: Node, opened: Nvml, watch: Watch
) -> None:
    process = using(node, driver, node.container("a", limit=Limit(FIRST, 4 * GIB, 1.0)))
    for slot, data in ((5, GIB), (2, 2 * GIB)):
        node.registered("a", slot, process.pid)
        node.claim("a", slot, data)
    allocate(process, 3 * GIB)
    watch.look(opened)
    known = node.groups.read("a").processes
    assert (known[2].overhead_bytes, known[5].overhead_bytes) == (CONTEXT, 0)


@pytest.mark.parametrize("size", [0, 100, layout.REGION_SIZE + 10_000_000])
def test_a_tenant_that_destroys_its_region_hides_nothing_and_breaks_no_other_group(
    node: GroupsNode, driver: Node, opened: Nvml, watch: Watch, size: int
) -> None:
    limit = Limit(FIRST, GIB, 1.0)
    a, b = node.container("a", limit=limit), node.container("b", limit=limit)
    over, other = using(node, driver, a), using(node, driver, b)
    for group, process in (("a", over), ("b", other)):
        node.registered(group, 0, process.pid)
    allocate(over, 3 * GIB)
    untouched = (node.groups.root / "b/limits").read_bytes()
    (node.groups.root / "a/region").write_bytes(os.urandom(size))
    enforcement = enforcing(watch, "kill")
    for _ in range(2):
        sample = watch.look(opened)
        enforcement.decide(sample, opened)
    assert over.ended()[0] == -signal.SIGKILL
    assert of(sample, "a").use is None
    assert of(sample, "b").use is not None
    assert other.process.poll() is None
    assert (node.groups.root / "b/limits").read_bytes()[40:104] == untouched[40:104]


def test_unreadable_gpu_does_not_hide_the_other_gpus(
    node: GroupsNode, tmp_path: Path, watch: Watch
) -> None:
    lost = Failure("nvmlDeviceGetComputeRunningProcesses_v3", 1, 15)
    with installed(tmp_path / "driver", TWO, Behaviour(failures=(lost,))) as driver:
        opened = nvml.open_driver(driver.file.parent)
        node.container("a", limit=Limit(FIRST, GIB, 1.0))
        node.container("b", limit=Limit(SECOND, GIB, 1.0))
        sample = watch.look(opened)
        assert not sample.nvml_up and FIRST in sample.problem
        assert of(sample, "a").device_bytes is None
        assert of(sample, "a").overuse_bytes is None
        assert of(sample, "b").device_bytes == 0
        assert [gpu.uuid for gpu in sample.gpus] == [SECOND]
        assert watch.look(opened).nvml_up
        opened.close()


def test_groups_numbers_are_available_without_nvml(node: GroupsNode, watch: Watch) -> None:
    node.container("a")
    sample = watch.look(None, "no driver")
    assert (sample.nvml_up, sample.problem, sample.gpus) == (False, "no driver", ())
    [only] = sample.tenants
    assert only.use is not None and only.device_bytes is None


def test_last_use_of_a_process_counts(node: GroupsNode, watch: Watch) -> None:
    """The driver reports this time in the next tick. Otherwise its group would get its payment
    back."""
    container = node.container("a")
    with container.client(node.socket("a")) as client:
        assert client.register(3)[0] == layout.STATUS_OK
        pid = client.pid
        client.kill()
        until(lambda: node.alive("a") == {}, what="end of the process in the limits")
    used = {FIRST: {pid: UsedTime(0.4)}}
    assert watch.attribution.used_time(used) == {("a", FIRST): UsedTime(0.4)}
    assert watch.attribution.group_of(pid) is None
    assert watch.attribution.memory({FIRST: {pid: GIB}}) == ({}, {FIRST: {pid: GIB}})
    until(lambda: not watch.attribution.used_time(used), REMEMBERED + PATIENCE, "end of that")


def test_wall_clock_set_back_does_not_count_as_idle_time(
    node: GroupsNode, driver: Node, opened: Nvml, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the length of the step, no sample of the driver is newer than the last one."""
    process = using(node, driver, node.container("a", limit=Limit(FIRST, 4 * GIB, 1.0)))
    watch.look(opened)
    module, _ = process.do("cuModuleLoadData", Out(8), b"\0" * 16)
    [function] = process.do("cuModuleGetFunction", Out(8), module, "busy_1s")
    process.do("cuLaunchKernel", function, *(1, 1, 1, 1, 1, 1), 0, None, None, None)
    sampled = watch._sampled
    until(lambda: watch.tick(opened) is not None and sampled[FIRST].since_us, what="sample")
    assert FIRST in watch.measured
    set_back = sampled[FIRST].since_us - 3600 * 10**6
    monkeypatch.setattr(time, "time_ns", lambda: set_back * 1000)
    watch.tick(opened)
    assert FIRST not in watch.measured  # so that nothing is settled
    watch.tick(opened)
    assert FIRST in watch.measured


@pytest.mark.parametrize(
    "limit",
    [
        Limit(FIRST, 4 * GIB, 1.0),
        Limit(FIRST, 4 * GIB, 0.25),
        Limit(FIRST, 64 * GIB, 0.25),
        Limit(FIRST, 64 * GIB, 1.0),
    ],
    ids=["memory", "memory and time", "time", "nothing"],
)
def test_the_time_that_a_container_used_a_gpu_is_seen_with_and_without_limits(
    node: GroupsNode, driver: Node, opened: Nvml, watch: Watch, limit: Limit
) -> None:
    container = node.container("a", limit=limit)
    node.container("idle", limit=limit)
    process = using(node, driver, container)
    watch.look(opened)
    module, _ = process.do("cuModuleLoadData", Out(8), b"\0" * 16)
    [function] = process.do("cuModuleGetFunction", Out(8), module, "busy_1s")

    def seen() -> float:
        process.do("cuLaunchKernel", function, *(1, 1, 1, 1, 1, 1), 0, None, None, None)
        watch.tick(opened)
        sample = watch.look(opened)
        assert of(sample, "idle").utilization == 0
        return of(sample, "a").utilization or 0.0

    assert 0 < until(seen, what="utilization", pause=0.3) <= 1
