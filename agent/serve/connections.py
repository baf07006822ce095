"""The connection of a launcher, which sends one request and gets one answer.

The server's thread reads the request, a worker answers, and the server's thread closes the
connection. After a deadline the server's thread answers, and the worker's later answer is dropped.
"""

import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from enum import Enum

from agent.serve import framing
from agent.serve.framing import HEADER, BadFrame, LauncherRequest, RequestHeader
from base.interrupts import Call
from cni.spec.dispatch import CLEANING_UP

SMALL = 8 << 10  # bytes; nearly every request is smaller
SETTLE = 1.0  # seconds that the threads of calls need to free their objects
_UCRED = struct.Struct("3i")


class Lost(Exception):
    """A part of a request was lost. The text names the part and the reason."""


class ConfigTooLarge(Exception):
    """The configuration is too large for its verb. The text is for the client."""


class ConnectionState(Enum):
    READING = 1
    WAITING = 2  # for memory for the rest of the request
    CALLED = 3  # the request is complete, and a worker has it or will get it
    ANSWERED = 4


class LauncherConnection:
    """The connection of one launcher. The present `state` must end by `deadline` (monotonic)."""

    def __init__(self, peer: socket.socket, number: int, deadline: float) -> None:
        peer.setblocking(False)
        self.number = number
        self.arrived = time.monotonic()
        self.state = ConnectionState.READING
        self.deadline = deadline
        self.call: Call | None = None
        self.begun = False  # by a worker
        self._request: LauncherRequest | None = None  # complete, and no worker has it yet
        self.overtime = False
        self._peer = peer
        self._look = select.poll()
        self._look.register(peer, select.POLLRDHUP)  # POLLHUP and POLLERR are always reported
        self._lock = threading.Lock()
        self._closed = False
        self._netns: int | None = None
        self._buffer = bytearray(SMALL)  # one byte longer than the request, or more
        self._received = 0
        self._header: RequestHeader | None = None
        self.unsent = b""  # the part of the answer that waits for the socket's buffer

    def fileno(self) -> int:
        return self._peer.fileno()

    @property
    def peer_uid(self) -> int:
        """The client's uid from the kernel (unix(7), SO_PEERCRED)."""
        ucred = self._peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        uid: int = _UCRED.unpack(ucred)[1]
        return uid

    def receive(self, max_config: int) -> LauncherRequest | None:
        """Read the bytes that have arrived. Returns the request once it is complete.

        Raises BadFrame, EOFError if the client is gone, and Lost if the kernel dropped the
        descriptor. Raises ConfigTooLarge above `max_config` bytes, except for DEL and GC.
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
            raise Lost("the agent has too many open files, and cannot receive CNI_NETNS")
        if not count:
            raise EOFError
        self._received += count
        if self._received < HEADER.size:
            return None
        if self._header is None:
            self._header = framing.read_header(bytes(self._buffer[: HEADER.size]))
        if self._received > self._header.total:
            raise BadFrame("the request is longer than its header says")
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
        """The buffer size that the request needs, or 0 if the present buffer is large enough."""
        if self._header is None or self._header.total < len(self._buffer):
            return 0
        return self._header.total + 1

    def wait(self, deadline: float) -> None:
        """Wait for memory. The caller reads the rest of the request after `make_buffer`."""
        self.state, self.deadline = ConnectionState.WAITING, deadline

    def make_buffer(self, deadline: float) -> None:
        """Make a buffer for the whole request, after `Room` has given memory for it."""
        buffer = bytearray(self.lacking)
        buffer[: self._received] = self._buffer[: self._received]
        self._buffer = buffer
        self.state, self.deadline = ConnectionState.READING, deadline

    def _check_size(self, header: RequestHeader, body: memoryview, max_config: int) -> None:
        if header.config <= max_config or len(body) < header.before_config:
            return
        if framing.read_environ(header, body).get("CNI_COMMAND") not in CLEANING_UP:
            raise ConfigTooLarge(
                f"the configuration has {header.config} bytes, at most {max_config} are "
                'allowed on this node ("agent.max_config_bytes" in config.yaml): shorten the '
                "configuration"
            )

    def _drop_buffer(self) -> None:
        self._buffer, self._received = bytearray(), 0

    def called(self, request: LauncherRequest, call: Call, deadline: float) -> None:
        """Keep the complete request for a worker."""
        self._request = request
        self.call, self.state, self.deadline = call, ConnectionState.CALLED, deadline

    def begin(self) -> tuple[LauncherRequest, Call, int | None] | None:
        """The request, its call, and the network namespace's descriptor, which the worker closes.

        Returns `None` if the client already has an answer or is gone.
        """
        with self._lock:
            request, self._request = self._request, None
            is_called = self.state is ConnectionState.CALLED
            if not (is_called and request and self.call) or self._gone():
                return None
            self.begun = True
            netns, self._netns = self._netns, None
            return request, self.call, netns

    def gone(self) -> bool:
        """Ask the kernel whether the client has hung up. Any thread may call this."""
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
        """Send the answer. Returns False if an answer was sent before.

        Args:
            patience: seconds for the client to read the answer.
            wait_for_room: called if the socket's buffer is full. `flush` sends the rest.
            unless_begun: return False if a worker has begun the call.
        """
        with self._lock:
            answered = self._closed or self.state is ConnectionState.ANSWERED
            if answered or (unless_begun and self.begun):
                return False
            self.state = ConnectionState.ANSWERED
            self.deadline = time.monotonic() + patience
            self.unsent = frame
            self._send()
            if self.unsent:
                wait_for_room()
            return True

    def flush(self) -> bool:
        """Send more of the answer. Returns whether all of the answer is sent."""
        with self._lock:
            self._send()
            return not self.unsent

    def stop_reading(self) -> None:
        """Make the client's next send fail, so that the client reads its answer."""
        self._drop_buffer()
        with suppress(OSError):
            self._peer.shutdown(socket.SHUT_RD)

    def close(self, unregister: Callable[["LauncherConnection"], object]) -> None:
        """Close the connection and free everything. Only the server's thread may call this.

        `unregister` removes the socket from the server's epoll set. close(2) does not remove the
        socket while a child process has a copy of the descriptor.
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
        return self._closed or bool(self._look.poll(0))

    def _send(self) -> None:
        try:
            while self.unsent:
                sent = self._peer.send(self.unsent, socket.MSG_NOSIGNAL)
                self.unsent = self.unsent[sent:]
        except BlockingIOError:
            pass
        except OSError:  # the client has gone
            self.unsent = b""

    def _keep_descriptor(self, ancillary: list[tuple[int, int, bytes]]) -> None:
        for level, kind, content in ancillary:
            if (level, kind) != (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                continue
            for (descriptor,) in struct.iter_unpack("i", content[: len(content) // 4 * 4]):
                if self._netns is None:
                    self._netns = descriptor
                else:
                    os.close(descriptor)


class Room:
    """Gives memory to large requests, at most `size` bytes in all. Any thread may use it.

    Requests without memory wait in their order. No request may ask for more than `size` bytes.
    """

    def __init__(self, size: int) -> None:
        self._free = size
        self._lock = threading.Lock()
        self._held: dict[LauncherConnection, int] = {}
        self._left: float | None = None  # when the last request returned its bytes
        self._waiting: deque[tuple[LauncherConnection, int]] = deque()

    def take(self, who: LauncherConnection, size: int) -> bool:
        """Give `who` its memory if enough is free. Returns whether `who` has the memory.

        Otherwise the request waits until `admitted` returns it.
        """
        with self._lock:
            if self._waiting or size > self._free:
                self._waiting.append((who, size))
                return False
            self._hold(who, size)
            return True

    def admitted(self) -> list[LauncherConnection]:
        """Give free memory to waiting requests, in order. Returns the served requests."""
        admitted: list[LauncherConnection] = []
        if not self._waiting:  # nearly always
            return admitted
        with self._lock:
            while self._waiting and self._waiting[0][1] <= self._free:
                who, size = self._waiting.popleft()
                self._hold(who, size)
                admitted.append(who)
        return admitted

    def give_back(self, who: LauncherConnection) -> bool:
        """Take back the memory that `who` has or waits for. Returns whether other requests wait."""
        with self._lock:
            if who in self._held:
                self._free += self._held.pop(who)
                self._left = None if self._held else time.monotonic()
            if self._waiting and any(waiting is who for waiting, _ in self._waiting):
                self._waiting = deque(entry for entry in self._waiting if entry[0] is not who)
            return bool(self._waiting)

    def was_left(self) -> bool:
        """Whether no request has had memory for SETTLE seconds.

        Returns True once, then False until requests have had memory again.
        """
        with self._lock:
            over = self._left is not None and time.monotonic() >= self._left + SETTLE
            if over:
                self._left = None
            return over

    def _hold(self, who: LauncherConnection, size: int) -> None:
        self._free -= size
        self._held[who] = size
        self._left = None
