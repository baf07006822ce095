"""The launcher's requests to the agent, and its output of the answers."""

import contextlib
import errno
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.serve import framing
from agent.serve.framing import MAX_CONFIG, LauncherRequest
from tests.host.launcher.fake import (
    CONFIG,
    RESULT,
    WHOLE,
    Agent,
    Launcher,
    Peer,
    Recorder,
    answering,
)
from tests.waiting import PATIENCE


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def test_request_is_name_environment_and_configuration(
    launcher: Launcher, recorder: Recorder
) -> None:
    environ = launcher.environ(CNI_IFNAME="net1", EMPTY="", STRANGE=b"\xff=\xc3", TEXT="日")
    with Agent(launcher.socket, recorder):
        outcome = launcher.run(environ)
    assert (outcome.exit_code, outcome.stdout, outcome.stderr) == (0, RESULT, b"")
    assert recorder.request is not None
    assert recorder.request == LauncherRequest(
        name="ipoib",
        environ={key: os.fsdecode(value) for key, value in environ.items()},
        config=CONFIG,
    )
    assert recorder.peer is not None
    assert b"STRANGE=\xff=\xc3\0" in recorder.peer.body


def test_name_is_that_of_the_link(launcher: Launcher, recorder: Recorder, directory: Path) -> None:
    link = directory / "podfabric-ipam"
    link.symlink_to(launcher.executable)
    with Agent(launcher.socket, recorder):
        assert Launcher(link, launcher.socket).run().exit_code == 0
    assert recorder.request is not None
    assert recorder.request.name == "podfabric-ipam"


def test_whole_answer_is_printed(launcher: Launcher) -> None:
    stdout = bytes(range(256)) * 4096
    stderr = b"one\ntwo\n" * 8192
    frame = framing.write_answer(framing.ANSWERED, 7, stderr, stdout)
    with Agent(launcher.socket, answering(frame)):
        outcome = launcher.run()
    assert (outcome.exit_code, outcome.stdout, outcome.stderr) == (7, stdout, stderr)


def test_largest_answer_is_printed(launcher: Launcher) -> None:
    stdout = b"x" * framing.MAX_STDOUT
    stderr = b"y" * framing.MAX_STDERR
    with Agent(launcher.socket, answering(framing.write_answer(0, 255, stderr, stdout))):
        outcome = launcher.run()
    assert (outcome.exit_code, outcome.stdout, outcome.stderr) == (255, stdout, stderr)


def test_answer_may_come_byte_by_byte(launcher: Launcher) -> None:
    def act(peer: Peer) -> None:
        peer.receive()
        for position in range(len(WHOLE)):
            peer.send(WHOLE[position : position + 1])
            time.sleep(0.002)

    with Agent(launcher.socket, act):
        outcome = launcher.run()
    assert (outcome.exit_code, outcome.stdout) == (0, RESULT)


# Namespaces.


def test_namespace_is_passed_as_a_descriptor(launcher: Launcher, recorder: Recorder) -> None:
    with subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "echo; exec sleep 60"], stdout=-1
    ) as pod:
        try:
            assert pod.stdout is not None
            pod.stdout.readline()
            path = Path(f"/proc/{pod.pid}/ns/net")
            theirs, ours = path.stat(), Path("/proc/self/ns/net").stat()
            with Agent(launcher.socket, recorder):
                launcher.run(launcher.environ(CNI_NETNS=str(path)))
        finally:
            pod.kill()
    assert recorder.peer is not None
    assert recorder.peer.netns is not None
    assert (recorder.peer.netns.st_dev, recorder.peer.netns.st_ino) == (
        theirs.st_dev,
        theirs.st_ino,
    )
    assert theirs.st_ino != ours.st_ino


def test_namespace_is_sent_once(launcher: Launcher, recorder: Recorder) -> None:
    """This holds also if the request is sent in many parts."""
    with Agent(launcher.socket, recorder):
        launcher.run(launcher.environ(CNI_NETNS="/proc/self/ns/net"), b"x" * (4 << 20))
    assert recorder.peer is not None
    assert recorder.peer.netns is not None


@pytest.mark.parametrize("path", ["", "/nowhere/net", "/run/\xff"])
def test_namespace_that_cannot_be_opened_is_not_passed(
    launcher: Launcher, recorder: Recorder, path: str
) -> None:
    with Agent(launcher.socket, recorder):
        assert launcher.run(launcher.environ(CNI_NETNS=path)).exit_code == 0
    assert recorder.peer is not None
    assert recorder.peer.netns is None


def test_pipe_in_the_place_of_a_namespace_does_not_block(
    launcher: Launcher, recorder: Recorder, directory: Path
) -> None:
    os.mkfifo(directory / "fifo")
    with Agent(launcher.socket, recorder):
        assert launcher.run(launcher.environ(CNI_NETNS=str(directory / "fifo"))).exit_code == 0


