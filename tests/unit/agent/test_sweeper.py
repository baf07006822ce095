"""The agent sweeps again and again, and says each thing once."""

import threading
from collections.abc import Iterator, Sequence

import pytest

from agent.observe.metrics import Metrics
from cni.attachments.orphans import Outcome, Sweeper
from cni.spec.errors import CNIError, Code
from tests.unit.agent.test_metrics import read
from tests.waiting import until

BUSY = Outcome("the store is busy", removed=False)


class Node:
    """The results of the sweeps, one after another; then nothing."""

    def __init__(self, *found: Sequence[Outcome] | Exception) -> None:
        self._found: Iterator[Sequence[Outcome] | Exception] = iter(found)
        self.sweeps = 0
        self.over = threading.Event()

    def sweep(self) -> Sequence[Outcome]:
        found = next(self._found, None)
        if found is None:
            self.over.set()
            return ()
        self.sweeps += 1
        if isinstance(found, Exception):
            raise found
        return found


def swept(node: Node) -> Metrics:
    metrics = Metrics(plugins=(), usage=list, attachments=dict)
    sweeper = Sweeper(node.sweep, metrics.swept, every=0.001)
    try:
        until(node.over.is_set)
    finally:
        sweeper.close()
    return metrics


def test_what_one_sweep_could_not_remove_the_next_one_does() -> None:
    node = Node((BUSY,), (BUSY,), (Outcome("removed"),))
    counted = read(swept(node))
    assert node.sweeps == 3
    assert counted["podfabric_sweep_errors_total"] == 2
    assert counted["podfabric_sweep_removed_total"] == 1


def test_a_sweep_that_fails_is_not_the_last(caplog: pytest.LogCaptureFixture) -> None:
    node = Node(CNIError(Code.IO_FAILURE, "no room"), ValueError("a defect"), ())
    assert read(swept(node))["podfabric_sweep_errors_total"] == 2
    assert "no room" in caplog.text
    assert "Traceback" in caplog.text  # of the defect


def test_what_stays_is_told_once_and_again_when_it_comes_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    swept(Node((BUSY,), (BUSY,), (), (BUSY,), (BUSY,)))
    assert caplog.text.count("the store is busy") == 2


def test_a_closed_one_sweeps_no_more() -> None:
    node = Node(*((),) * 1_000_000)
    sweeper = Sweeper(node.sweep, lambda removed, errors: None, every=0.001)
    until(lambda: node.sweeps > 3)
    sweeper.close()
    until(lambda: not any(thread.name == "sweep" for thread in threading.enumerate()))
