"""ClusterApi in the words of the API server's HTTP interface, over any `Transport`.

What is the same for all verbs is in `rest_requests`.
"""

import logging
import random
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from http import HTTPStatus
from typing import Any

import msgspec

from ipam.cluster import documents
from ipam.cluster.api import (
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
    Unreadable,
    WatchExpired,
)
from ipam.cluster.object_reader import ObjectReader, unreadable
from ipam.cluster.objects import AnyResource, Meta, Resource
from ipam.cluster.pace import Pace
from ipam.cluster.rest_requests import (
    TIMEOUT,
    AnswerTooLarge,
    Query,
    RestRequests,
    Transport,
    decoded,
    error_of,
)

WATCH = (300, 600)  # seconds: a server ends a watch after a time at random between these
_LONGEST_EVENT = 231  # characters of its object's name in an event's: with a suffix at most 253

_DEFINITION = ("k8s.cni.cncf.io/v1", "NetworkAttachmentDefinition")
_METADATA = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
_ONE_METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
_log = logging.getLogger(__name__)


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
        self._writer = writer
        self._source = {"component": writer} | ({"host": node} if node else {})
        self._requests = RestRequests(transport, writer, timeout, pace, clock, sleep)
        self._bookmarks: dict[tuple[str, str], tuple[str, str]] = {}
        self._reader = ObjectReader()

    def get(self, kind: type[AnyResource], name: str, namespace: str = "") -> AnyResource:
        what = f"get {kind.KIND} {name}"
        answer = self._requests.read(what, documents.path(kind, namespace, name))
        found, mistake = self._reader.read(kind, msgspec.Raw(answer))
        if found is None:
            why = mistake.why if mistake else ""
            raise Refused(f"{what}: the answer has another form: {why}")
        return found

    def list(
        self,
        kind: type[AnyResource],
        fields: Mapping[str, str] | None = None,
        namespace: str = "",
        most: int = 0,
    ) -> Listing[AnyResource]:
        what, where = f"list {kind.KIND}", documents.path(kind, namespace)
        selector = _selector(fields)
        read = partial(self._reader.read, kind)
        found, page = self._requests.all(what, where, read, selector, most)
        self._reader.listed((where, str(selector)), (each for _, each in found if each))
        return Listing(
            tuple(item for item, _ in found if item is not None),
            page.resource_version,
            not page.continue_,
            tuple(each for item, each in found if item is None and each),
        )

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
            self._requests.send(what, "PATCH", where, query, body, accept=_ONE_METADATA)
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
        self._requests.send(what, "DELETE", where, body=body)

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
        lines = self._requests.follow(what, where, query)
        return self._changes(what, lines, kind, key, resource_version)

    def node(self, name: str) -> Node:
        what = f"get Node {name}"
        found = self._requests.read(what, f"{documents.NODES}/{name}")
        return decoded(what, found, documents.NodeDocument).node(labels=True)

    def nodes(self, *, labels: bool = False) -> Sequence[Node]:
        found, _ = self._requests.all("list Node", documents.NODES, partial(_node, labels=labels))
        self._reader.listed((documents.NODES, ""), (each for _, each in found if each))
        return tuple(node for node, _ in found)

    def has_pods(self, node: str) -> bool:
        what = f"list Pod of node {node}"
        # Without a limit the server answers from its cache, which knows the pods of each node. With
        # one, a server before 1.34 looks through all pods in etcd.
        query = [("fieldSelector", f"spec.nodeName={node}")]
        try:
            found = self._requests.read(
                what, documents.PODS, query, documents.MOST_PAGE, accept=_METADATA
            )
        except AnswerTooLarge:
            return True
        return bool(decoded(what, found, documents.Page).items)

    def network_definitions(self) -> Iterator[NetworkDefinition]:
        what, mistakes = "list NetworkAttachmentDefinition", list[Unreadable]()
        try:
            for page in self._requests.pages(what, documents.DEFINITIONS):
                for each in page.items or ():
                    try:
                        yield documents.decode(each, documents.DefinitionDocument).definition()
                    except msgspec.MsgspecError as error:
                        mistakes.append(unreadable(*_DEFINITION, each, str(error)))
        except NotFound:
            return
        except WatchExpired as error:
            raise Unavailable(f"{what}: its pages expire too soon: {error}") from error
        self._reader.listed((documents.DEFINITIONS, ""), mistakes)

    def definition_changes(self) -> Iterator[None]:
        what = "watch NetworkAttachmentDefinition"
        query = [
            ("watch", "true"),  # without a version: it shows what is there, and then the changes
            ("allowWatchBookmarks", "true"),
            ("timeoutSeconds", str(random.randint(*WATCH))),
        ]
        lines = self._requests.follow(what, documents.DEFINITIONS, query)
        for line in lines:
            if b'"BOOKMARK"' not in line[:40]:  # a tenant decides how long it takes to decode one
                yield None

    def lease(self, namespace: str, name: str) -> Lease:
        what = f"get Lease {namespace}/{name}"
        found = self._requests.read(what, f"{documents.leases(namespace)}/{name}")
        return decoded(what, found, documents.LeaseDocument).lease()

    def write_lease(self, changed: Lease) -> Lease:
        where, method = documents.leases(changed.namespace), "POST"
        if changed.resource_version:
            where, method = f"{where}/{changed.name}", "PUT"
        what = f"write Lease {changed.namespace}/{changed.name}"
        stored = self._requests.change(what, method, where, documents.lease_document(changed))
        return decoded(what, stored, documents.LeaseDocument).lease()

    def unreadable(self) -> Sequence[Unreadable]:
        return self._reader.unreadable()

    def report(self, reason: str, message: str, regarding: Mapping[str, Any]) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        about = str(regarding.get("name", self._writer))[:_LONGEST_EVENT].rstrip("-.")
        name = f"{about}.{uuid.uuid4().hex[:16]}"
        body = documents.event(name, reason, message, regarding, self._source, now)
        where = documents.events(body["metadata"]["namespace"])
        try:
            self._requests.change(f"report {reason}", "POST", where, body)
        except ApiError as error:
            _log.warning("no event was written: %s. It says: %s", error, message)

    def _write(self, verb: str, method: str, where: str, resource: AnyResource) -> AnyResource:
        what = f"{verb} {resource.KIND} {resource.metadata.name}"
        if method == "PUT":
            _check_was_read(what, resource.metadata)
        stored = self._requests.change(what, method, where, documents.document(resource))
        return decoded(what, stored, type(resource))

    def _changes(
        self,
        what: str,
        lines: Iterator[bytes],
        kind: type[AnyResource],
        key: tuple[str, str],
        version: str,
    ) -> Iterator[Change[AnyResource]]:
        for line in lines:
            event = decoded(what, line, documents.WatchEvent)
            if event.type == "ERROR":
                status = decoded(what, event.object, documents.Status)
                raise error_of(what, status.code, status)
            if event.type == "BOOKMARK":
                seen = decoded(what, event.object, documents.Bookmark)
                self._bookmarks[key] = (version, seen.metadata.resource_version)
                continue
            found, mistake = self._reader.read(kind, event.object)
            meta = documents.plain_meta(event.object) if found is None else found.metadata
            self._reader.changed(key, meta, None if event.type == "DELETED" else mistake)
            version = meta.resource_version or version
            if found is not None:
                yield Change(event.type, found)


def _node(document: msgspec.Raw, *, labels: bool) -> tuple[Node, Unreadable | None]:
    """A Node; of one that cannot be read what is known of it, and what is wrong with it."""
    try:
        return documents.decode(document, documents.NodeDocument).node(labels=labels), None
    except msgspec.MsgspecError as error:
        mistake = unreadable("v1", "Node", document, str(error))
    return Node(name=mistake.metadata.name, uid=mistake.metadata.uid), mistake


def _selector(fields: Mapping[str, str] | None) -> Query:
    if not fields:
        return []
    return [("fieldSelector", ",".join(f"{name}={value}" for name, value in fields.items()))]


def _check_was_read(what: str, meta: Meta) -> None:
    if not (meta.uid and meta.resource_version):
        raise Refused(f"{what}: it has no uid or no resourceVersion: read it first")
