"""The endpoint: its answers, and that no client keeps it from answering another client."""

import itertools
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from agent.observe import http
from agent.observe.http import Endpoint
from node.fabric_node import FabricNodeStatus
from node.page.feed import Feed
from tests.waiting import PATIENCE, until


class Agent:
    """The states behind an endpoint."""

    def __init__(self) -> None:
        self.alive: tuple[bool, str] = (True, "serving")
        self.ready: tuple[bool, str] = (True, "serving")
        self.exposition: Callable[[], bytes] = lambda: b"podfabric_up 1\n"

    def endpoint(self, listen: str = "127.0.0.1:0") -> Endpoint:
        return Endpoint(listen, lambda: self.exposition(), lambda: self.alive, lambda: self.ready)


@pytest.fixture
def agent() -> Agent:
    return Agent()


@pytest.fixture
def endpoint(agent: Agent) -> Iterator[Endpoint]:
    with closing(agent.endpoint()) as made:
        yield made


def connect(endpoint: Endpoint) -> socket.socket:
    if endpoint.address.startswith("unix:"):
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(PATIENCE)
        client.connect(endpoint.address.removeprefix("unix:"))
        return client
    host, _, port = endpoint.address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), PATIENCE)


def read_all(client: socket.socket) -> bytes:
    chunks = []
    while chunk := client.recv(65536):
        chunks.append(chunk)
    return b"".join(chunks)


