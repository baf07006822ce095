"""What does not work is said once, and again after a while."""

import logging

import pytest

from base.loops import AGAIN_AFTER, MOST_TEXTS, Complaint


def test_an_error_is_said_once_and_again_when_it_changes_or_lasts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    now = [0.0]
    complaint = Complaint(logging.getLogger("test"), "lease", lambda: now[0])
    complaint.works()
    for address in ("0x7f01", "0x7f02"):
        complaint.fails(OSError(f"<Connection at {address}> refused"))
    complaint.fails(OSError("reset"))
    complaint.fails(OSError("<Connection at 0x7f03> refused"))
    now[0] = AGAIN_AFTER
    complaint.fails(OSError("reset"))
    complaint.works()
    complaint.works()
    complaint.fails(OSError("reset"))
    assert caplog.messages == [
        "lease: <Connection at 0x7f01> refused",
        "lease: reset",
        "lease: reset",
        "lease: works again",
        "lease: reset",
    ]


def test_texts_that_always_differ_fill_no_memory() -> None:
    complaint = Complaint(logging.getLogger("test"), "lease")
    for number in range(3 * MOST_TEXTS):
        complaint.fails(OSError(str(number)))
    assert len(complaint._said) <= MOST_TEXTS
