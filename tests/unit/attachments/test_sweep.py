"""Several plugins' sweeps: one that fails does not stop the others."""

import pytest

from cni.attachments.sweep import (
    REMOVED,
    DamagedFile,
    Outcome,
    RemovedAttachment,
    RemovedStray,
    SweepFailure,
    sweep_all,
)
from cni.spec.attachment import Attachment
from cni.spec.errors import CNIError, Code

GONE = RemovedAttachment(Attachment("fabric", "c1", "net1"))
STRAY = RemovedStray("ib0.8001")
DAMAGED = DamagedFile("journal file x.json is damaged: its checksum differs")


def fail() -> tuple[Outcome, ...]:
    raise CNIError(Code.KERNEL, "listing interfaces: no buffer space")


def test_what_one_removed_is_reported_with_the_failure_of_another() -> None:
    outcomes = sweep_all(fail, lambda: (GONE,))
    assert outcomes == (GONE, SweepFailure(None, "listing interfaces: no buffer space"))
    assert list(map(str, outcomes)) == [
        "removed fabric/c1/net1: its sandbox is gone",
        "sweep: listing interfaces: no buffer space",
    ]


def test_failure_alone_is_an_error() -> None:
    with pytest.raises(CNIError, match="no buffer space"):
        sweep_all(fail, tuple)


def test_damaged_file_that_every_sweep_meets_is_reported_once() -> None:
    assert sweep_all(lambda: (DAMAGED,), lambda: (DAMAGED, STRAY)) == (DAMAGED, STRAY)


def test_removals_are_told_from_failures_by_their_type() -> None:
    failure = SweepFailure(GONE.attachment, "removed too early: it is busy")
    assert [isinstance(one, REMOVED) for one in (GONE, STRAY, failure, DAMAGED)] == [
        *(True, True),
        *(False, False),
    ]
