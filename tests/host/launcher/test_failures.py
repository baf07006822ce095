"""Without a usable answer the launcher prints a CNI error with the event and the remedy."""

import os
import socket
import struct
import threading
import time
from contextlib import suppress

import pytest

from agent.serve import framing
from agent.serve.framing import ANSWER_MAGIC, ANSWERED, HEADER, MAX_STDERR, MAX_STDOUT
from tests.host.launcher.fake import (
    REFUSAL,
    REFUSED,
    RESULT,
    WHOLE,
    Agent,
    Launcher,
    Peer,
    answering,
    file_of,
)
from tests.waiting import PATIENCE

START = (
    "see whether podfabric's pod of this node runs (`kubectl -n podfabric get pods -o wide`); "
    "without Kubernetes: `systemctl start podfabric-agent`; then try again"
)
LOOK = (
    "see the log of podfabric's pod of this node; without Kubernetes: "
    "`systemctl status podfabric-agent`; then try again"
)
SOON = {"PODFABRIC_TIMEOUT": "1"}
DROPS = 10_000  # bytes, ten per second: far more than arrive before that deadline


@pytest.mark.parametrize("command", ["ADD", "DEL", "CHECK", "GC", "STATUS", "NOPE"])
def test_absent_agent_is_an_error_that_says_how_to_start_it(
    launcher: Launcher, command: str
) -> None:
    outcome = launcher.run(launcher.environ(CNI_COMMAND=command))
    assert outcome.error == {
        "cniVersion": "1.1.0",
        "code": 11,
        "msg": f'[podfabric 11] the podfabric agent at "{launcher.socket}" cannot be reached '
        f"(ENOENT, errno 2): {START}",
    }
    assert outcome.stderr == b""


def test_socket_of_a_dead_agent_counts_as_an_absent_agent(launcher: Launcher) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(launcher.socket))
    outcome = launcher.run(launcher.environ(**SOON))
    assert "cannot be reached (ECONNREFUSED, errno 111)" in outcome.error["msg"]


def test_file_in_the_place_of_the_socket_counts_as_an_absent_agent(launcher: Launcher) -> None:
    launcher.socket.write_text("")
    outcome = launcher.run(launcher.environ(**SOON))
    assert "cannot be reached (ECONNREFUSED, errno 111)" in outcome.error["msg"]


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        (b"/run/not found/no such file", "/run/not\\x20found/no\\x20such\\x20file"),
        (b'/run/"quoted"\\', '/run/"quoted"\\'),
        (b"/run/caf\xc3\xa9\xff\xc3\n\x7f\x01", "/run/caf\\xc3\\xa9\\xff\\xc3\\x0a\\x7f\\x01"),
        (b"/" + b"\xff" * 106, "/" + "\\xff" * 106),
    ],
)
def test_any_path_is_shown_in_json(launcher: Launcher, path: bytes, shown: str) -> None:
    outcome = launcher.run(launcher.environ(PODFABRIC_SOCKET=path))
    assert f'at "{shown}" cannot be reached' in outcome.error["msg"]


# An agent that ends, or sends garbage.


@pytest.mark.parametrize("size", [0, 1, 19, 20, 21, len(WHOLE) - 1])
def test_answer_that_is_cut_short_is_an_error(launcher: Launcher, size: int) -> None:
    with Agent(launcher.socket, answering(WHOLE[:size])):
        outcome = launcher.run()
    assert f"ended the connection before its answer was whole: {LOOK}" in outcome.error["msg"]
    assert outcome.stderr == b""


def test_agent_that_hangs_up_at_once_is_asked_until_the_wait_is_over(launcher: Launcher) -> None:
    """It leaves the request unread, so the launcher sees a reset or a broken pipe."""
    with Agent(launcher.socket, lambda _: None) as agent:
        outcome = launcher.run()
    assert "before its answer was whole" in outcome.error["msg"]
    assert outcome.error["msg"].endswith(" (waited 20 s for the next agent)")
    assert agent.served > 2


def _header(
    magic: bytes = ANSWER_MAGIC,
    status: int = ANSWERED,
    exit_code: int = 0,
    stderr: int = 0,
    stdout: int = 0,
) -> bytes:
    return HEADER.pack(magic, status, exit_code, stderr, stdout)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "it begins with other bytes than pfa1"),
        (bytes(64), "it begins with other bytes than pfa1"),
        (_header(b"pfa2"), "it begins with other bytes than pfa1"),
        (_header(framing.REQUEST_MAGIC), "it begins with other bytes than pfa1"),
        (_header(status=3), "its status is above 2"),
        (_header(status=1 << 31), "its status is above 2"),
        (_header(exit_code=256), "its exit code is above 255"),
        (_header(exit_code=0xFFFFFFFF), "its exit code is above 255"),
        (_header(status=1), "it refuses with exit code 0"),
        (_header(stderr=MAX_STDERR + 1), "it is longer than an answer may be"),
        (_header(stdout=MAX_STDOUT + 1), "it is longer than an answer may be"),
        (_header(stderr=0xFFFFFFFF, stdout=1), "it is longer than an answer may be"),
    ],
)
def test_garbage_is_an_error(launcher: Launcher, answer: bytes, why: str) -> None:
    with Agent(launcher.socket, answering(answer + b"x" * 100)):
        outcome = launcher.run()
    assert f"sent an invalid answer ({why})" in outcome.error["msg"]
    assert "`podfabric install`" in outcome.error["msg"]


# An agent that refuses.


def test_refusal_is_printed(launcher: Launcher) -> None:
    with Agent(launcher.socket, answering(REFUSED)):
        outcome = launcher.run()
    assert (outcome.exit_code, outcome.stdout) == (1, REFUSAL)


