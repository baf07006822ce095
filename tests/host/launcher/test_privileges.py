"""The launcher trusts an agent of root or of its own user, but not the caller of a set-uid
launcher."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.host.launcher.fake import RESULT, WHOLE, Agent, Launcher, Peer, answering
from tools.build_launcher import FLAGS, SOURCES

NOBODY = 65534

# Another user may have no right to start the interpreter of the checkout.
_SERVE = """
import os, socket, sys
os.setuid(int(sys.argv[3]))
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("ready", flush=True)
while True:
    peer, _ = listener.accept()
    got = peer.recv(65536)
    print(len(got), flush=True)
    peer.sendall(bytes.fromhex(sys.argv[2]))
    peer.close()
"""


@contextmanager
def _agent_of(user: int, path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A process of that user that reads the first bytes and answers."""
    command = [sys.executable, "-c", _SERVE, str(path), WHOLE.hex(), str(user)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            path.chmod(0o777)
            yield process
        finally:
            process.kill()


@pytest.fixture
def open_directory(launcher: Launcher, directory: Path) -> Path:
    """A directory in which the user `nobody` may make a socket and start the launcher."""
    directory.chmod(0o777)
    launcher.executable.chmod(0o755)
    return directory


def test_agent_of_another_user_gets_nothing(launcher: Launcher, open_directory: Path) -> None:
    with _agent_of(NOBODY, launcher.socket) as agent:
        message = launcher.run().error["msg"]
        assert agent.stdout is not None
        assert agent.stdout.readline() == b"0\n"
    assert f"runs as uid {NOBODY}, not as root, so no request was sent" in message


def test_agent_of_our_own_user_is_trusted(launcher: Launcher, open_directory: Path) -> None:
    with _agent_of(NOBODY, launcher.socket):
        assert launcher.run(user=NOBODY).stdout == RESULT


def test_agent_of_root_is_trusted_by_all(launcher: Launcher, open_directory: Path) -> None:
    with Agent(launcher.socket, answering(WHOLE)):
        launcher.socket.chmod(0o777)
        assert launcher.run(user=NOBODY).stdout == RESULT


def test_set_uid_launcher_takes_no_settings_from_its_caller(
    open_directory: Path,
) -> None:
    if os.statvfs(open_directory).f_flag & os.ST_NOSUID:
        pytest.skip(f"{open_directory} is on a file system without set-uid")
    # It uses another default socket, because this machine may have a real agent.
    ours, theirs = open_directory / "default.sock", open_directory / "caller.sock"
    executable = open_directory / "ipoib"
    sources = [str(source) for source in sorted(SOURCES.glob("*.c"))]
    define = f'-DDEFAULT_SOCKET="{ours}"'
    subprocess.run(["gcc", *FLAGS, define, *sources, "-o", str(executable)], check=True)
    launcher = Launcher(executable, theirs)
    environ = launcher.environ(PODFABRIC_TIMEOUT="not a number")

    executable.chmod(0o4755)
    assert f'"{ours}" cannot be reached' in launcher.run(environ, user=NOBODY).error["msg"]
    with Agent(ours, answering(WHOLE)), Agent(theirs, answering(b"")) as other:
        assert launcher.run(environ, user=NOBODY).stdout == RESULT
    assert other.served == 0

    executable.chmod(0o755)  # without set-uid the launcher reads the variables
    assert launcher.run(environ, user=NOBODY).error["code"] == 4
    assert f'"{theirs}"' in launcher.run(launcher.environ(), user=NOBODY).error["msg"]


def test_socket_without_permission_counts_as_an_absent_agent(
    launcher: Launcher, open_directory: Path
) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(launcher.socket))
        launcher.socket.chmod(0o600)
        listener.listen()
        message = launcher.run(user=NOBODY).error["msg"]
    assert "cannot be reached (EACCES, errno 13)" in message


def test_descriptors_in_an_answer_are_not_taken(launcher: Launcher) -> None:

    def act(peer: Peer) -> None:
        peer.receive()
        socket.send_fds(peer.socket, [WHOLE], [0, 1, 2])

    with Agent(launcher.socket, act):
        assert launcher.run().stdout == RESULT
