"""A problem is logged once, and again after some minutes."""

import logging

import pytest

from base.problems import AGAIN_AFTER, MOST_TEXTS, Problems, Seldom


def test_an_error_is_said_once_and_again_when_it_changes_or_lasts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    now = [0.0]
    problems = Problems(logging.getLogger("test"), lambda: now[0])
    problems.tell("lease", None)
    for address in ("0x7f01", "0x7f02"):
        problems.tell("lease", OSError(f"<Connection at {address}> refused"))
    problems.tell("lease", OSError("reset"))
    problems.tell("lease", OSError("<Connection at 0x7f03> refused"))
    now[0] = AGAIN_AFTER
    problems.tell("lease", OSError("reset"))
    problems.tell("lease", None)
    problems.tell("lease", None)
    problems.tell("lease", OSError("reset"))
    assert caplog.messages == [
        "lease: <Connection at 0x7f01> refused",
        "lease: reset",
        "lease: reset",
        "lease: works again",
        "lease: reset",
    ]


def test_texts_that_always_differ_fill_no_memory() -> None:
    problems = Problems(logging.getLogger("test"))
    for number in range(3 * MOST_TEXTS):
        problems.tell("lease", OSError(str(number)))
    assert len(problems._said["lease"]) <= MOST_TEXTS


def test_what_a_tenant_brings_about_is_said_once_in_a_time() -> None:
    seldom = Seldom()
    assert seldom.may_say("a", 1e9)
    assert not seldom.may_say("a", 1e9)
    assert seldom.may_say("b", 1e9)
    assert seldom.may_say("a", 0.0)  # that time is over
