"""ClusterApi in the words of the API server's HTTP interface, over any `Transport`.

Reads are repeated while the server has no answer. A change is sent once: if its answer is lost it
may have had its effect, and only the caller can find out.
"""

import logging
import random
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, NamedTuple, Protocol

import msgspec

from ipam.cluster import documents
from ipam.cluster.api import (
    AlreadyExists,
    ApiError,
    Change,
    Conflict,
    Lease,
    Listing,
    NetworkDefinition,
    Node,
    NotFound,
    Refused,
    Unavailable,
    WatchExpired,
)
from ipam.cluster.objects import AnyResource, Meta, Resource
from ipam.cluster.pace import Pace

TIMEOUT = 10.0  # seconds of a call with all its attempts; of each page of a LIST
FIRST_BACKOFF, LONGEST_BACKOFF = 0.2, 5.0
WATCH = (300, 600)  # seconds: a server ends a watch after a time at random between these
_LONGEST_EVENT = 231  # characters of its object's name in an event's: with a suffix at most 253
RESTARTS = 3  # of a LIST whose pages expire while they are read

_REFUSALS = frozenset({400, 401, 403, 405, 406, 413, 415, 422})
_METADATA = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
_ONE_METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
_log = logging.getLogger(__name__)

Query = Sequence[tuple[str, str]]
Body = Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""A document, or the operations of a JSON patch, which only a PATCH has."""


class Response(NamedTuple):
    """`retry_after`: the seconds that the server asks for in a header, 0 for none."""

    status: int
    body: bytes
    retry_after: float = 0


class Lines(NamedTuple):
    """An answer that goes on: its lines, as they come. Without success they are its body's."""

    status: int
    lines: Iterator[bytes]


class Transport(Protocol):
    """Sends requests. It raises Unavailable where no answer comes, and never repeats a change."""

    def send(
        self,
        method: str,
        where: str,
        query: Query,
        body: Body | None,
        accept: str,
        patience: float,
    ) -> Response:
        """The answer to one request, after `patience` seconds at most."""

    def follow(self, where: str, query: Query) -> Lines:
        """The answer to a GET that goes on. Its lines end where the connection does, with
        Unavailable where it shows nothing for too long."""


