"""One launcher's connection: its request as it comes in, its one answer, its end.

The server's thread reads and closes; a worker answers. Whoever comes first answers, and only
once: a call that ends after its deadline finds the answer given.

A small request is read at once. For a large one the server must first have room: then its buffer
is made, and the rest is read.
"""

import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from enum import Enum

from agent import framing
from agent.framing import HEADER, BadFrame, LauncherRequest, RequestHeader
from base.interrupts import Call

SMALL = 8 << 10  # bytes; nearly every request is smaller
CLEANING_UP = ("DEL", "GC")  # what an ADD of any size left behind, and beside it what it answered
_UCRED = struct.Struct("3i")


class Lost(Exception):
    """A part of a request did not come through. The text says which."""


class TooLarge(Exception):
    """A configuration that is larger than its verb allows. The text is for the client."""


class ConnectionState(Enum):
    """How far a connection is."""

    READING = 1
    WAITING = 2  # for room for the rest of the request
    CALLED = 3  # the request is whole, and a worker has it or will have it
    ANSWERED = 4


class LauncherConnection:
    """A launcher that has connected. `deadline` (monotonic) is when its present state ends."""

    def __init__(self, peer: socket.socket, number: int, deadline: float) -> None:
        peer.setblocking(False)
        self.number = number
        self.arrived = time.monotonic()
        self.state = ConnectionState.READING
        self.deadline = deadline
        self.call: Call | None = None
        self.begun = False  # by a worker
        self._request: LauncherRequest | None = (
            None  # from when it is whole until a worker takes it
        )
        self.overtime = False
        self._peer = peer
        self._lock = threading.Lock()
        self._closed = False
        self._netns: int | None = None
        self._buffer = bytearray(SMALL)  # one byte longer than the request, or more
        self._received = 0
        self._header: RequestHeader | None = None
        self._unsent = b""

    def fileno(self) -> int:
        return self._peer.fileno()

    @property
    def peer_uid(self) -> int:
        """Who connected, as the kernel says (unix(7), SO_PEERCRED)."""
        ucred = self._peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        uid: int = _UCRED.unpack(ucred)[1]
        return uid

    def receive(self, max_config: int) -> LauncherRequest | None:
        """Read what is there. The request once it is whole; EOFError if the peer is gone.

        Raises BadFrame for what no launcher sends, Lost for what did not come through, TooLarge
        for a configuration above `max_config` bytes that is not to clean up.
        """
        try:
            with memoryview(self._buffer) as buffer:
                count, ancillary, flags, _ = self._peer.recvmsg_into(
                    [buffer[self._received :]], socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC
                )
        except BlockingIOError:
            return None
        except OSError as error:
            raise EOFError(str(error)) from None
        self._keep_descriptor(ancillary)
        if flags & socket.MSG_CTRUNC and self._netns is None:
            raise Lost("the pod's namespace was lost on the way: the agent has too many files open")
        if not count:
            raise EOFError
        self._received += count
        if self._received < HEADER.size:
            return None
        if self._header is None:
            self._header = framing.read_header(bytes(self._buffer[: HEADER.size]))
        if self._received > self._header.total:
            raise BadFrame("more follows than its lengths say")
        with memoryview(self._buffer) as buffer:
            body = buffer[HEADER.size : self._received]
            self._check_size(self._header, body, max_config)
            whole = self._received == self._header.total
            request = framing.read_request(self._header, body) if whole else None
        if request is not None:
            self._drop_buffer()
        return request

    @property
    def lacking(self) -> int:
        """Bytes of the buffer that the request needs and does not have, 0 if it has one."""
        if self._header is None or self._header.total < len(self._buffer):
            return 0
        return self._header.total + 1

    def wait(self, deadline: float) -> None:
        """Until there is room for the request, nothing more of it is read."""
        self.state, self.deadline = ConnectionState.WAITING, deadline

    def make_buffer(self, deadline: float) -> None:
        """There is room for what is `lacking`: the whole request can be read."""
        buffer = bytearray(self.lacking)
        buffer[: self._received] = self._buffer[: self._received]
        self._buffer = buffer
        self.state, self.deadline = ConnectionState.READING, deadline

    def _check_size(self, header: RequestHeader, body: memoryview, max_config: int) -> None:
        if header.config <= max_config or len(body) < header.before_config:
            return
        if framing.read_environ(header, body).get("CNI_COMMAND") not in CLEANING_UP:
            raise TooLarge(
                f"the configuration has {header.config} bytes, at most {max_config} are allowed on "
                'this node ("agent.max_config_bytes" in config.yaml): shorten it'
            )

    def _drop_buffer(self) -> None:
        self._buffer, self._received = bytearray(), 0

    def called(self, request: LauncherRequest, call: Call, deadline: float) -> None:
        """The request is whole, and `call` is what becomes of it."""
        self._request = request
        self.call, self.state, self.deadline = call, ConnectionState.CALLED, deadline

    def begin(self) -> tuple[LauncherRequest, Call, int | None] | None:
        """A worker takes the call up, and its namespace, which is the worker's to close.

        None if it has been answered or given up already, or if the client has gone.
        """
        with self._lock:
            request, self._request = self._request, None
            if (
                self.state is not ConnectionState.CALLED
                or not request
                or not self.call
                or self._gone()
            ):
                return None
            self.begun = True
            netns, self._netns = self._netns, None
            return request, self.call, netns

    def gone(self) -> bool:
        """Whether the client has hung up, as the kernel says it now; from any thread.

        The server's thread may come to know it later.
        """
        with self._lock:
            return self._gone()

    def answer(
        self,
        frame: bytes,
        patience: float,
        wait_for_room: Callable[[], object],
        *,
        unless_begun: bool = False,
    ) -> bool:
        """Send the one answer; False if there was one, or `unless_begun` came too late.

        The peer has `patience` seconds to read it. `wait_for_room` is called if it does not fit
        the socket's buffer: then `flush` sends more of it.
        """
        with self._lock:
            if (
                self.state is ConnectionState.ANSWERED
                or self._closed
                or (unless_begun and self.begun)
            ):
                return False
            self.state = ConnectionState.ANSWERED
            self.deadline = time.monotonic() + patience
            self._unsent = frame
            self._send()
            if self._unsent:
                wait_for_room()
            return True

    def flush(self) -> bool:
        """Send more of an answer that did not fit. Whether all of it is on its way."""
        with self._lock:
            self._send()
            return not self._unsent

    @property
    def unsent(self) -> bool:
        """Whether a part of the answer did not fit the socket's buffer yet."""
        return bool(self._unsent)

    def stop_reading(self) -> None:
        """What the peer still sends fails over there, and it turns to its answer."""
        self._drop_buffer()
        with suppress(OSError):
            self._peer.shutdown(socket.SHUT_RD)

    def close(self, unregister: Callable[["LauncherConnection"], object]) -> None:
        """The server's thread is done with it: nothing of it is kept.

        `unregister` takes it out of the server's epoll set. close(2) does that only for the last
        copy of an open file, and an executable that a worker starts at this moment has a copy.
        """
        with self._lock:
            self._closed = True
            unregister(self)
            self._peer.close()
            self._request = self.call = None
            self._drop_buffer()
            if self._netns is not None:
                os.close(self._netns)
                self._netns = None

    def _gone(self) -> bool:
        if self._closed:
            return True
        look = select.poll()
        look.register(self._peer, select.POLLRDHUP)  # POLLHUP and POLLERR are always told
        return bool(look.poll(0))

    def _send(self) -> None:
        try:
            while self._unsent:
                sent = self._peer.send(self._unsent, socket.MSG_NOSIGNAL)
                self._unsent = self._unsent[sent:]
        except BlockingIOError:
            pass
        except OSError:  # the peer has gone: nobody is left to tell
            self._unsent = b""

    def _keep_descriptor(self, ancillary: list[tuple[int, int, bytes]]) -> None:
        for level, kind, content in ancillary:
            if (level, kind) != (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                continue
            for (descriptor,) in struct.iter_unpack("i", content[: len(content) // 4 * 4]):
                if self._netns is None:
                    self._netns = descriptor
                else:
                    os.close(descriptor)
