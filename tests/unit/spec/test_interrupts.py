"""A call that is ended from another thread: where it may end, and where it may not."""

import threading
from collections.abc import Callable

import pytest

from base import interrupts
from base.interrupts import Call, Terminated, serving
from tests.waiting import PATIENCE


def in_thread(call: Call, work: Callable[[], object]) -> tuple[threading.Thread, list[str]]:
    """The work as that call in a thread, and how it ended."""
    ended: list[str] = []

    def run() -> None:
        try:
            with serving(call):
                work()
            ended.append("done")
        except Terminated:
            ended.append("terminated")

    thread = threading.Thread(target=run)
    thread.start()
    return thread, ended


def test_outside_of_a_call_nothing_has_any_effect() -> None:
    interrupts.checkpoint()
    interrupts.require_client()
    interrupts.hold()
    with interrupts.held():
        interrupts.checkpoint()


def test_call_ends_at_its_next_checkpoint() -> None:
    call = Call(endable=True)
    with serving(call):
        interrupts.checkpoint()
        assert call.end()
        with pytest.raises(Terminated):
            interrupts.checkpoint()
        with pytest.raises(Terminated):
            interrupts.hold()
    interrupts.checkpoint()


def test_call_that_holds_comes_to_its_own_end() -> None:
    call = Call(endable=True)
    with serving(call):
        interrupts.hold()
        assert not call.end()
        interrupts.checkpoint()


def test_call_that_is_not_endable_comes_to_its_own_end() -> None:
    call = Call(endable=False)
    with serving(call):
        assert not call.end()
        interrupts.checkpoint()


def test_call_of_a_client_that_has_gone_is_not_held() -> None:
    """Whether or not another thread has noticed, and asked the call to end."""
    call = Call(endable=True, gone=lambda: True)
    with serving(call):
        interrupts.checkpoint()
        with pytest.raises(Terminated):
            interrupts.hold()
        with pytest.raises(Terminated):
            interrupts.checkpoint()


def test_call_that_holds_does_not_need_its_client_any_more() -> None:
    gone = False
    call = Call(endable=True, gone=lambda: gone)
    with serving(call):
        interrupts.hold()
        gone = True
        interrupts.hold()
        interrupts.checkpoint()


def test_call_that_is_not_endable_needs_its_client_to_begin_only() -> None:
    call = Call(endable=False, gone=lambda: True)
    with serving(call):
        with pytest.raises(Terminated):
            interrupts.require_client()
        interrupts.checkpoint()
        interrupts.hold()


def test_held_block_is_not_interrupted_and_what_follows_is() -> None:
    call = Call(endable=True)
    with serving(call):
        with interrupts.held():
            assert call.end()
            interrupts.checkpoint()
        with pytest.raises(Terminated):
            interrupts.checkpoint()


def test_calls_of_two_threads_do_not_meet() -> None:
    first, other = Call(endable=True), Call(endable=True)
    go_on = threading.Event()

    def work() -> None:
        go_on.wait(PATIENCE)
        interrupts.checkpoint()

    threads = [in_thread(first, work), in_thread(other, work)]
    first.end()
    go_on.set()
    for thread, _ in threads:
        thread.join(PATIENCE)
    assert [ended for _, (ended,) in threads] == ["terminated", "done"]
