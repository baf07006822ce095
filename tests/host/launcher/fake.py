"""The launcher as a process, and an agent that a test scripts."""

import json
import os
import select
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.serve import framing
from agent.serve.framing import HEADER, LauncherRequest, RequestHeader
from tests.waiting import PATIENCE

CONFIG = b'{"cniVersion":"1.1.0","name":"n","type":"ipoib"}'
RESULT = b'{"cniVersion":"1.1.0","ips":[]}'
WHOLE = framing.write_answer(framing.ANSWERED, 0, b"", RESULT)
REFUSAL = b'{"cniVersion":"1.1.0","code":11,"msg":"the agent is stopping"}'
REFUSED = framing.write_answer(framing.REFUSED, 1, b"", REFUSAL)
LEAVING = framing.write_answer(framing.LEAVING, 1, b"", REFUSAL)

# go-cni treats these words in the error of a DEL as success.
MISREAD = ("not found", "no such file")


@dataclass(frozen=True)
class Outcome:
    """The end of the process: its exit code and output."""

    exit_code: int
    stdout: bytes
    stderr: bytes

    @property
    def error(self) -> dict[str, Any]:
        """The error document, which must be all of standard output, with exit code 1."""
        document = json.loads(self.stdout.decode("ascii"))
        assert isinstance(document, dict)
        assert set(document) == {"cniVersion", "code", "msg"}
        assert self.exit_code == 1
        assert not any(phrase in document["msg"].lower() for phrase in MISREAD)
        return document


@contextmanager
def file_of(config: bytes) -> Iterator[int]:
    """A configuration as a file, whose bytes are available immediately, unlike a pipe's."""
    with os.fdopen(os.memfd_create("config"), "w+b", buffering=0) as file:
        file.write(config)
        file.seek(0)
        yield file.fileno()


@dataclass(frozen=True)
class Launcher:
    """An executable, and the environment that names an agent's socket."""

    executable: Path
    socket: Path

    def environ(self, **changes: str | bytes) -> dict[str, str | bytes]:
        base = {"CNI_COMMAND": "ADD", "PODFABRIC_SOCKET": str(self.socket)}
        return {**base, **changes}

    def start(
        self,
        environ: Mapping[str, str | bytes] | None = None,
        *,
        stdin: int | None = subprocess.PIPE,
        through: Sequence[str] = (),
        preexec_fn: Callable[[], object] | None = None,
        user: int | None = None,
    ) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [*through, str(self.executable)],
            env=self.environ() if environ is None else environ,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=preexec_fn,
            user=user,
        )

    def run(
        self,
        environ: Mapping[str, str | bytes] | None = None,
        config: bytes = CONFIG,
        *,
        stdin: int | None = subprocess.PIPE,
        through: Sequence[str] = (),
        preexec_fn: Callable[[], object] | None = None,
        user: int | None = None,
    ) -> Outcome:
        process = self.start(
            environ, stdin=stdin, through=through, preexec_fn=preexec_fn, user=user
        )
        with process:
            try:
                content = config if process.stdin is not None else None
                stdout, stderr = process.communicate(content, timeout=PATIENCE)
            finally:
                process.kill()
        return Outcome(process.returncode, stdout, stderr)


class Peer:
    """The agent's end of one connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.body = b""
        self.header = RequestHeader(0, 0, 0, 0)
        self.netns: os.stat_result | None = None

    def receive(self) -> LauncherRequest:
        """Read the whole request; keep the status of its descriptor and close it."""
        first = self._some(1)
        assert first, "the launcher sent nothing"
        self.header = framing.read_header(first + self._exactly(HEADER.size - 1))
        self.body = self._exactly(self.header.total - HEADER.size)
        return framing.read_request(self.header, self.body)

    def send(self, content: bytes) -> None:
        self.socket.sendall(content)

    def waits(self) -> bool:
        """Whether the launcher waits: it sends no more and has not closed the connection."""
        return not select.select([self.socket], [], [], 0)[0]

    def rest(self) -> bytes:
        """All bytes until the launcher closes the connection, normally none."""
        return b"".join(iter(lambda: self.socket.recv(1 << 16), b""))

    def _exactly(self, size: int) -> bytes:
        content = bytearray()
        while len(content) < size:
            chunk = self._some(size - len(content))
            assert chunk, f"the launcher ended after {len(content)} of {size} bytes"
            content += chunk
        return bytes(content)

    def _some(self, size: int) -> bytes:
        content, ancillary, _, _ = self.socket.recvmsg(size, socket.CMSG_SPACE(64))
        for _, _, rights in ancillary:
            assert self.netns is None, "a second descriptor"
            (descriptor,) = struct.unpack("i", rights)
            self.netns = os.fstat(descriptor)
            os.close(descriptor)
        return content


class Agent:
    """Serves connections one after the other with `act`, until the test ends."""

    def __init__(self, path: Path, act: Callable[[Peer], object]) -> None:
        self.served = 0
        self.errors: list[BaseException] = []
        self._act = act
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> "Agent":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(PATIENCE)
        self._listener.close()
        assert not self._thread.is_alive()
        assert not self.errors, self.errors

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.served += 1
            with connection:
                connection.settimeout(PATIENCE)
                try:
                    self._act(Peer(connection))
                except BaseException as error:  # noqa: BLE001 - the test's thread raises it
                    self.errors.append(error)


def answering(answer: bytes) -> Callable[[Peer], object]:
    """Read the request, send these bytes, close."""

    def act(peer: Peer) -> None:
        peer.receive()
        peer.send(answer)

    return act


class Recorder:
    """Serves a connection: keeps the request, answers, and checks that the launcher closes."""

    def __init__(self, answer: bytes = WHOLE) -> None:
        self.answer = answer
        self.peer: Peer | None = None
        self.request: LauncherRequest | None = None

    def __call__(self, peer: Peer) -> None:
        self.request, self.peer = peer.receive(), peer
        assert peer.waits(), "it hung up before the answer, or sent more than its header says"
        peer.send(self.answer)
        assert peer.rest() == b""
