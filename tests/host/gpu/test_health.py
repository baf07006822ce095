"""GPUs with errors are sick, with the reason, and healthy again after a reset."""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from gpu.driver import nvml
from gpu.driver.gpu_health import OF_APPLICATIONS, REMEDY, GpuHealth
from gpu.driver.nvml import Nvml
from tests.host.gpu.driver_root import installed
from tests.host.gpu.served_node import FIRST, SECOND, TWO, ServedNode
from tests.standin.gpus import Behaviour, Failure, Node
from tests.waiting import until


class Looked:
    """The first GPU's state at each look, while nothing is wrong with the second."""

    def __init__(self, node: Node, open_driver: Callable[[], Nvml]) -> None:
        self.node = node
        self.open_driver = open_driver
        self.driver = open_driver()
        self.told: list[tuple[str, str]] = []
        self.health = GpuHealth(lambda uuid, fault: self.told.append((uuid, fault)))

    def fault(self, *present: str) -> str | None:
        self.health.look(self.driver, present or (FIRST, SECOND))
        assert SECOND not in self.health.faults
        return self.health.faults.get(FIRST)


@pytest.fixture
def looked(tmp_path: Path) -> Iterator[Looked]:
    with installed(tmp_path, TWO, Behaviour()) as node:
        yield Looked(node, lambda: nvml.open_driver(tmp_path))


def test_an_xid_of_the_gpu_makes_it_sick_and_one_of_a_program_does_not(
    looked: Looked, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    looked.node.happens(0, xid=79)  # before the watch started
    assert looked.fault() is None
    for xid in sorted(OF_APPLICATIONS):
        looked.node.happens(0, xid=xid)
    assert looked.fault() is None
    assert "Xid 31: a program caused it" in caplog.text
    looked.node.happens(0, xid=79)
    for _ in range(2):
        assert looked.fault() == f"critical error Xid 79: {REMEDY}"
    assert looked.told == [(FIRST, f"critical error Xid 79: {REMEDY}")]


@pytest.mark.parametrize("sign", ["errors", "recovery", "gone", "driver"])
def test_sick_gpu_is_healthy_after_a_reset(looked: Looked, sign: str) -> None:
    looked.fault()
    if sign in ("errors", "recovery"):
        looked.node.counts(sign, 2)
    looked.node.happens(0)
    looked.node.happens(0, xid=48)
    assert looked.fault()
    if sign == "gone":
        looked.fault(SECOND)
    elif sign == "driver":
        looked.driver = looked.open_driver()
    else:
        assert looked.fault()
        looked.node.counts(sign, 0)
    assert looked.fault() is None


def test_errors_that_the_driver_counts_need_no_event(looked: Looked) -> None:
    looked.node.counts("errors", 3)
    assert looked.fault() == f"3 uncorrectable memory errors: {REMEDY}"
    looked.node.counts("errors", 0)
    assert looked.fault() is None
    looked.node.counts("recovery", 1)
    assert looked.fault() == f"the driver asks for a reset: {REMEDY}"


@pytest.mark.parametrize(("result", "sick"), [(15, True), (16, True), (3, False), (999, False)])
def test_a_gpu_that_the_driver_has_lost_is_sick(tmp_path: Path, result: int, sick: bool) -> None:
    failures = (Failure("nvmlDeviceGetTotalEccErrors", 1, result),)
    with installed(tmp_path, TWO[:1], Behaviour(failures=failures)):
        health = GpuHealth()
        health.look(nvml.open_driver(tmp_path), [FIRST])
        assert (FIRST in health.faults) is sick


def test_driver_without_events_and_counters_reports_no_fault(tmp_path: Path) -> None:
    calls = ("nvmlDeviceRegisterEvents", "nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetFieldValues")
    failures = tuple(Failure(call, 1, 3) for call in calls)
    with installed(tmp_path, TWO[:1], Behaviour(failures=failures)):
        health = GpuHealth()
        health.look(nvml.open_driver(tmp_path), [FIRST])
        assert health.faults == {}


def test_a_service_without_limits_looks_for_errors_alone(tmp_path: Path) -> None:
    with ExitStack() as stack:
        node = ServedNode(tmp_path, stack)
        node.install_driver()
        service = node.make()
        service.watch_health()
        assert node.driver is not None
        node.driver.counts("errors", 0, 1)
        until(lambda: node.sick == [SECOND], what="the fault")
        assert SECOND in service.faults()
