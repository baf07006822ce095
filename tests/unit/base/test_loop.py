"""Threads that step until they are closed, and pauses that double."""

import threading
from collections.abc import Iterator

import pytest

from base import loop
from base.loop import Backoff, Loop
from tests.waiting import until


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "AFTER_DEFECT", 0.0)


def test_a_defect_is_logged_once_while_it_stays_and_does_not_end_the_thread(
    caplog: pytest.LogCaptureFixture,
) -> None:
    defects: Iterator[Exception] = iter([*[ValueError("a")] * 9, KeyError("b"), ValueError("a")])
    over = threading.Event()

    def step() -> float:
        if defect := next(defects, None):
            raise defect
        over.set()
        return 60.0

    steps = Loop("a test", step)
    steps.start()
    assert over.wait(60.0)
    steps.close()
    assert len(caplog.records) == 3
    assert "a test: a step failed" in caplog.text
    assert "Traceback" in caplog.text


def test_a_loop_that_only_fails_shows_until_it_is_closed() -> None:
    def step() -> float:
        raise ValueError

    steps = Loop("a test", step)
    steps.start()
    until(lambda: loop.failing() == "failed 5 times or more in a row: a test")
    steps.close()
    assert loop.failing() == ""


def test_a_step_comes_at_once_when_the_thread_is_woken_and_none_after_it_is_closed() -> None:
    seen: list[int] = []

    def step() -> float:
        seen.append(1)
        return 3600.0

    steps = Loop("a test", step)
    steps.start()
    for count in (1, 2, 3):
        until(lambda count=count: len(seen) == count)  # type: ignore[misc]
        steps.wake()
    until(lambda: len(seen) == 4)
    steps.close()
    steps.close()
    steps.wake()
    assert len(seen) == 4
    assert not any(thread.name == "a test" for thread in threading.enumerate())


def test_close_waits_no_longer_than_it_was_told() -> None:
    begun, over = threading.Event(), threading.Event()

    def step() -> float:
        begun.set()
        over.wait(60.0)
        return 0.0

    steps = Loop("a test", step, join=0.0)
    steps.start()
    assert begun.wait(60.0)
    steps.close()
    assert not over.is_set()
    over.set()


def test_pauses_double_up_to_the_longest_and_begin_again() -> None:
    backoff = Backoff(1.0, 5.0)
    assert [backoff.pause() for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    backoff.reset()
    assert backoff.next == 1.0
    assert [backoff.pause() for _ in range(2)] == [1.0, 2.0]
