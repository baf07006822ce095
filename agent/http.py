"""/metrics, /healthz, /readyz and /removed, on a loopback address or a unix socket.

Any process of the node may be a client, so everything is bounded: the size and time of a request,
how many clients there are at once, and how many of them scrape. When all places are taken, the
client that has waited longest without sending its request is dropped for the next one. A
connection serves one request.

The server is the standard library's. Its http.server adds little to the request line that is read
here, and takes twice as long to import as this package.
"""

import logging
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from socketserver import BaseRequestHandler, TCPServer, ThreadingMixIn
from typing import Any, NamedTuple

from agent import unix_socket
from agent.settings import listen_address

MAX_REQUEST = 8 << 10  # bytes; a Prometheus sends some 300
REQUEST_TIME = 3.0  # seconds for a whole request
ANSWER_TIME = 5.0  # seconds for the client to read its answer
LINGER = 0.3  # seconds for the client to close after its answer
MAX_CLIENTS = 16
MAX_SCRAPES = 4  # the other places are for health checks

State = Callable[[], tuple[bool, str]]
"""Whether all is well, and a line of text about it."""

_log = logging.getLogger(__name__)


class Endpoint(ThreadingMixIn, TCPServer):
    """Serves at `listen` (see `settings.listen_address`), a thread for each client, until `close`.

    Port 0 is any free port; `address` says which. Without an `exposition` there is no /metrics, and
    any address of the machine may be listened at: the states are no secret. OSError if it cannot
    listen there.
    """

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 64

    def __init__(
        self,
        listen: str,
        exposition: Callable[[], bytes] | None,
        alive: State,
        ready: State,
        **more: State,
    ) -> None:
        self._listen = listen_address(listen, local=exposition is not None)
        if self._listen is None:
            raise ValueError("an endpoint needs an address")
        self.exposition = exposition
        self.states = {"/healthz": alive, "/readyz": ready}
        self.states |= {f"/{name}": state for name, state in more.items()}
        self.scrapes = threading.BoundedSemaphore(MAX_SCRAPES)
        self._places = threading.BoundedSemaphore(MAX_CLIENTS)
        self._lock = threading.Lock()
        self._reading: dict[socket.socket, None] = {}  # clients without a request, oldest first
        self._closing = False
        port = self._listen if isinstance(self._listen, tuple) else ("", 0)
        self.address_family = socket.AF_INET6 if ":" in port[0] else socket.AF_INET
        super().__init__(port, _HttpRequest)
        threading.Thread(target=self.serve_forever, name="http", daemon=True).start()

    @property
    def address(self) -> str:
        """The address in the form of `listen`."""
        if isinstance(self._listen, Path):
            return f"unix:{self._listen}"
        host, port = self.socket.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def close(self) -> None:
        """Stop listening. Answers that are being sent are not waited for."""
        if self._closing:
            return
        self._closing = True
        with suppress(OSError):  # wakes the thread, which would look at `shutdown` later
            self.socket.shutdown(socket.SHUT_RDWR)
        self.shutdown()
        if isinstance(self._listen, Path):
            self._listen.unlink(missing_ok=True)  # before another process can listen there
        self.server_close()
        self._drop_readers(MAX_CLIENTS)

    def has_read(self, client: socket.socket) -> None:
        """Count the client as silent no longer, so that it is not dropped for a new one."""
        with self._lock:
            self._reading.pop(client, None)

    def server_bind(self) -> None:
        """As in TCPServer, or listen at the path of a unix socket."""
        if isinstance(self._listen, Path):
            self.socket.close()
            self.socket = unix_socket.listen(self._listen, self.request_queue_size)
        else:
            super().server_bind()
        self.socket.setblocking(False)

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a client, and wait for a place for it. Raises OSError if there will be none."""
        try:
            client, address = super().get_request()
        except BlockingIOError:
            raise
        except OSError as error:  # no descriptor is left
            if self._closing:
                raise
            _log.warning("metrics and health: accepting a connection: %s", error.strerror)
            time.sleep(0.2)
            raise
        patience = 0.0
        while not self._places.acquire(timeout=patience):
            if self._closing:
                client.close()
                raise OSError("the endpoint is closing")
            self._drop_readers(1)
            patience = 0.1
        with self._lock:
            self._reading[client] = None
        return client, address

    def shutdown_request(self, request: Any) -> None:  # noqa: ANN401 - as in TCPServer
        """Let the client read its answer, close the connection, and free its place."""
        self.has_read(request)
        with suppress(OSError):
            request.shutdown(socket.SHUT_WR)
            # The kernel resets a connection with unread input, and the client loses its answer.
            end = time.monotonic() + LINGER
            while (left := end - time.monotonic()) > 0:
                request.settimeout(left)
                if not request.recv(MAX_REQUEST):
                    break
        self.close_request(request)
        self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        """Log what ended a client's thread, unless the client just went away."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            _log.error("metrics and health: serving a client", exc_info=error)

    def _drop_readers(self, count: int) -> None:
        """Shut down the clients that have waited longest without sending their request."""
        with self._lock:
            for client in list(self._reading)[:count]:
                del self._reading[client]
                with suppress(OSError):
                    client.shutdown(socket.SHUT_RDWR)


