"""Serves /metrics, the page and the states, at a loopback address or a unix socket.

Any process of the node may be a client. So this server limits the size and the time of a request,
the number of clients, and the number of scrapes at a time. When all places are taken, the server
drops the client that has been connected longest without a request. A connection serves one request.
A browser sends the page's host name. A foreign name is refused, because a foreign site can let its
name resolve to a loopback address, and then read the page.
"""

import logging
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from io import BytesIO
from pathlib import Path
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, NamedTuple

from agent.settings import listen_address
from base import unix_socket
from node.page import html_page
from node.page.feed import Feed

MAX_REQUEST = 8 << 10  # bytes; Prometheus sends about 300
REQUEST_TIME = 3.0  # seconds for a whole request
ANSWER_TIME = 5.0  # seconds for the client to read its answer
MAX_CLIENTS = 32
MAX_SCRAPES = 4  # the other places are for the page and health checks
MAX_READERS = 10  # of the page's events, and requests for the page at a time
MAX_KEPT = 16  # documents of the page
SHARE = 4  # pause after drawing a document, in CPU times of the drawing

State = Callable[[], tuple[bool, str]]  # whether the state is good, and a line of text

_OWN_HOST = re.compile(r"(localhost|127(\.[0-9]{1,3}){3}|\[::1\])(:[0-9]+)?")
_TEXT = "text/plain; charset=utf-8"

_log = logging.getLogger(__name__)


class HttpAnswer(NamedTuple):
    status: HTTPStatus
    content: bytes | Generator[bytes, None, None]
    type: str = _TEXT


class _Drawn(NamedTuple):
    content: bytes
    version: int  # of the feed
    until: float  # shown until then (time.monotonic()), also after a change


class Endpoint(ThreadingMixIn, TCPServer):
    """Serves at `listen` (see `agent.settings.listen_address`), with a thread for each client.

    An `exposition` adds /metrics, and a `feed` adds the page. Without these, an endpoint may listen
    at any address, because the states are not secret. Raises OSError if it cannot listen.
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
        feed: Feed | None = None,
        **more: State,
    ) -> None:
        local = exposition is not None or feed is not None
        self._listen = listen_address(listen, local=local)
        if self._listen is None:
            raise ValueError("an endpoint needs an address")
        self._exposition = exposition
        self._feed = feed
        self._readers = threading.BoundedSemaphore(MAX_READERS)
        self._pages = threading.BoundedSemaphore(MAX_READERS)
        self._drawing = threading.Lock()
        self._draw_at = 0.0  # not before this time (time.monotonic())
        self._documents: dict[str, _Drawn] = {}  # by query
        self._states = {"/healthz": alive, "/readyz": ready}
        self._states |= {f"/{name}": state for name, state in more.items()}
        self._scrapes = threading.BoundedSemaphore(MAX_SCRAPES)
        self._places = threading.BoundedSemaphore(MAX_CLIENTS)
        self._lock = threading.Lock()
        self._silent: dict[socket.socket, None] = {}  # clients without a request, oldest first
        self._closing = False
        port = self._listen if isinstance(self._listen, tuple) else ("", 0)
        self.address_family = socket.AF_INET6 if ":" in port[0] else socket.AF_INET
        super().__init__(port, _HttpRequest)
        threading.Thread(target=self.serve_forever, name="http", daemon=True).start()

    @property
    def address(self) -> str:
        if isinstance(self._listen, Path):
            return f"unix:{self._listen}"
        host, port = self.socket.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def close(self) -> None:
        """Stop listening. Does not wait until running answers are sent."""
        if self._closing:
            return
        self._closing = True
        with suppress(OSError):  # wakes the thread, so that `shutdown` ends soon
            self.socket.shutdown(socket.SHUT_RDWR)
        self.shutdown()
        if isinstance(self._listen, Path):
            self._listen.unlink(missing_ok=True)  # now, before another process listens there
        self.server_close()
        self._drop_silent(MAX_CLIENTS)

    def server_bind(self) -> None:
        if isinstance(self._listen, Path):
            self.socket.close()
            self.socket = unix_socket.listen(self._listen, self.request_queue_size)
        else:
            super().server_bind()
        self.socket.setblocking(False)

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a client, and wait for a place. Raises OSError when the endpoint closes."""
        try:
            client, address = super().get_request()
        except OSError as error:
            if not self._closing and not isinstance(error, BlockingIOError):
                _log.warning("metrics and health: cannot accept a connection: %s", error.strerror)
                time.sleep(0.2)  # no descriptor is left
            raise
        while not self._places.acquire(timeout=0.01):
            if self._closing:
                client.close()
                raise OSError("the endpoint is closing")
            self._drop_silent(1)
        with self._lock:
            self._silent[client] = None
        return client, address

    def has_asked(self, client: socket.socket) -> None:
        """Record that the client has sent its request. The server then does not drop the client."""
        with self._lock:
            self._silent.pop(client, None)

    def shutdown_request(self, request: Any) -> None:  # noqa: ANN401 - as in TCPServer
        self.has_asked(request)
        super().shutdown_request(request)
        self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        """Log the error that ended a client's thread, unless the client has hung up."""
        if not isinstance(sys.exception(), OSError):
            _log.exception("metrics and health: serving a client")

    def answer(self, path: str, query: str = "", host: str = "localhost") -> HttpAnswer:
        if path == "/metrics" and self._exposition is not None:
            return self._scrape(self._exposition)
        if path in ("/", "/events") and self._feed is not None:
            if not _OWN_HOST.fullmatch(host):
                return HttpAnswer(HTTPStatus.FORBIDDEN, b"open the page as localhost\n")
            if path == "/":
                return self._page(self._feed, query)
            return self._events(self._feed)
        state = self._states.get(path)
        if state is None:
            paths = [*(["/metrics"] if self._exposition is not None else []), *self._states]
            paths += ["/"] if self._feed is not None else []
            return HttpAnswer(HTTPStatus.NOT_FOUND, f"the paths are {', '.join(paths)}\n".encode())
        well, text = state()
        status = HTTPStatus.OK if well else HTTPStatus.SERVICE_UNAVAILABLE
        return HttpAnswer(status, f"{text}\n".encode(errors="replace"))

    def _scrape(self, exposition: Callable[[], bytes]) -> HttpAnswer:
        if not self._scrapes.acquire(blocking=False):
            return HttpAnswer(HTTPStatus.SERVICE_UNAVAILABLE, b"too many scrapes at once\n")
        try:
            return HttpAnswer(
                HTTPStatus.OK, exposition(), "text/plain; version=0.0.4; charset=utf-8"
            )
        finally:
            self._scrapes.release()

    def _page(self, feed: Feed, query: str) -> HttpAnswer:
        if not self._pages.acquire(blocking=False):
            return HttpAnswer(HTTPStatus.SERVICE_UNAVAILABLE, b"too many pages at once\n")
        try:
            page = self._document(feed, query)
        finally:
            self._pages.release()
        return HttpAnswer(HTTPStatus.OK, page, "text/html; charset=utf-8")

    def _document(self, feed: Feed, query: str) -> bytes:
        """The page. All drawing together takes at most a fifth of a CPU."""
        with self._drawing:
            version, nodes = feed.version, feed.nodes()
            made = self._documents.get(query)
            if made is not None and (made.version == version or time.monotonic() < made.until):
                return made.content
            time.sleep(max(0.0, self._draw_at - time.monotonic()))
            began = time.thread_time()
            content = html_page.document(nodes, query)
            feed.pause = SHARE * (time.thread_time() - began)
            if len(self._documents) >= MAX_KEPT:
                self._documents.clear()
            self._draw_at = time.monotonic() + feed.pause
            self._documents[query] = _Drawn(content, version, self._draw_at)
            return content

    def _events(self, feed: Feed) -> HttpAnswer:
        if not self._readers.acquire(blocking=False):
            text = f"the page has {MAX_READERS} readers: close one\n"
            return HttpAnswer(HTTPStatus.SERVICE_UNAVAILABLE, text.encode())

        def events() -> Generator[bytes, None, None]:
            try:
                yield b""  # an unstarted generator would not run `finally`
                yield from feed.events(lambda: self._closing)
            finally:
                self._readers.release()

        started = events()
        next(started)
        return HttpAnswer(HTTPStatus.OK, started, "text/event-stream")

    def _drop_silent(self, count: int) -> None:
        """Shut down the `count` clients that have been connected longest without a request."""
        with self._lock:
            for client in list(self._silent)[:count]:
                del self._silent[client]
                with suppress(OSError):
                    client.shutdown(socket.SHUT_RDWR)


