"""Waiting for a condition."""

import time

import pytest

from base import interrupts
from base.interrupts import Call, Terminated, wait_until


def test_true_at_once_is_answered_without_a_pause() -> None:
    begun = time.monotonic()
    assert wait_until(lambda: "here", 60.0, pause=30.0) == "here"
    assert time.monotonic() - begun < 30.0


def test_the_answer_that_is_true_at_last_comes_back() -> None:
    answers = iter(["", "", "here", ""])
    assert wait_until(lambda: next(answers), 60.0, pause=0.001) == "here"


def test_the_last_answer_comes_back_when_the_time_is_over() -> None:
    asked: list[int] = []

    def never() -> list[int]:
        asked.append(1)
        return []

    assert wait_until(never, 0.05, pause=0.01) == []
    assert len(asked) > 1


def test_no_time_is_one_attempt() -> None:
    asked: list[int] = []
    assert not wait_until(lambda: asked.append(1), 0.0)
    assert asked == [1]


def test_a_call_that_is_to_end_does_not_wait() -> None:
    call = Call(endable=True)
    call.end()
    with interrupts.serving(call), pytest.raises(Terminated):
        wait_until(lambda: False, 60.0, pause=30.0)