def ask(endpoint: Endpoint, request: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the answer."""
    with connect(endpoint) as client:
        client.sendall(request)
        answer = read_all(client)
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *rest = head.decode().split("\r\n")
    assert first.startswith("HTTP/1.0 ")
    return int(first.split(" ")[1]), dict(line.split(": ", 1) for line in rest), body


def get(endpoint: Endpoint, path: str) -> tuple[int, bytes]:
    status, _, body = ask(endpoint, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    return status, body


def test_metrics_are_served_in_prometheus_text_format(endpoint: Endpoint) -> None:
    status, headers, body = ask(endpoint, b"GET /metrics?x=y HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (status, body) == (200, b"podfabric_up 1\n")
    assert headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert headers["Content-Length"] == str(len(body))
    assert "Server" not in headers


def test_health_and_readiness_are_what_the_agent_says(endpoint: Endpoint, agent: Agent) -> None:
    assert get(endpoint, "/healthz") == (200, b"serving\n")
    assert get(endpoint, "/readyz") == (200, b"serving\n")
    agent.ready = (False, "stopping")
    assert get(endpoint, "/readyz") == (503, b"stopping\n")
    assert get(endpoint, "/healthz") == (200, b"serving\n")
    agent.alive = (False, "the serving thread hangs")
    assert get(endpoint, "/healthz") == (503, b"the serving thread hangs\n")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 404),
        (b"GET /metrics/ HTTP/1.1\r\n\r\n", 404),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", 501),
        (b"get /metrics HTTP/1.1\r\n\r\n", 501),
        (b"GET /metrics HTTP/2.0\r\n\r\n", 505),
        (b"\x16\x03\x01\x02\x00\x01\n\n", 400),
        (b"GET /metrics HTTP/1.0\n\n", 200),
        (b"\r\n\r\nGET /metrics HTTP/1.1\r\n\r\n", 200),
    ],
)
def test_other_requests_have_their_status(endpoint: Endpoint, request_: bytes, status: int) -> None:
    assert ask(endpoint, request_)[0] == status


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /" + b"x" * http.MAX_REQUEST + b" HTTP/1.1\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\n" + b"X: y\r\n" * 100_000 + b"\r\n",
    ],
)
def test_a_request_that_is_too_long_gets_no_answer(endpoint: Endpoint, request_: bytes) -> None:
    with connect(endpoint) as client, suppress(ConnectionError):
        client.sendall(request_)
        assert read_all(client) == b""


def test_a_scrape_that_fails_says_so(
    endpoint: Endpoint, agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> bytes:
        raise RuntimeError("secret")

    agent.exposition = fail
    status, body = get(endpoint, "/metrics")
    assert status == 500
    assert b"secret" not in body
    assert "RuntimeError: secret" in caplog.text
    assert get(endpoint, "/healthz")[0] == 200


def test_a_large_scrape_arrives_whole(
    endpoint: Endpoint, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "ANSWER_TIME", PATIENCE)  # this machine may have much to do
    agent.exposition = lambda: b"x" * (8 << 20)
    assert len(get(endpoint, "/metrics")[1]) == 8 << 20


def test_a_request_that_comes_too_slowly_is_given_up(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "REQUEST_TIME", 0.5)
    with connect(endpoint) as client, suppress(ConnectionError):
        for byte in itertools.cycle(b"GET /metrics HTTP/1.1 and so on, without an end"):
            client.send(bytes((byte,)))
            time.sleep(0.1)


def test_a_client_that_says_nothing_gets_nothing_and_goes(endpoint: Endpoint) -> None:
    with connect(endpoint) as client:
        client.shutdown(socket.SHUT_WR)
        assert read_all(client) == b""


def test_silent_clients_make_room_for_others(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "REQUEST_TIME", 10 * PATIENCE)
    others = threading.active_count()  # of tests before this one, which idle
    with ExitStack() as stack:
        silent = [stack.enter_context(connect(endpoint)) for _ in range(5 * http.MAX_CLIENTS)]
        assert get(endpoint, "/healthz")[0] == 200
        assert threading.active_count() < others + 2 * http.MAX_CLIENTS
        assert silent[0].recv(1) == b""


def test_scrapes_that_take_long_leave_room_for_health(endpoint: Endpoint, agent: Agent) -> None:
    release = threading.Event()
    begun = 0

    def slow() -> bytes:
        nonlocal begun
        begun += 1
        assert release.wait(PATIENCE)
        return b"late\n"

    agent.exposition = slow
    with ExitStack() as stack:
        clients = [stack.enter_context(connect(endpoint)) for _ in range(http.MAX_SCRAPES)]
        for client in clients:
            client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        until(lambda: begun == http.MAX_SCRAPES)
        assert get(endpoint, "/metrics") == (503, b"too many scrapes at once\n")
        assert get(endpoint, "/healthz")[0] == 200
        release.set()
        assert all(read_all(client).endswith(b"late\n") for client in clients)
    agent.exposition = lambda: b"again\n"
    assert get(endpoint, "/metrics") == (200, b"again\n")


def test_clients_that_hang_up_leave_no_trace(endpoint: Endpoint, agent: Agent) -> None:
    agent.exposition = lambda: b"x" * (4 << 20)
    for _ in range(3 * http.MAX_CLIENTS):
        with connect(endpoint) as client:
            client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
    assert get(endpoint, "/healthz")[0] == 200
    until(lambda: sum(thread.name == "http" for thread in threading.enumerate()) <= 1)


def test_ipv6_loopback_is_served(agent: Agent) -> None:
    try:
        endpoint = agent.endpoint("[::1]:0")
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with closing(endpoint):
        assert endpoint.address.startswith("[::1]:")
        assert get(endpoint, "/healthz")[0] == 200


def test_a_port_that_is_taken_is_an_error(endpoint: Endpoint, agent: Agent) -> None:
    with pytest.raises(OSError, match="Address already in use"):
        agent.endpoint(endpoint.address)


def test_the_end_frees_the_port_at_once(agent: Agent) -> None:
    first = agent.endpoint()
    address = first.address
    with connect(first) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        read_all(client)
        first.close()
        first.close()
    with closing(agent.endpoint(address)) as second:
        assert get(second, "/healthz")[0] == 200


def test_a_unix_socket_is_for_root_only_and_goes_at_the_end(agent: Agent, tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    with closing(agent.endpoint(f"unix:{path}")) as endpoint:
        assert endpoint.address == f"unix:{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert get(endpoint, "/healthz") == (200, b"serving\n")
    assert not path.exists()


def test_a_file_in_the_way_of_a_unix_socket_stays(agent: Agent, tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    path.write_text("precious")
    with pytest.raises(OSError, match=r"Address already in use \(end .* delete the file\)"):
        agent.endpoint(f"unix:{path}")
    assert path.read_text() == "precious"


def test_without_metrics_the_states_are_served_at_any_address(agent: Agent) -> None:
    states = (lambda: agent.alive, lambda: agent.ready)
    with closing(Endpoint("0.0.0.0:0", None, *states)) as endpoint:
        assert get(endpoint, "/readyz") == (200, b"serving\n")
        assert get(endpoint, "/metrics") == (404, b"the paths are /healthz, /readyz\n")
    with pytest.raises(ValueError, match="does not authenticate clients"):
        Endpoint("0.0.0.0:0", lambda: b"", *states)


def test_the_page_is_drawn_once_for_many_readers(agent: Agent) -> None:
    asked: list[None] = []

    def nodes() -> list[tuple[str, FabricNodeStatus]]:
        asked.append(None)
        return [("node-a", FabricNodeStatus(version=str(len(asked))))]

    feed = Feed(nodes)
    with closing(
        Endpoint("127.0.0.1:0", None, lambda: agent.alive, lambda: agent.ready, feed)
    ) as endpoint:
        status, headers, first = ask(endpoint, b"GET / HTTP/1.0\r\n\r\n")
        assert status == 200
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert ask(endpoint, b"GET / HTTP/1.0\r\n\r\n")[2] == first
        feed.changed()
        until(lambda: ask(endpoint, b"GET / HTTP/1.0\r\n\r\n")[2] != first)
        assert ask(endpoint, b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n")[0] == 403
        for host in (b"localhost:9810", b"127.0.0.1:1", b"[::1]:9810"):
            assert ask(endpoint, b"GET / HTTP/1.1\r\nHost: " + host + b"\r\n\r\n")[0] == 200


def test_the_readers_of_events_leave_places_for_scrapes(agent: Agent) -> None:
    feed = Feed(list)
    with (
        closing(
            Endpoint("127.0.0.1:0", None, lambda: agent.alive, lambda: agent.ready, feed)
        ) as endpoint,
        ExitStack() as stack,
    ):
        readers = []
        for _ in range(http.MAX_READERS):
            client = stack.enter_context(closing(connect(endpoint)))
            client.sendall(b"GET /events HTTP/1.0\r\n\r\n")
            until(lambda: b"retry" in client.recv(65536))  # noqa: B023
            readers.append(client)
        assert ask(endpoint, b"GET /events HTTP/1.0\r\n\r\n")[0] == 503
        assert ask(endpoint, b"GET /healthz HTTP/1.0\r\n\r\n")[0] == 200
        feed.changed()
        assert all(b"data: 1" in client.recv(65536) for client in readers)
        readers[0].close()
        feed.changed()  # the closed reader is found by a write
        feed.changed()

        def has_place() -> bool:
            feed.changed()
            client = stack.enter_context(closing(connect(endpoint)))
            client.sendall(b"GET /events HTTP/1.0\r\n\r\n")
            return b"200 OK" in client.recv(65536)

        until(has_place)


def test_a_reader_that_hangs_up_at_once_gives_its_place_back(agent: Agent) -> None:
    feed = Feed(list)
    with closing(
        Endpoint("127.0.0.1:0", None, lambda: agent.alive, lambda: agent.ready, feed)
    ) as endpoint:
        for _ in range(2 * http.MAX_READERS):
            answer = endpoint.answer("/events")
            assert answer.status == 200  # else a place was lost
            assert not isinstance(answer.content, bytes)
            answer.content.close()  # before the first event


def test_changing_queries_do_not_take_the_cpu(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "SHARE", 1000)
    feed = Feed(lambda: [("node-a", FabricNodeStatus())])
    with closing(
        Endpoint("127.0.0.1:0", None, lambda: agent.alive, lambda: agent.ready, feed)
    ) as endpoint:
        endpoint.answer("/", "q=0")
        pause = feed.pause
        began = time.monotonic()
        endpoint.answer("/", "q=1")
        assert time.monotonic() - began > pause / 2
        assert endpoint.answer("/", "q=1").status == 200