class RestApi:
    """ClusterApi. Threads may share it. `writer` is the field manager, and the source of events,
    with the `node` that it is on, if it is an agent."""

    def __init__(
        self,
        transport: Transport,
        *,
        writer: str = "podfabric",
        node: str = "",
        timeout: float = TIMEOUT,
        pace: Pace | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._transport = transport
        self._writer = writer
        self._source = {"component": writer} | ({"host": node} if node else {})
        self._timeout = timeout
        self._pace = pace or Pace()
        self._clock = clock
        self._sleep = sleep
        self._bookmarks: dict[tuple[str, str], tuple[str, str]] = {}

    def get(self, kind: type[AnyResource], name: str, namespace: str = "") -> AnyResource:
        what = f"get {kind.KIND} {name}"
        return _decoded(what, self._read(what, documents.path(kind, namespace, name)), kind)

    def list(
        self,
        kind: type[AnyResource],
        fields: Mapping[str, str] | None = None,
        namespace: str = "",
        most: int = 0,
    ) -> Listing[AnyResource]:
        what, where = f"list {kind.KIND}", documents.path(kind, namespace)
        selector = _selector(fields)
        if most:
            query = [("limit", str(min(most, documents.PAGE))), *selector]
            page = _decoded(what, self._read(what, where, query), documents.Page)
            found = tuple(_decoded(what, each, kind) for each in page.items or ())
            return Listing(found, page.metadata.resource_version, not page.metadata.continue_)
        items, version = self._pages(what, where, kind, selector)
        return Listing(tuple(items), version)

    def create(self, new: AnyResource) -> AnyResource:
        where = documents.path(type(new), new.metadata.namespace)
        return self._write("create", "POST", where, new)

    def update(self, changed: AnyResource) -> AnyResource:
        meta = changed.metadata
        where = documents.path(type(changed), meta.namespace, meta.name)
        return self._write("update", "PUT", where, changed)

    def update_status(self, changed: AnyResource) -> AnyResource:
        meta = changed.metadata
        where = documents.path(type(changed), meta.namespace, meta.name, "status")
        return self._write("update status of", "PUT", where, changed)

    def patch(self, last: Resource, operations: Sequence[Mapping[str, Any]]) -> None:
        meta = last.metadata
        what = f"patch {last.KIND} {meta.name}"
        where = documents.path(type(last), meta.namespace, meta.name)
        query = [("fieldManager", self._writer), ("fieldValidation", "Strict")]
        body = documents.patch(last, operations)
        try:  # such objects are large: the answer is their metadata
            self._send(what, "PATCH", where, self._deadline(), query, body, accept=_ONE_METADATA)
        except Refused as error:  # 422 is a test that failed
            if f": {HTTPStatus.UNPROCESSABLE_ENTITY.value} " in str(error):
                raise Conflict(str(error)) from error
            raise

    def delete(self, last: AnyResource) -> None:
        meta = last.metadata
        what = f"delete {last.KIND} {meta.name}"
        _check_was_read(what, meta)
        where = documents.path(type(last), meta.namespace, meta.name)
        body = documents.deletion(meta.uid, meta.resource_version)
        self._send(what, "DELETE", where, self._deadline(), body=body)

    def watch(
        self,
        kind: type[AnyResource],
        resource_version: str,
        fields: Mapping[str, str] | None = None,
        namespace: str = "",
    ) -> Iterator[Change[AnyResource]]:
        what, selector = f"watch {kind.KIND}", _selector(fields)
        where = documents.path(kind, namespace)
        key = (where, str(selector))
        # A watch that saw nothing but bookmarks goes on from the last of them.
        last, bookmark = self._bookmarks.get(key, ("", ""))
        query = [
            ("watch", "true"),
            ("allowWatchBookmarks", "true"),
            ("resourceVersion", bookmark if last == resource_version else resource_version),
            ("timeoutSeconds", str(random.randint(*WATCH))),
            *selector,
        ]
        self._take_turn(what, self._deadline())
        answer = self._transport.follow(where, query)
        if answer.status != HTTPStatus.OK:
            raise self._error(what, Response(answer.status, b"".join(answer.lines)))
        return self._changes(what, answer.lines, kind, key, resource_version)

    def node(self, name: str) -> Node:
        what = f"get Node {name}"
        found = self._read(what, f"{documents.NODES}/{name}")
        return _decoded(what, found, documents.NodeDocument).node(labels=True)

    def nodes(self, *, labels: bool = False) -> Sequence[Node]:
        found, _ = self._pages("list Node", documents.NODES, documents.NodeDocument)
        return tuple(each.node(labels=labels) for each in found)

    def has_pods(self, node: str) -> bool:
        what = f"list Pod of node {node}"
        # Without a limit the server answers from its cache, which knows the pods of each node. With
        # one, a server before 1.34 looks through all pods in etcd.
        query = [("fieldSelector", f"spec.nodeName={node}")]
        found = self._read(what, documents.PODS, query, accept=_METADATA)
        return bool(_decoded(what, found, documents.Page).items)

    def network_definitions(self) -> Sequence[NetworkDefinition]:
        what = "list NetworkAttachmentDefinition"
        try:
            found, _ = self._pages(what, documents.DEFINITIONS, documents.DefinitionDocument)
        except NotFound:
            return ()
        return tuple(each.definition() for each in found)

    def definition_changes(self) -> Iterator[None]:
        what = "watch NetworkAttachmentDefinition"
        query = [
            ("watch", "true"),  # without a version: it shows what is there, and then the changes
            ("allowWatchBookmarks", "true"),
            ("timeoutSeconds", str(random.randint(*WATCH))),
        ]
        self._take_turn(what, self._deadline())
        answer = self._transport.follow(documents.DEFINITIONS, query)
        if answer.status != HTTPStatus.OK:
            raise self._error(what, Response(answer.status, b"".join(answer.lines)))
        for line in answer.lines:
            if _decoded(what, line, documents.WatchEvent).type != "BOOKMARK":
                yield None

    def lease(self, namespace: str, name: str) -> Lease:
        what = f"get Lease {namespace}/{name}"
        found = self._read(what, f"{documents.leases(namespace)}/{name}")
        return _decoded(what, found, documents.LeaseDocument).lease()

    def write_lease(self, changed: Lease) -> Lease:
        where, method = documents.leases(changed.namespace), "POST"
        if changed.resource_version:
            where, method = f"{where}/{changed.name}", "PUT"
        what = f"write Lease {changed.namespace}/{changed.name}"
        stored = self._change(what, method, where, documents.lease_document(changed))
        return _decoded(what, stored, documents.LeaseDocument).lease()

    def report(self, reason: str, message: str, regarding: Mapping[str, Any]) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        about = str(regarding.get("name", self._writer))[:_LONGEST_EVENT].rstrip("-.")
        name = f"{about}.{uuid.uuid4().hex[:16]}"
        body = documents.event(name, reason, message, regarding, self._source, now)
        where = documents.events(body["metadata"]["namespace"])
        try:
            self._change(f"report {reason}", "POST", where, body)
        except ApiError as error:
            _log.warning("no event was written: %s. It says: %s", error, message)

    def _pages(
        self, what: str, where: str, kind: type[documents.AnyType], selector: Query = ()
    ) -> tuple[Sequence[documents.AnyType], str]:
        """All objects at one moment, and the version of that moment.

        The pages of a moment expire after minutes: then all are read again.
        """
        first = [("limit", str(documents.PAGE)), *selector]
        query, items = first, list[documents.AnyType]()
        restarts = 0
        while True:
            try:
                page = _decoded(what, self._read(what, where, query), documents.Page)
            except WatchExpired as error:
                restarts += 1
                if restarts > RESTARTS:
                    raise Unavailable(f"{what}: its pages expire too soon: {error}") from error
                query, items = first, []
                continue
            items += [_decoded(what, each, kind) for each in page.items or ()]
            if not page.metadata.continue_:
                return items, page.metadata.resource_version
            query = [*first, ("continue", page.metadata.continue_)]

    def _read(
        self, what: str, where: str, query: Query = (), accept: str = documents.JSON
    ) -> bytes:
        """The answer to a GET, which is repeated while the server has none."""
        deadline, backoff = self._deadline(), FIRST_BACKOFF
        while True:
            try:
                return self._send(what, "GET", where, deadline, query, accept=accept)
            except Unavailable:
                wait = backoff * random.uniform(0.5, 1.5)
                if self._clock() + wait >= deadline:
                    raise
            self._sleep(wait)
            backoff = min(2 * backoff, LONGEST_BACKOFF)

    def _write(self, verb: str, method: str, where: str, resource: AnyResource) -> AnyResource:
        what = f"{verb} {resource.KIND} {resource.metadata.name}"
        if method == "PUT":
            _check_was_read(what, resource.metadata)
        stored = self._change(what, method, where, documents.document(resource))
        return _decoded(what, stored, type(resource))

    def _change(self, what: str, method: str, where: str, body: Body) -> bytes:
        query = [("fieldManager", self._writer), ("fieldValidation", "Strict")]
        return self._send(what, method, where, self._deadline(), query, body)

    def _send(
        self,
        what: str,
        method: str,
        where: str,
        deadline: float,
        query: Query = (),
        body: Body | None = None,
        accept: str = documents.JSON,
    ) -> bytes:
        self._take_turn(what, deadline)
        patience = max(deadline - self._clock(), 0.01)
        try:
            answer = self._transport.send(method, where, query, body, accept, patience)
        except Unavailable as error:
            raise Unavailable(f"{what}: {error}") from error
        if answer.status >= HTTPStatus.MULTIPLE_CHOICES:
            raise self._error(what, answer)
        return answer.body

    def _deadline(self) -> float:
        return self._clock() + self._timeout

    def _take_turn(self, what: str, deadline: float) -> None:
        if not self._pace.turn(deadline - self._clock()):
            raise Unavailable(f"{what}: not sent: too many requests, or the server asked to wait")

    def _error(self, what: str, answer: Response) -> ApiError:
        """What an answer without success means."""
        try:
            status = documents.decode(answer.body, documents.Status)
        except msgspec.MsgspecError:
            status = documents.Status(message=answer.body[:200].decode(errors="replace"))
        if answer.status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
            self._pace.pause(answer.retry_after)
        return _error(what, answer.status, status)

    def _changes(
        self,
        what: str,
        lines: Iterator[bytes],
        kind: type[AnyResource],
        key: tuple[str, str],
        version: str,
    ) -> Iterator[Change[AnyResource]]:
        for line in lines:
            event = _decoded(what, line, documents.WatchEvent)
            if event.type == "ERROR":
                status = _decoded(what, event.object, documents.Status)
                raise _error(what, status.code, status)
            if event.type == "BOOKMARK":
                seen = _decoded(what, event.object, documents.Bookmark)
                self._bookmarks[key] = (version, seen.metadata.resource_version)
            else:
                found = _decoded(what, event.object, kind)
                version = found.metadata.resource_version
                yield Change(event.type, found)


def _decoded(
    what: str, found: bytes | msgspec.Raw, kind: type[documents.AnyType]
) -> documents.AnyType:
    try:
        return documents.decode(found, kind)
    except msgspec.MsgspecError as error:
        raise Refused(f"{what}: the answer has another form: {error}") from error


def _selector(fields: Mapping[str, str] | None) -> Query:
    if not fields:
        return []
    return [("fieldSelector", ",".join(f"{name}={value}" for name, value in fields.items()))]


def _check_was_read(what: str, meta: Meta) -> None:
    if not (meta.uid and meta.resource_version):
        raise Refused(f"{what}: it has no uid or no resourceVersion: read it first")


def _error(what: str, code: int, status: documents.Status) -> ApiError:
    """The error that an HTTP status stands for."""
    text = f"{what}: {code} {status.message.strip()}".rstrip()
    if code == HTTPStatus.NOT_FOUND:
        return NotFound(text)
    if code == HTTPStatus.CONFLICT:
        return AlreadyExists(text) if status.reason == "AlreadyExists" else Conflict(text)
    if code == HTTPStatus.GONE:
        return WatchExpired(text)
    return Refused(text) if code in _REFUSALS else Unavailable(text)