# Standard input.


@pytest.mark.parametrize(("surplus", "number"), [(0, 0), (1, errno.EMSGSIZE)])
def test_configuration_has_a_limit(
    launcher: Launcher, recorder: Recorder, surplus: int, number: int
) -> None:
    config = b"x" * (MAX_CONFIG + surplus)
    with Agent(launcher.socket, recorder):
        assert launcher.run(config=config).exit_code == 0
    assert recorder.request is not None
    assert recorder.request.stdin_errno == number
    assert recorder.request.config == config[:MAX_CONFIG]


def test_standard_input_that_does_not_block_is_waited_for(
    launcher: Launcher, recorder: Recorder
) -> None:
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    with Agent(launcher.socket, recorder), launcher.start(stdin=reading) as process:
        time.sleep(0.2)
        os.write(writing, CONFIG)
        os.close(writing)
        assert process.wait(PATIENCE) == 0
    os.close(reading)
    assert recorder.request is not None
    assert recorder.request.config == CONFIG


# Closed descriptors: no file that the launcher opens may become standard input or output.


def _close(*descriptors: int) -> Callable[[], None]:
    def close() -> None:
        for descriptor in descriptors:
            os.close(descriptor)

    return close


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)])
def test_closed_standard_descriptors_are_not_reused(
    launcher: Launcher, closed: tuple[int, ...]
) -> None:
    recorder = Recorder(framing.write_answer(framing.ANSWERED, 0, b"noted", RESULT))
    environ = launcher.environ(CNI_NETNS="/proc/self/ns/net")
    with Agent(launcher.socket, recorder):
        outcome = launcher.run(environ, preexec_fn=_close(*closed))
    assert outcome.exit_code == (1 if 1 in closed else 0)
    assert outcome.stdout == (b"" if 1 in closed else RESULT)
    assert outcome.stderr == (b"" if 2 in closed else b"noted")
    assert recorder.peer is not None
    assert recorder.peer.netns is not None


def test_answer_that_cannot_be_written_is_an_error(launcher: Launcher, recorder: Recorder) -> None:
    with Agent(launcher.socket, recorder), launcher.start() as process:
        assert process.stdout is not None
        process.stdout.close()
        process.stdout = None
        process.communicate(CONFIG, timeout=PATIENCE)
    assert process.returncode == 1


def test_full_pipe_that_does_not_block_is_waited_for(launcher: Launcher) -> None:
    stdout = b"x" * (1 << 20)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with Agent(launcher.socket, answering(framing.write_answer(0, 0, b"", stdout))):
        with subprocess.Popen(
            [launcher.executable],
            env=launcher.environ(),
            stdin=subprocess.DEVNULL,
            stdout=writing,
        ) as process:
            os.close(writing)
            time.sleep(0.2)
            with open(reading, "rb") as pipe:  # noqa: PTH123 - a descriptor
                assert pipe.read() == stdout
        assert process.returncode == 0


# Signals and many at once.


def test_killed_launcher_hangs_up(launcher: Launcher) -> None:
    received, gone = threading.Event(), threading.Event()

    def act(peer: Peer) -> None:
        peer.receive()
        received.set()
        assert peer.rest() == b""
        gone.set()

    with Agent(launcher.socket, act), launcher.start() as process:
        assert process.stdin is not None
        process.stdin.close()
        assert received.wait(PATIENCE)
        process.terminate()
        assert gone.wait(PATIENCE)
    assert process.returncode == -signal.SIGTERM


def test_stopped_and_continued_launcher_goes_on(launcher: Launcher) -> None:
    received, go_on = threading.Event(), threading.Event()

    def act(peer: Peer) -> None:
        peer.receive()
        received.set()
        assert go_on.wait(PATIENCE)
        peer.send(WHOLE)

    with Agent(launcher.socket, act), launcher.start() as process:
        assert process.stdin is not None
        process.stdin.close()
        assert received.wait(PATIENCE)
        for number in (signal.SIGSTOP, signal.SIGCONT):
            process.send_signal(number)
            time.sleep(0.05)
        go_on.set()
        assert process.wait(PATIENCE) == 0


def test_full_backlog_is_waited_for(launcher: Launcher) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(launcher.socket))
    listener.listen(0)
    others = []
    with contextlib.suppress(BlockingIOError):
        while True:
            other = socket.socket(socket.AF_UNIX)
            others.append(other)
            other.setblocking(False)
            other.connect(str(launcher.socket))
    with launcher.start() as process:
        assert process.stdin is not None
        process.stdin.write(CONFIG)
        process.stdin.close()
        time.sleep(0.5)
        assert process.poll() is None
        for _ in others[:-1]:
            listener.accept()[0].close()
        connection, _ = listener.accept()
        with connection:
            Recorder()(Peer(connection))
        assert process.wait(PATIENCE) == 0
    for opened in (*others, listener):
        opened.close()