class _Reply(NamedTuple):
    status: HTTPStatus
    text: bytes
    version: str = ""  # of Prometheus' format


class _HttpRequest(BaseRequestHandler):
    """One request, in the client's thread."""

    server: Endpoint
    request: socket.socket

    def handle(self) -> None:
        """Read the request and answer it."""
        try:
            head = _receive(self.request)
        except TimeoutError:
            self._send(_text(HTTPStatus.REQUEST_TIMEOUT, "the request did not come in time"))
        except ValueError as error:
            self._send(_text(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, str(error)))
        else:
            self.server.has_read(self.request)
            if head:
                self._send(self._answer(head), body=not head.startswith(b"HEAD "))

    def _answer(self, head: bytes) -> _Reply:
        words = head.splitlines()[0].decode("latin-1").split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return _text(HTTPStatus.BAD_REQUEST, "this is not an HTTP/1 request")
        path = words[1].partition("?")[0]
        exposition = self.server.exposition
        paths = [*(["/metrics"] if exposition is not None else []), *self.server.states]
        if path not in paths:
            return _text(HTTPStatus.NOT_FOUND, f"the paths are {', '.join(paths)}")
        if words[0] not in ("GET", "HEAD"):
            return _text(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD are allowed")
        try:
            if exposition is not None and path == "/metrics":
                return self._scrape(exposition)
            well, text = self.server.states[path]()
        except Exception:  # noqa: BLE001 - the outermost edge: the client must get an answer
            _log.exception("answering %s", path)
            return _text(HTTPStatus.INTERNAL_SERVER_ERROR, "the agent failed: see its log")
        return _text(HTTPStatus.OK if well else HTTPStatus.SERVICE_UNAVAILABLE, text)

    def _scrape(self, exposition: Callable[[], bytes]) -> _Reply:
        if not self.server.scrapes.acquire(blocking=False):
            return _text(HTTPStatus.SERVICE_UNAVAILABLE, "too many scrapes at once")
        try:
            return _Reply(HTTPStatus.OK, exposition(), " version=0.0.4;")
        finally:
            self.server.scrapes.release()

    def _send(self, reply: _Reply, *, body: bool = True) -> None:
        head = [
            f"HTTP/1.1 {reply.status.value} {reply.status.phrase}",
            f"Content-Type: text/plain;{reply.version} charset=utf-8",
            f"Content-Length: {len(reply.text)}",
            "Connection: close",
            "X-Content-Type-Options: nosniff",
        ]
        if reply.status is HTTPStatus.METHOD_NOT_ALLOWED:
            head.append("Allow: GET, HEAD")
        self.request.settimeout(ANSWER_TIME)  # of sendall altogether
        self.request.sendall("\r\n".join((*head, "", "")).encode() + (reply.text if body else b""))


def _receive(client: socket.socket) -> bytes:
    """A request's head, b"" if the client goes away. TimeoutError; ValueError if it is too long."""
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
        head = (head + chunk).lstrip(b"\r\n")  # RFC 9112, section 2.2
    return head


def _text(status: HTTPStatus, text: str) -> _Reply:
    return _Reply(status, f"{text}\n".encode(errors="replace"))
