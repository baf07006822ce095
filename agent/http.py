"""/metrics, /healthz and /readyz, on this machine's own address or a unix socket.

A client is anybody on the node, so everything has its bound: a request's size and time, how many
there are at once, and how many of them make a scrape. One that only keeps others waiting is
closed for the next. A connection serves one request.
"""

import errno
import logging
import os
import select
import socket
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from agent.settings import listen_address

MAX_REQUEST = 8 << 10  # bytes; a Prometheus sends some 300
REQUEST_TIME = 3.0  # seconds for a whole request
ANSWER_TIME = 5.0  # seconds for the client to read its answer
LINGER = 0.3  # seconds for the client to close, once it has its answer
MAX_CLIENTS = 16
MAX_SCRAPES = 4  # the others are for whoever asks whether the agent lives
BACKLOG = 64

PLAIN = "text/plain; charset=utf-8"
EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"
REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}

State = Callable[[], tuple[bool, str]]
"""Whether all is well, and one line about it."""

_log = logging.getLogger(__name__)


class _Reply(NamedTuple):
    status: int
    body: bytes
    kind: str = PLAIN


class Endpoint:
    """Serves at `listen` (see `settings.listen_address`) in threads of its own until `close`.

    Port 0 is any free one; `address` says which. OSError if it cannot listen there.
    """

    def __init__(
        self, listen: str, exposition: Callable[[], bytes], alive: State, ready: State
    ) -> None:
        address = listen_address(listen)
        if address is None:
            raise ValueError("an endpoint needs an address")
        self._exposition = exposition
        self._states = {"/healthz": alive, "/readyz": ready}
        self._scrapes = threading.BoundedSemaphore(MAX_SCRAPES)
        self._room = threading.BoundedSemaphore(MAX_CLIENTS)
        self._lock = threading.Lock()
        self._reading: dict[socket.socket, None] = {}  # clients without a request, oldest first
        self._closing = False
        self._path = address if isinstance(address, Path) else None
        self._listener = _at_path(address) if isinstance(address, Path) else _at_port(*address)
        self._listener.setblocking(False)
        self._inode = address.lstat().st_ino if isinstance(address, Path) else 0
        self._end = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._accept, name="http", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Where it listens, in the form of `listen`."""
        if self._path is not None:
            return f"unix:{self._path}"
        host, port = self._listener.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def close(self) -> None:
        """No longer listen. Answers that are on their way are not waited for."""
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self._end, 1)
        self._thread.join()
        os.close(self._end)
        if self._path is not None:
            with suppress(OSError):
                if self._path.lstat().st_ino == self._inode:
                    self._path.unlink()
        self._listener.close()
        self._close_readers(MAX_CLIENTS)

    def _accept(self) -> None:
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        poll.register(self._listener, select.POLLIN)
        while not self._closing:
            poll.poll()
            try:
                client, _ = self._listener.accept()
            except BlockingIOError:
                continue
            except OSError as error:  # no descriptor left
                _log.warning("metrics and health: accepting a connection: %s", error.strerror)
                time.sleep(0.2)
                continue
            if self._make_room():
                self._begin(client)
            else:
                client.close()

    def _make_room(self) -> bool:
        """Wait until there may be one more client. False if it is the end."""
        while not self._room.acquire(blocking=False):
            if self._closing:
                return False
            self._close_readers(1)
            if self._room.acquire(timeout=0.1):
                break
        return True

    def _begin(self, client: socket.socket) -> None:
        with self._lock:
            self._reading[client] = None
        try:
            threading.Thread(target=self._serve, args=(client,), name="http", daemon=True).start()
        except RuntimeError as error:  # no more threads for this process
            _log.warning("metrics and health: %s", error)
            with self._lock:
                self._reading.pop(client, None)
            client.close()
            self._room.release()

    def _close_readers(self, count: int) -> None:
        """Those that have waited longest for their own request."""
        with self._lock:
            for client in list(self._reading)[:count]:
                del self._reading[client]
                with suppress(OSError):
                    client.shutdown(socket.SHUT_RDWR)

    def _serve(self, client: socket.socket) -> None:
        try:
            with client, suppress(OSError):  # it went away
                head = self._read(client)
                if isinstance(head, _Reply):
                    _send(client, b"", head)
                elif head:
                    _send(client, head, self._answer(head))
        finally:
            self._room.release()

    def _read(self, client: socket.socket) -> bytes | _Reply:
        """A request's head; b"" if there is nobody to answer; an answer to what is none."""
        try:
            return _receive(client)
        except TimeoutError:
            return _text(408, "the request did not come in time")
        except ValueError as error:
            return _text(431, str(error))
        finally:
            with self._lock:
                self._reading.pop(client, None)

    def _answer(self, head: bytes) -> _Reply:
        words = head.splitlines()[0].decode("latin-1").split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return _text(400, "this is no HTTP/1 request")
        method, target, _ = words
        path = target.partition("?")[0]
        if path != "/metrics" and path not in self._states:
            return _text(404, f"there are /metrics, {', '.join(self._states)}")
        if method not in ("GET", "HEAD"):
            return _text(405, "GET and HEAD are served")
        try:
            if path == "/metrics":
                return self._scrape()
            well, text = self._states[path]()
        except Exception:  # noqa: BLE001 - the outermost edge: the client must get an answer
            _log.exception("answering %s", path)
            return _text(500, "the agent failed to answer: see its log")
        return _text(200 if well else 503, text)

    def _scrape(self) -> _Reply:
        if not self._scrapes.acquire(blocking=False):
            return _text(503, "too many scrapes at once")
        try:
            return _Reply(200, self._exposition(), EXPOSITION)
        finally:
            self._scrapes.release()


