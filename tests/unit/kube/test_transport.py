"""The client of the API server, with a server whose answers and failures each test chooses.

tests/api has what a real server does with its requests.
"""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from msgspec.structs import replace

from ipam.controller.whereabouts_objects import IPPool
from ipam.leases.objects import AddressBlock, AddressReservation, OwnerReference, ReservationSpec
from kube import transport
from kube.client import ClusterApi
from kube.encoding import document
from kube.informer import Mirror, same
from kube.requests import Lines, Pace, Query, Response, RestRequest
from kube.resources import (
    AlreadyExists,
    ApiError,
    Change,
    Conflict,
    Meta,
    NotFound,
    NotLeading,
    Refused,
    Unavailable,
)
from kube.transport import KubernetesApi
from tests.unit.kube.contract import block
from tests.waiting import PATIENCE, until


class Request:
    """A request that came in."""

    def __init__(self, handler: BaseHTTPRequestHandler) -> None:
        split = urlsplit(handler.path)
        length = int(handler.headers.get("Content-Length", 0))
        self.method = handler.command
        self.path = split.path
        self.query = {key: values[0] for key, values in parse_qs(split.query).items()}
        self.token = handler.headers.get("Authorization", "")
        self.accept = handler.headers.get("Accept", "")
        self.body: dict[str, Any] = json.loads(handler.rfile.read(length) or "{}")


class Reply:
    """The server's reply: an answer, or a cut connection (`status` 0). An answer with `goes_on`
    does not end until the client has gone.
    """

    def __init__(
        self, status: int, body: object = None, *, goes_on: bool = False, **headers: str
    ) -> None:
        self.status = status
        self.goes_on = goes_on
        self.body = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


