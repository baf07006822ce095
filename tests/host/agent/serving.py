"""A server in a thread of the test, and well-behaved and badly behaved clients."""

import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from os.path import samestat
from pathlib import Path
from typing import IO

from agent.serve import framing
from agent.serve.framing import HEADER, LauncherRequest
from agent.serve.launcher_server import BACKLOG, Server
from agent.serve.workers import Workers
from agent.settings import Settings
from base.interrupts import Call, Terminated, serving
from base.unix_socket import listen
from tests.frames import write_request
from tests.waiting import PATIENCE

Does = Callable[[LauncherRequest, int | None], bytes]


class Limits(Settings, frozen=True, kw_only=True):
    """The server's settings."""

    deadline: float = PATIENCE
    grace: float = PATIENCE
    connections: int = 64


@dataclass
class Reply:
    """The frame of an answer, decoded."""

    status: int
    exit_code: int
    stderr: bytes
    stdout: bytes


@dataclass
class Scripted:
    """The caller. Every call runs `does`. It records the ended calls."""

    does: Does = lambda request, netns: request.config
    begun: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    def call(self, request: LauncherRequest, netns: int | None, call: Call) -> bytes:
        container = request.environ.get("CNI_CONTAINERID", "")
        self.begun.append(container)
        try:
            with serving(call):
                stdout = self.does(request, netns)
        except Terminated:
            self.ended.append(container)
            stdout = b"ended"
        return framing.write_answer(framing.ANSWERED, 0, b"a note\n", stdout)


@dataclass
class Serving:
    """A running server."""

    path: Path
    server: Server
    workers: Workers
    caller: Scripted
    thread: threading.Thread
    refused: list[str]

    def connect(self, timeout: float = PATIENCE) -> socket.socket:
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        client.settimeout(timeout)
        client.connect(str(self.path))
        return client

    def start(
        self, container: str, command: str = "ADD", config: bytes = b"{}", fds: Sequence[int] = ()
    ) -> socket.socket:
        """Send a whole request; the test reads the answer later."""
        client = self.connect()
        send(client, container, command, config, fds)
        return client

    def ask(self, container: str = "c", command: str = "ADD", config: bytes = b"{}") -> Reply:
        """Make one call as a well-behaved client."""
        with self.start(container, command, config) as client:
            return read(client)


def send(
    client: socket.socket, container: str, command: str, config: bytes, fds: Sequence[int] = ()
) -> None:
    environ = {"CNI_COMMAND": command, "CNI_CONTAINERID": container}
    frame = write_request(LauncherRequest("ipoib", environ, config))
    with suppress(BrokenPipeError, ConnectionResetError):  # it is refused: the answer is there
        if fds:
            sent = socket.send_fds(client, [frame], list(fds))
            frame = frame[sent:]
        client.sendall(frame)


def read(client: socket.socket) -> Reply:
    """Read the answer. Raises EOFError if there is none."""
    magic, status, exit_code, stderr, stdout = HEADER.unpack(exactly(client, HEADER.size))
    assert magic == framing.ANSWER_MAGIC
    return Reply(status, exit_code, exactly(client, stderr), exactly(client, stdout))


def exactly(client: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        chunk = client.recv(size - len(received))
        if not chunk:
            raise EOFError
        received += chunk
    return received


@contextmanager
def server(
    directory: Path, does: Does | None = None, workers: int = 8, limits: Limits | None = None
) -> Iterator[Serving]:
    """A server that is stopped at the end of the block, and must then end."""
    path = directory / "agent.sock"
    listener = listen(path, BACKLOG)
    pool = Workers(workers)
    caller = Scripted() if does is None else Scripted(does)
    refused: list[str] = []
    serving_ = Server(listener, caller.call, pool, limits or Limits(), refused=refused.append)
    thread = threading.Thread(target=serving_.serve, daemon=True)
    thread.start()
    try:
        yield Serving(path, serving_, pool, caller, thread, refused)
    finally:
        serving_.stop()
        thread.join(PATIENCE)
        listener.close()
        assert not thread.is_alive()


def descriptors(of: IO[bytes] | None = None) -> int:
    """The number of open descriptors of this process; with `of`, only those of the same file.

    Descriptors of earlier tests may be closed at any time.
    """
    found = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with suppress(OSError):  # closed meanwhile
            found.append(os.fstat(int(name)))
    return len(found) if of is None else sum(samestat(os.fstat(of.fileno()), one) for one in found)


def reset(client: socket.socket) -> None:
    """Close with a reset, as a killed process with unread bytes does."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