def _receive(client: socket.socket) -> bytes:
    """A request's head, b"" if the client goes. TimeoutError; ValueError if it is too long."""
    end = time.monotonic() + REQUEST_TIME
    head = b""
    while b"\r\n\r\n" not in head and b"\n\n" not in head:
        if len(head) >= MAX_REQUEST:
            raise ValueError(f"a request has at most {MAX_REQUEST} bytes here")
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        client.settimeout(left)
        chunk = client.recv(MAX_REQUEST - len(head))
        if not chunk:
            return b""
        head = (head + chunk).lstrip(b"\r\n")  # as RFC 9112 wants it, section 2.2
    return head


def _send(client: socket.socket, head: bytes, reply: _Reply) -> None:
    lines = [
        f"HTTP/1.1 {reply.status} {REASONS[reply.status]}",
        f"Content-Type: {reply.kind}",
        f"Content-Length: {len(reply.body)}",
        "Connection: close",
        "X-Content-Type-Options: nosniff",
    ]
    if reply.status == 405:
        lines.append("Allow: GET, HEAD")
    body = b"" if head.startswith(b"HEAD ") else reply.body
    client.settimeout(ANSWER_TIME)  # of sendall altogether
    client.sendall("\r\n".join((*lines, "", "")).encode() + body)
    client.shutdown(socket.SHUT_WR)
    # What it still sends, unread, would make the kernel reset the connection under the answer.
    end = time.monotonic() + LINGER
    while (left := end - time.monotonic()) > 0:
        client.settimeout(left)
        if not client.recv(MAX_REQUEST):
            break


def _text(status: int, text: str) -> _Reply:
    return _Reply(status, f"{text}\n".encode(errors="replace"))


def _at_port(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _at_path(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # What bind(2) makes has this mode at once, and no other thread's umask changes.
        os.fchmod(listener.fileno(), 0o600)
        try:
            listener.bind(str(path))
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not _is_stale(path):
                raise
            path.unlink()
            listener.bind(str(path))
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _is_stale(path: Path) -> bool:
    """Whether it is a socket on which nobody listens."""
    if not stat.S_ISSOCK(path.lstat().st_mode):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:  # a listener whose backlog is full
            return False
    return False
