"""A launcher waits for the next agent, and notices if there will be none."""

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.host.launcher.fake import (
    CONFIG,
    LEAVING,
    REFUSAL,
    RESULT,
    WHOLE,
    Agent,
    Launcher,
    Outcome,
    Peer,
    Recorder,
    answering,
)
from tests.waiting import PATIENCE, until

UNANSWERED_SINCE = "PODFABRIC_UNANSWERED_SINCE"
LATER = 0.5  # seconds; far less than a wait


def _left_behind(path: Path) -> None:
    """Make a socket as a dead agent leaves it."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


@contextmanager
def _in_its_place(launcher: Launcher, act: Callable[[Peer], object]) -> Iterator[Agent]:
    """An agent whose socket replaces the previous one, as in base/unix_socket.py."""
    fresh = launcher.socket.with_name("fresh.sock")
    with Agent(fresh, act) as agent:
        fresh.replace(launcher.socket)
        yield agent


def _run_beside(launcher: Launcher, command: str = "ADD") -> "Callable[[], Outcome]":
    """Run the launcher in a thread; the returned function waits for its outcome."""
    outcomes: list[Outcome] = []
    environ = launcher.environ(CNI_COMMAND=command)
    thread = threading.Thread(target=lambda: outcomes.append(launcher.run(environ)))
    thread.start()

    def outcome() -> Outcome:
        thread.join(PATIENCE)
        return outcomes[0]

    return outcome


@pytest.mark.parametrize("command", ["ADD", "DEL", "CHECK", "GC", "STATUS"])
def test_call_waits_for_the_next_agent(launcher: Launcher, command: str) -> None:
    _left_behind(launcher.socket)
    outcome = _run_beside(launcher, command)
    time.sleep(LATER)
    recorder = Recorder()
    with _in_its_place(launcher, recorder) as agent:
        assert outcome() == Outcome(0, RESULT, b"")
    assert agent.served == 1
    assert recorder.request is not None
    assert recorder.request.config == CONFIG
    assert UNANSWERED_SINCE not in recorder.request.environ


@pytest.mark.early
def test_wait_has_an_end(launcher: Launcher) -> None:
    _left_behind(launcher.socket)
    started = time.monotonic()
    assert "(waited 20 s for the next agent)" in launcher.run().error["msg"]
    assert time.monotonic() - started > 19.9


def test_status_waits_less_since_a_runtime_asks_it_about_the_whole_node(launcher: Launcher) -> None:
    _left_behind(launcher.socket)
    outcome = launcher.run(launcher.environ(CNI_COMMAND="STATUS"))
    assert "(waited 5 s for the next agent)" in outcome.error["msg"]


def test_wait_ends_with_the_limit_of_the_whole_call(launcher: Launcher) -> None:
    _left_behind(launcher.socket)
    outcome = launcher.run(launcher.environ(PODFABRIC_TIMEOUT="1"))
    assert "(waited 1 s for the next agent)" in outcome.error["msg"]


def test_no_call_waits_where_no_agent_has_been(launcher: Launcher) -> None:
    """The error mentions no wait: the socket is the sign of an agent."""
    assert "waited" not in launcher.run().error["msg"]


def test_call_in_the_backlog_of_an_ending_agent_goes_to_the_next(launcher: Launcher) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(launcher.socket))
    listener.listen()
    outcome = _run_beside(launcher)
    assert select.select([listener], [], [], PATIENCE)[0], "the launcher does not connect"
    recorder = Recorder()
    with _in_its_place(launcher, recorder):
        listener.close()
        assert outcome().stdout == RESULT
    assert recorder.request is not None
    assert UNANSWERED_SINCE not in recorder.request.environ


@pytest.mark.parametrize("size", [len(CONFIG), 8 << 20])
def test_call_whose_request_was_not_read_goes_to_the_next(launcher: Launcher, size: int) -> None:
    """Half a request is not a call: the next agent need not look for one."""
    recorder = Recorder()
    calls: Iterator[Callable[[Peer], object]] = iter([lambda peer: None, recorder])
    config = b"x" * size
    with Agent(launcher.socket, lambda peer: next(calls)(peer)) as agent:
        assert launcher.run(config=config).stdout == RESULT
    assert agent.served == 2
    assert recorder.request is not None
    assert recorder.request.config == config
    assert UNANSWERED_SINCE not in recorder.request.environ


def test_call_that_an_ending_agent_did_not_begin_goes_to_the_next(launcher: Launcher) -> None:
    recorder = Recorder()
    calls: Iterator[Callable[[Peer], object]] = iter([answering(LEAVING), recorder])
    with Agent(launcher.socket, lambda peer: next(calls)(peer)):
        assert launcher.run().stdout == RESULT
    assert recorder.request is not None
    assert UNANSWERED_SINCE not in recorder.request.environ


def test_answer_of_an_ending_agent_is_printed_if_no_other_comes(launcher: Launcher) -> None:
    with Agent(launcher.socket, answering(LEAVING)) as agent:
        outcome = launcher.run(launcher.environ(CNI_COMMAND="STATUS"))
    assert (outcome.exit_code, outcome.stdout) == (1, REFUSAL)
    assert agent.served > 2


@pytest.mark.parametrize("sent", [b"", WHOLE[:30]])
def test_next_agent_gets_the_time_since_when_a_dead_agent_may_have_run_the_call(
    launcher: Launcher, sent: bytes
) -> None:
    recorder = Recorder()
    calls: Iterator[Callable[[Peer], object]] = iter([answering(sent), recorder])
    before = int(time.time())
    with Agent(launcher.socket, lambda peer: next(calls)(peer)):
        assert launcher.run().stdout == RESULT
    assert recorder.request is not None
    # The launcher's time(2) is behind by up to a tick.
    assert before - 1 <= int(recorder.request.environ[UNANSWERED_SINCE]) <= time.time()


def test_call_that_may_have_ended_two_agents_is_not_tried_on_a_third(launcher: Launcher) -> None:
    with Agent(launcher.socket, answering(b"")) as agent:
        assert "before its answer was whole" in launcher.run().error["msg"]
    assert agent.served == 2


def test_killed_launcher_leaves_no_call(launcher: Launcher) -> None:
    _left_behind(launcher.socket)
    with launcher.start() as process:
        assert process.stdin is not None
        process.stdin.write(CONFIG)
        process.stdin.close()
        until(lambda: _state(process.pid) == "S", what="launcher that sleeps")
        time.sleep(LATER)
        process.send_signal(signal.SIGKILL)
        process.wait(PATIENCE)
    with _in_its_place(launcher, answering(WHOLE)) as agent:
        time.sleep(LATER)
    assert agent.served == 0
    assert {path.name for path in launcher.socket.parent.iterdir()} == {"agent.sock", "bin"}


def test_launcher_keeps_no_descriptors_and_little_cpu_in_the_wait(launcher: Launcher) -> None:
    _left_behind(launcher.socket)
    with launcher.start() as process:
        assert process.stdin is not None
        process.stdin.close()
        time.sleep(3)
        descriptors = list(Path(f"/proc/{process.pid}/fd").iterdir())
        times = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        process.kill()
    assert len(descriptors) <= 4
    ticks = int(times[11]) + int(times[12])
    assert ticks / os.sysconf("SC_CLK_TCK") < 0.3  # of three seconds


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