def test_refusal_may_come_before_the_request_is_sent(launcher: Launcher) -> None:
    def act(peer: Peer) -> None:
        peer.send(REFUSED)
        started.wait(PATIENCE)

    started = threading.Event()
    with Agent(launcher.socket, act):
        outcome = launcher.run(config=b"x" * (8 << 20))
        started.set()
    assert (outcome.exit_code, outcome.stdout) == (1, REFUSAL)


# An agent that is slow.


def test_agent_without_an_answer_is_waited_for_until_the_deadline(launcher: Launcher) -> None:
    def act(peer: Peer) -> None:
        peer.receive()
        assert peer.rest() == b""

    started = time.monotonic()
    with Agent(launcher.socket, act):
        outcome = launcher.run(launcher.environ(**SOON))
    assert time.monotonic() - started > 0.9
    assert outcome.error["code"] == 11
    assert f"did not answer within 1 s and may still be at work: {LOOK}" in outcome.error["msg"]


def test_answer_that_stops_halfway_is_not_printed(launcher: Launcher) -> None:
    def act(peer: Peer) -> None:
        peer.receive()
        peer.send(framing.write_answer(ANSWERED, 0, b"noted", RESULT)[:-1])
        peer.rest()

    with Agent(launcher.socket, act):
        outcome = launcher.run(launcher.environ(**SOON))
    assert "did not answer within 1 s" in outcome.error["msg"]
    assert outcome.stderr == b""


def test_answer_in_drops_has_the_same_deadline(launcher: Launcher) -> None:
    def act(peer: Peer) -> None:
        peer.receive()
        with suppress(BrokenPipeError, ConnectionResetError):
            for byte in framing.write_answer(ANSWERED, 0, b"", b"x" * DROPS):
                peer.send(bytes([byte]))
                time.sleep(0.1)

    with Agent(launcher.socket, act):
        outcome = launcher.run(launcher.environ(**SOON))
    assert "did not answer within 1 s" in outcome.error["msg"]


def test_agent_that_does_not_read_has_the_same_deadline(launcher: Launcher) -> None:
    ended = threading.Event()
    with Agent(launcher.socket, lambda _: ended.wait(PATIENCE)), file_of(b"x" * (8 << 20)) as stdin:
        outcome = launcher.run(launcher.environ(**SOON), stdin=stdin)
        ended.set()
    assert "does not take the request (ETIMEDOUT, errno 110)" in outcome.error["msg"]


def test_full_backlog_has_the_same_deadline(launcher: Launcher) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(launcher.socket))
        listener.listen(0)
        with socket.socket(socket.AF_UNIX) as other:
            other.connect(str(launcher.socket))
            outcome = launcher.run(launcher.environ(**SOON))
    assert "does not take the connection (EAGAIN, errno 11)" in outcome.error["msg"]


def test_standard_input_that_does_not_end_has_the_same_deadline(launcher: Launcher) -> None:
    reading, writing = os.pipe()
    outcome = launcher.run(launcher.environ(**SOON), stdin=reading)
    os.close(reading)
    os.close(writing)
    assert outcome.error["code"] == 5
    assert "error reading from stdin: it did not end within 1 s" in outcome.error["msg"]


# Requests that cannot be sent.


def test_environment_has_a_limit(launcher: Launcher) -> None:
    many = {f"FILLER{number}": "x" * 120_000 for number in range(9)}
    with Agent(launcher.socket, answering(WHOLE)) as agent:
        outcome = launcher.run({**launcher.environ(), **many})
    assert outcome.error["code"] == 4
    assert "more than 1048576 bytes" in outcome.error["msg"]
    assert agent.served == 0


def test_environment_at_its_limit_is_sent(launcher: Launcher) -> None:
    environ = {key: os.fsdecode(value) for key, value in launcher.environ().items()}
    environ |= {f"FILLER{number}": "x" * 120_000 for number in range(8)}
    size = sum(len(f"{key}={value}") + 1 for key, value in environ.items())
    environ["LAST"] = "x" * (framing.MAX_ENVIRON - size - len("LAST=") - 1)
    with Agent(launcher.socket, answering(WHOLE)):
        assert launcher.run(environ).stdout == RESULT
        assert launcher.run({**environ, "LAST": f"{environ['LAST']}x"}).error["code"] == 4


@pytest.mark.parametrize("value", ["0", "3601", "1.5", "x", "-1", " 1", "1s", "99999999999999999"])
def test_invalid_deadline_is_an_error(launcher: Launcher, value: str) -> None:
    error = launcher.run(launcher.environ(PODFABRIC_TIMEOUT=value)).error
    assert error["code"] == 4
    shown = value.replace(" ", "\\x20")
    assert (
        error["msg"]
        == f'[podfabric 4] PODFABRIC_TIMEOUT is "{shown}": give whole seconds, 1 to 3600'
    )


def test_path_of_the_socket_has_a_limit(launcher: Launcher) -> None:
    error = launcher.run(launcher.environ(PODFABRIC_SOCKET="/" + "x" * 107)).error
    assert error["code"] == 4
    assert "give a path of at most 107 bytes" in error["msg"]


def test_long_text_is_shown_in_part(launcher: Launcher) -> None:
    error = launcher.run(launcher.environ(PODFABRIC_SOCKET=b"\xff" * 100_000)).error
    assert "\\xff" * 512 + '..."' in error["msg"]


def test_integers_are_big_endian() -> None:
    """The table of garbage above relies on this."""
    assert _header(status=1) == struct.pack(">4s4I", b"pfa1", 1, 0, 0, 0)
