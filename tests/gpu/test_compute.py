"""Shares of a GPU's time: processes behind the shim, on a simulated GPU, with the controller."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from tests import waiting
from tests.gpu.compute import Shared, Tenant
from tests.gpu.group import Libraries
from tests.standin.driver import Driver, Out

MS = 1_000_000  # nanoseconds
THREAD_LOCAL, GLOBAL = 1, 0  # CUstreamCaptureMode


@pytest.fixture
def shared(tmp_path: Path, libraries: Libraries) -> Iterator[Shared]:
    with ExitStack() as stack:
        yield Shared(tmp_path, libraries, stack)


@pytest.mark.parametrize(("first", "second"), [("work_5ms", "work_5ms"), ("work_1ms", "work_40ms")])
def test_groups_get_thirty_and_seventy_hundredths_of_the_time(
    shared: Shared, first: str, second: str
) -> None:
    shared.add("a", 0.3)
    shared.add("b", 0.7)
    shared.start("a", first)
    shared.start("b", second)
    shared.settle(a=0.3, b=0.7)


@pytest.mark.parametrize("kernel", ["work_1ms", "work_40ms"])
@pytest.mark.parametrize("kappa", [8.0, 1 / 8])
def test_prices_that_are_wrong_by_eight_times_come_right(
    shared: Shared, kernel: str, kappa: float
) -> None:
    shared.add("a", 0.3)
    shared.add("b", 0.3)
    for tenant in shared.tenants.values():
        tenant.state = msgspec.structs.replace(tenant.state, kappa=kappa)
        tenant.write()
    shared.start("a", kernel)
    shared.start("b", kernel)
    shared.settle(a=0.3, b=0.3)


def test_four_processes_of_a_group_share_what_the_group_has(shared: Shared) -> None:
    shared.add("four", 0.5)
    shared.add("one", 0.5)
    for _ in range(4):
        shared.start("four", "work_5ms")
    shared.start("one", "work_5ms")
    shared.settle(four=0.5, one=0.5)
    accounts = shared.node.read()
    used = [accounts.process(one.pid).gpus[0].busy_ns for one in shared.tenants["four"].processes]
    assert min(used) > 0


def test_without_shares_four_processes_get_four_times_as_much(shared: Shared) -> None:
    """The stand-in itself does not limit the processes. Otherwise the tests above would show
    nothing.
    """
    shared.add("four", 1.0)
    shared.add("one", 1.0)
    for _ in range(4):
        shared.start("four", "work_5ms")
    shared.start("one", "work_5ms")
    shared.settle(four=0.8, one=0.2)


def test_a_fixed_share_is_no_more_although_the_gpu_is_idle_beside_it(shared: Shared) -> None:
    shared.add("a", 0.3)
    shared.add("idle", 0.7)
    shared.start("a", "work_2ms")
    shared.settle(a=0.3)


@pytest.mark.early
def test_a_group_is_killed_while_it_waits_and_the_others_go_on(shared: Shared) -> None:
    shared.add("a", 0.1)
    shared.add("b", 0.5)
    killed = shared.start("a", "work_20ms")
    shared.start("b", "work_5ms")
    use = shared.tenants["a"].use
    waiting.until(lambda: use().throttled > 0, what="launch that waited")
    killed.kill()
    killed.wait()
    shared.settle(a=0.0, b=0.5)
    shared.start("a", "work_20ms")
    shared.settle(a=0.1, b=0.5)


def test_a_process_that_ends_leaves_nothing_unfinished(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant, driver = _session(shared, monkeypatch)
    module, _ = driver.do("cuModuleLoadData", Out(8), b"image")
    [kernel] = driver.do("cuModuleGetFunction", Out(8), module, "work_2ms")
    for _ in range(3):
        driver.do("cuLaunchKernel", kernel, 1, 1, 1, 1, 1, 1, 0, None, None, None)
    assert tenant.use().finished_ns < tenant.use().launched_ns
    driver.ended()
    use = tenant.use()
    assert (use.finished_ns, use.paid_finished_ns) == (use.launched_ns, use.paid_ns)


# ---- graphs


def _session(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> tuple[Tenant, Driver]:
    """A group with a hundredth of the GPU, and a process of it."""
    tenant = shared.add("a", 0.01)
    monkeypatch.chdir(tenant.directory)
    return tenant, shared.driver()


def _captured(driver: Driver, mode: int) -> tuple[int, int, int]:
    """A stream, an executable graph of three kernels of 2 ms on it, and the kernel."""
    module, _ = driver.do("cuModuleLoadData", Out(8), b"image")
    [kernel] = driver.do("cuModuleGetFunction", Out(8), module, "work_2ms")
    [stream] = driver.do("cuStreamCreate", Out(8), 1)
    driver.do("cuStreamBeginCapture_v2", stream, mode)
    for _ in range(3):
        driver.do("cuLaunchKernel", kernel, 1, 1, 1, 1, 1, 1, 0, stream, None, None)
    [graph] = driver.do("cuStreamEndCapture", stream, Out(8))
    [executable] = driver.do("cuGraphInstantiateWithFlags", Out(8), graph, 0)
    return stream, executable, kernel


@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL])
def test_a_launch_into_a_graph_is_legal_and_costs_nothing_until_the_graph_is_launched(
    shared: Shared, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    tenant, driver = _session(shared, monkeypatch)
    stream, executable, _ = _captured(driver, mode)
    assert tenant.use().tat == 0
    driver.do("cuGraphLaunch", executable, stream)
    driver.do("cuStreamSynchronize", stream)
    first = tenant.use().tat
    assert first > 0
    driver.do("cuGraphLaunch", executable, stream)
    driver.do("cuStreamSynchronize", stream)
    driver.do("cuGraphLaunch", executable, stream)  # two are measured
    assert tenant.use().longest_ns == pytest.approx(6 * MS, rel=0.5)
    assert tenant.use().tat - first >= 2 * 6 * MS * 100 * 0.5
    assert shared.node.read().process(driver.pid).gpus[0].launches > 0


def test_a_thread_that_captures_is_not_disturbed_by_what_was_launched_before(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant, driver = _session(shared, monkeypatch)
    stream, executable, kernel = _captured(driver, GLOBAL)
    for _ in range(3):
        driver.do("cuLaunchKernel", kernel, 1, 1, 1, 1, 1, 1, 0, None, None, None)
    driver.do("cuCtxSynchronize")
    before = tenant.use()
    driver.do("cuStreamBeginCapture_v2", stream, GLOBAL)
    for _ in range(100):
        driver.do("cuLaunchKernel", kernel, 1, 1, 1, 1, 1, 1, 0, stream, None, None)
    driver.do("cuGraphLaunch", executable, stream)  # as a part of the new graph
    [graph] = driver.do("cuStreamEndCapture", stream, Out(8))
    assert graph
    after = tenant.use()
    assert (after.tat, after.throttled) == (before.tat, before.throttled)
    driver.do("cuLaunchKernel", kernel, 1, 1, 1, 1, 1, 1, 0, stream, None, None)
    assert tenant.use().tat > before.tat