class _HttpRequest(BaseHTTPRequestHandler):
    server: Endpoint
    default_request_version = "HTTP/1.0"  # otherwise an answer would have no status line
    error_message_format = "%(message)s\n"
    error_content_type = _TEXT

    def setup(self) -> None:
        super().setup()
        self.rfile = BytesIO(_received(self.connection))
        self.connection.settimeout(ANSWER_TIME)
        self.server.has_asked(self.connection)

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        try:
            answer = self.server.answer(path, query, self.headers.get("Host", "localhost"))
        except Exception:  # noqa: BLE001 - the client must get an answer
            _log.exception("answering %s", path)
            text = b"the agent failed: see its log\n"
            answer = HttpAnswer(HTTPStatus.INTERNAL_SERVER_ERROR, text)
        self.send_response_only(answer.status)
        self.send_header("Content-Type", answer.type)
        self.send_header("Content-Security-Policy", html_page.POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cache-Control", "no-store")
        content = answer.content
        if isinstance(content, bytes):
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
            return
        self.end_headers()
        with closing(content):
            for part in content:
                self.wfile.write(part)

    def log_message(self, format: str, *args: object) -> None:
        """Log no request."""


def _received(client: socket.socket) -> bytes:
    """The head of a request. Returns b"" if the head is too slow or too long."""
    end = time.monotonic() + REQUEST_TIME
    head = b""
    with suppress(OSError):
        while len(head) < MAX_REQUEST and (left := end - time.monotonic()) > 0:
            client.settimeout(left)
            chunk = client.recv(MAX_REQUEST - len(head))
            head = (head + chunk).lstrip(b"\r\n")  # RFC 9112, section 2.2
            if b"\r\n\r\n" in head or b"\n\n" in head:
                return head
            if not chunk:
                break
    return b""