class Server(ThreadingHTTPServer):
    """Gives its replies in their order, the last again and again, and keeps the requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.replies: list[Reply] = []
        self.requests: list[Request] = []

    def next(self) -> Reply:
        return self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"

    def handle_one_request(self) -> None:
        self.raw_requestline = self.rfile.readline()
        if not self.raw_requestline or not self.parse_request():
            self.close_connection = True
            return
        assert isinstance(self.server, Server)
        self.server.requests.append(Request(self))
        reply = self.server.next()
        if not reply.status:
            self.close_connection = True
            return
        with suppress(OSError):  # the client may have gone
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(reply.body) + reply.goes_on))
            self.end_headers()
            self.wfile.write(reply.body)
            if reply.goes_on:
                self.rfile.read(1)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is logged."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def kubeconfig(server: Server, tmp_path: Path) -> Path:
    return write_kubeconfig(tmp_path / "kubeconfig", server, "first")


@pytest.fixture
def api(kubeconfig: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesApi]:
    """A client that waits for as long as a slow machine takes."""
    monkeypatch.setattr(transport, "CONNECT", PATIENCE)
    monkeypatch.setattr(transport, "READ", PATIENCE)
    api = KubernetesApi(kubeconfig, timeout=PATIENCE, pace=Pace(rate=1000, burst=1000))
    yield api
    api.close()


def write_kubeconfig(path: Path, server: Server, token: str) -> Path:
    """A configuration with one user."""
    where = f"http://127.0.0.1:{server.server_port}"
    path.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "test",
                "clusters": [{"name": "test", "cluster": {"server": where}}],
                "users": [{"name": "test", "user": {"token": token}}],
                "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            }
        )
    )
    return path


def stored(version: str = "7") -> AddressBlock:
    """A block as a server has it."""
    new = block()
    return replace(
        new, metadata=Meta(name=new.metadata.name, uid="u", resource_version=version, generation=1)
    )


def sent(resource: AddressBlock) -> dict[str, Any]:
    """Its document, with all that a server adds."""
    written = document(resource)
    written["metadata"] |= {"generation": 1, "managedFields": [{"manager": "podfabric"}]}
    return written


def page(*resources: AddressBlock, version: str = "9", further: str = "") -> dict[str, Any]:
    """An answer to a LIST."""
    metadata = {"resourceVersion": version} | ({"continue": further} if further else {})
    return {"kind": "List", "metadata": metadata, "items": [sent(each) for each in resources]}


@pytest.mark.parametrize(
    "name", ["../../theirs/addressreservations/vm", "..", "vm/status", "vm?a=b", "vm#"]
)
def test_a_name_that_leads_elsewhere_is_not_asked_for(
    server: Server, api: KubernetesApi, name: str
) -> None:
    """A tenant that chooses a name could otherwise name an object of another namespace."""
    theirs = AddressReservation(
        metadata=Meta(name="vm", namespace="theirs", uid="u"),
        spec=ReservationSpec(pool="p", owner=OwnerReference(kind="Pod", name="vm")),
    )
    server.replies = [Reply(200, document(theirs))]
    with pytest.raises(NotFound, match="no object can have that name"):
        api.get(AddressReservation, name, "ns")
    with pytest.raises(NotFound, match="no object can have that name"):
        api.get(AddressReservation, "vm", name)
    assert server.requests == []


@pytest.mark.parametrize(
    ("code", "reason", "error"),
    [
        (400, "BadRequest", Refused),
        (401, "Unauthorized", Refused),
        (403, "Forbidden", Refused),
        (404, "NotFound", NotFound),
        (409, "AlreadyExists", AlreadyExists),
        (409, "Conflict", Conflict),
        (422, "Invalid", Refused),
        (429, "TooManyRequests", Unavailable),
        (500, "InternalError", Unavailable),
        (503, "ServiceUnavailable", Unavailable),
        (504, "Timeout", Unavailable),
    ],
)
def test_an_error_is_what_its_code_says_and_a_change_is_not_repeated(
    server: Server, api: KubernetesApi, code: int, reason: str, error: type[ApiError]
) -> None:
    server.replies = [Reply(code, {"kind": "Status", "reason": reason, "message": "because"})]
    known = stored()
    changes: tuple[Callable[[], object], ...] = (
        lambda: api.create(replace(known, metadata=Meta(name=known.metadata.name))),
        lambda: api.update(known),
        lambda: api.update_status(known),
        lambda: api.delete(known),
    )
    for change in changes:
        server.requests.clear()
        with pytest.raises(ApiError, match=f"{known.metadata.name}: {code} because") as raised:
            change()
        assert type(raised.value) is error
        assert len(server.requests) == (2 if code == 401 else 1)
    kind = error.__name__
    assert api.errors == {("create", kind): 1, ("update", kind): 2, ("delete", kind): 1}


def test_a_process_that_does_not_lead_changes_nothing(server: Server, api: KubernetesApi) -> None:
    api.may_write = lambda: False
    known = stored()
    for change in (api.create, api.update, api.update_status, api.delete):
        with pytest.raises(NotLeading):
            change(known)
    assert not server.requests
    assert not api.errors


def test_a_change_whose_answer_is_lost_is_not_repeated(server: Server, api: KubernetesApi) -> None:
    server.replies = [Reply(0)]
    known = stored()
    for change in (api.update, api.update_status, api.delete):
        server.requests.clear()
        with pytest.raises(Unavailable, match="no answer from the API server"):
            change(known)
        assert len(server.requests) == 1


def test_a_read_is_repeated_until_there_is_an_answer(server: Server, api: KubernetesApi) -> None:
    known = stored()
    server.replies = [Reply(0), Reply(500), Reply(429, Retry_After="0"), Reply(200, sent(known))]
    assert api.get(AddressBlock, known.metadata.name) == known
    assert len(server.requests) == 4


class Silent:
    """A transport without an answer, on a clock of its own."""

    def __init__(self, answer: Response | None = None) -> None:
        self.now = 100.0
        self.sent = 0
        self.answer = answer

    def send(self, request: RestRequest, patience: float, most: int = 0) -> Response:
        self.sent += 1
        if self.answer is not None:
            return self.answer
        self.now += min(patience, 2.0)
        raise Unavailable("no answer from the API server: it is silent")

    def follow(self, where: str, query: Query) -> Lines:
        raise Unavailable("no answer from the API server: it is silent")

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def api(self) -> ClusterApi:
        """A client with 10 s for each call."""
        pace = Pace(clock=lambda: self.now, sleep=self.sleep)
        return ClusterApi(self, timeout=10.0, pace=pace, clock=lambda: self.now, sleep=self.sleep)


def test_a_read_ends_in_time() -> None:
    transport = Silent()
    api = transport.api()
    with pytest.raises(Unavailable, match=r"get AddressBlock x: no answer .* silent"):
        api.get(AddressBlock, "x")
    assert 2 <= transport.sent <= 5
    assert 106 < transport.now <= 110
    with pytest.raises(Unavailable, match="silent"):
        api.watch(AddressBlock, "1")


def test_a_server_that_asks_to_wait_gets_no_request_meanwhile() -> None:
    transport = Silent(Response(429, b"{}", retry_after=25))
    api = transport.api()
    with pytest.raises(Unavailable, match="429"):
        api.delete(stored())
    with pytest.raises(Unavailable, match="not sent"):
        api.delete(stored())
    assert transport.sent == 1
    transport.now += 16
    with pytest.raises(Unavailable, match="429"):
        api.delete(stored())
    assert transport.now == pytest.approx(125)


def test_no_configuration_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=f"no API server in {tmp_path}/missing"):
        KubernetesApi(tmp_path / "missing")
    with pytest.raises(Refused, match="no API server in this pod"):
        KubernetesApi()


def test_pages_that_expired_are_read_from_the_first(server: Server, api: KubernetesApi) -> None:
    first, second = stored("3"), stored("4")
    server.replies = [
        Reply(200, page(first, further="more")),
        Reply(410, {"reason": "Expired"}),
        Reply(200, page(second, version="12")),
    ]
    found = api.list(AddressBlock)
    assert found.items == (second,)
    assert found.resource_version == "12"


def test_pages_that_always_expire_are_unavailable(server: Server, api: KubernetesApi) -> None:
    server.replies = [Reply(410, {"reason": "Expired"})]
    with pytest.raises(Unavailable, match="expire too soon"):
        api.list(AddressBlock)


def test_what_is_no_block_is_refused(server: Server, api: KubernetesApi) -> None:
    server.replies = [Reply(200, b"<html>a proxy</html>")]
    with pytest.raises(
        Refused, match="get AddressBlock x: the API server's answer cannot be decoded"
    ):
        api.get(AddressBlock, "x")


def events(*lines: tuple[str, object]) -> bytes:
    """An answer to a watch."""
    return b"".join(
        json.dumps({"type": type_, "object": found}).encode() + b"\n" for type_, found in lines
    )


def bookmark(version: str) -> tuple[str, object]:
    """A bookmark as servers write them."""
    meta = {"resourceVersion": version, "creationTimestamp": None}
    return "BOOKMARK", {"kind": "AddressBlock", "metadata": meta, "spec": {}}


def test_a_watch_shows_changes_and_no_bookmarks(server: Server, api: KubernetesApi) -> None:
    known = stored("11")
    cut = events(("MODIFIED", sent(stored("99"))))[:-20]
    lines = events(bookmark("9"), ("ADDED", sent(known)), bookmark("44")) + cut
    server.replies = [Reply(200, lines)]
    assert list(api.watch(AddressBlock, "5")) == [Change("ADDED", known)]
    first = server.requests[0].query
    assert first["watch"] == first["allowWatchBookmarks"] == "true"
    assert 300 <= int(first["timeoutSeconds"]) <= 600
    assert first["resourceVersion"] == "5"


def test_a_watch_without_a_bookmark_is_dead_and_all_is_listed_again(
    server: Server, api: KubernetesApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "SILENCE", 0.5)
    first, second = stored("9"), stored("12")
    watch = Reply(200, events(bookmark("9")), goes_on=True)
    server.replies = [Reply(200, page(first)), watch, Reply(200, page(second))]
    mirror = Mirror(api, AddressBlock, same, lambda: None)
    try:
        until(lambda: mirror.items() == (second,), what="block that the watch did not show")
    finally:
        mirror.close()
    assert [each.query.get("watch") for each in server.requests[:3]] == [None, "true", None]


def test_a_watch_that_is_refused_says_so(server: Server, api: KubernetesApi) -> None:
    server.replies = [Reply(403, {"reason": "Forbidden", "message": "you may not"})]
    with pytest.raises(Refused, match="watch AddressBlock: 403 you may not"):
        api.watch(AddressBlock, "1")


def test_pods_of_a_node_are_asked_for_without_their_specs(
    server: Server, api: KubernetesApi
) -> None:
    server.replies = [
        Reply(200, {"metadata": {"resourceVersion": "3"}, "items": [{"metadata": {}}]}),
        Reply(200, {"metadata": {"resourceVersion": "3"}, "items": None}),
    ]
    assert api.has_pods("node-a")
    assert not api.has_pods("node-a")
    request = server.requests[0]
    # With a limit, Kubernetes 1.32 looks for them among all pods in etcd.
    assert request.query == {"fieldSelector": "spec.nodeName=node-a"}
    assert "PartialObjectMetadataList" in request.accept


def test_an_event_is_written_once_and_its_loss_is_no_error(
    server: Server, api: KubernetesApi
) -> None:
    server.replies = [Reply(500)]
    pod = {"kind": "Pod", "namespace": "team-a", "name": "trainer-0", "uid": "u"}
    api.report("NoAddress", "x" * 2000, pod)
    (request,) = server.requests
    assert request.path == "/api/v1/namespaces/team-a/events"
    assert request.body["involvedObject"] == pod
    assert request.body["type"] == "Warning"
    assert len(request.body["message"]) == 1024
    api.report("Conflict", "a message", {"kind": "AddressPool", "name": "blue"})
    assert server.requests[1].path == "/api/v1/namespaces/default/events"


def test_an_event_on_an_object_with_a_long_name_has_a_valid_name(
    server: Server, api: KubernetesApi
) -> None:
    server.replies = [Reply(201)]
    long = f"{'a' * 230}-{'b' * 22}"
    api.report("NoAddressPool", "why", {"kind": "AddressPool", "name": long})
    name = server.requests[0].body["metadata"]["name"]
    assert re.fullmatch(r"a{230}\.[0-9a-f]{16}", name)
    assert server.requests[0].body["involvedObject"]["name"] == long


def test_a_pace_gives_turns_at_its_rate_after_a_burst() -> None:
    now = [100.0]
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    pace = Pace(rate=10, burst=3, clock=lambda: now[0], sleep=sleep)
    assert all(pace.turn(0) for _ in range(3))
    assert not slept
    assert not pace.turn(0.05)
    assert pace.turn(1)
    assert pace.turn(1)
    assert slept == pytest.approx([0.1, 0.1])
    now[0] += 1
    assert all(pace.turn(0) for _ in range(3))
    pace.pause(5)
    now[0] += 1
    assert not pace.turn(3.9)
    assert pace.turn(4.1)
    assert now[0] == pytest.approx(106.2)
    pace.pause(1e9)
    assert pace.turn(30.1)


def test_a_patch_may_take_as_long_as_the_call(
    server: Server, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server takes 2 ms for each entry of an IPPool of whereabouts, and has thousands."""
    monkeypatch.setattr(transport, "READ", 0.2)
    meta = Meta(name="10.0.0.0-24", namespace="default", uid="u-1", resource_version="7")
    server.replies = [Reply(200)]
    reply = server.replies[0]

    def late() -> Reply:
        time.sleep(0.6)
        return reply

    monkeypatch.setattr(server, "next", late)
    api = KubernetesApi(kubeconfig, timeout=PATIENCE)
    api.patch(IPPool(metadata=meta), [{"op": "remove", "path": "/spec/allocations/1"}])
    with pytest.raises(Unavailable, match="no answer"):
        api.delete(stored())
    api.close()
