"""The verbs of the API server.

Reads are consistent, because they have no parameter resourceVersion. Watches may be late, so
callers use them as hints.
"""

import logging
import random
import threading
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from itertools import chain
from typing import Any

import msgspec

from base.pod import Pod
from kube import encoding
from kube.encoding import ObjectReader
from kube.requests import (
    RESTARTS,
    TIMEOUT,
    AnswerTooLarge,
    Body,
    Pace,
    RestRequest,
    RestRequests,
    Transport,
    decoded,
    error_of,
)
from kube.resources import (
    AnyResource,
    ApiError,
    Change,
    Conflict,
    Listing,
    Node,
    NodeCondition,
    NotLeading,
    Refused,
    Resource,
    ServerMeta,
    Unavailable,
    Unreadable,
    WatchExpired,
)

WATCH = (300, 600)  # seconds: a watch ends after a random time in this range
_LONGEST_MESSAGE = 1024  # characters of an event's message
_LONGEST_EVENT = 231  # characters of an object's name in its event's name, which has at most 253

_MOST_SEEN = 1024  # events that are remembered, so that each event is written once
_MOST_WAITING = 1024  # after a restore of etcd, many blocks with pods may be lost
_AT_ONCE = 4  # events: an ADD may have to wait for their requests

_METADATA = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
_ONE_METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
_log = logging.getLogger(__name__)


class ClusterApi:
    """A client of the API server. Threads may share it. Each call may raise ApiError.

    A call ends within `timeout` seconds. The client sends a change only once, and raises
    Unavailable if the answer is lost. `writer` is the field manager of changes and the source of
    events. Changes other than events raise NotLeading if `may_write` returns False.
    """

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
        self._reader = ObjectReader()
        self.may_write: Callable[[], bool] = lambda: True
        self.errors = self._requests.errors

    def get(self, kind: type[AnyResource], name: str, namespace: str = "") -> AnyResource:
        """Read one object. Raises NotFound."""
        what = f"get {kind.KIND} {name}"
        answer = self._requests.read(what, encoding.path(kind, namespace, name))
        found, mistake = self._reader.read(kind, msgspec.Raw(answer))
        if found is None:
            why = mistake.why if mistake else ""
            raise Refused(f"{what}: the API server's answer cannot be decoded: {why}")
        return found

    def list(
        self,
        kind: type[AnyResource],
        fields: Mapping[str, str] | None = None,
        namespace: str = "",
        most: int = 0,
        *,
        labels: str = "",
    ) -> Listing[AnyResource]:
        """Read all objects of a kind, or those of one namespace.

        Args:
            fields: read only objects whose fields have these values ("spec.holder.instance": ...).
            namespace: "" for all namespaces.
            most: read at most this number of objects (up to 500), in one request. 0 for all.
            labels: read only the objects of this label selector ("app=x,tier in (a, b)").

        Pages expire after some minutes. Then all pages are read again.
        """
        for _ in range(1 + RESTARTS):
            try:
                pages = tuple(self.pages(kind, fields, namespace, most, labels=labels))
            except WatchExpired as error:
                expired = error
                continue
            return Listing(
                tuple(chain.from_iterable(page.items for page in pages)),
                pages[-1].resource_version,
                pages[-1].is_whole,
                tuple(chain.from_iterable(page.unreadable for page in pages)),
            )
        what = f"list {kind.KIND}"
        raise Unavailable(f"{what}: the pages of the list expire too soon: {expired}") from expired

    def pages(
        self,
        kind: type[AnyResource],
        fields: Mapping[str, str] | None = None,
        namespace: str = "",
        most: int = 0,
        *,
        labels: str = "",
    ) -> Iterator[Listing[AnyResource]]:
        """Yield the pages of `list`. Raises WatchExpired if a page expires."""
        what, where = f"list {kind.KIND}", encoding.path(kind, namespace)
        selected = ",".join(f"{name}={value}" for name, value in (fields or {}).items())
        both = (("fieldSelector", selected), ("labelSelector", labels))
        selector = [each for each in both if each[1]]
        mistakes = list[Unreadable]()
        for page in self._requests.pages(what, where, selector, most):
            found = [self._reader.read(kind, document) for document in page.items or ()]
            mistakes += (each for _, each in found if each)
            yield Listing(
                tuple(item for item, _ in found if item is not None),
                page.metadata.resource_version,
                not page.metadata.continue_,
                tuple(each for item, each in found if item is None and each),
            )
            if most:
                break
        self._reader.listed((where, f"{fields or ''}{labels}"), mistakes)

    def create(self, new: AnyResource) -> AnyResource:
        """Create an object without its status. Returns the stored object. Raises AlreadyExists."""
        where = encoding.path(type(new), new.metadata.namespace)
        return self._write("create", "POST", where, new)

    def update(self, changed: AnyResource) -> AnyResource:
        """Replace the spec. Raises NotFound, or Conflict if the object changed after the read."""
        return self._write("update", "PUT", encoding.path_of(changed), changed)

    def update_status(self, changed: AnyResource) -> AnyResource:
        """Replace the status. Raises NotFound, or Conflict if the object changed after the read."""
        where = encoding.path_of(changed, "status")
        return self._write("update status of", "PUT", where, changed)

    def patch(self, last: Resource, operations: Sequence[Mapping[str, Any]]) -> None:
        """Change parts of the object by a JSON patch, if the object still has the same uid.

        Raises NotFound, and Conflict if a test among the operations fails. Use a patch for objects
        with many writers. Each writer tests the values that it replaces.
        """
        what, where = f"patch {last.KIND} {last.metadata.name}", encoding.path_of(last)
        test = {"op": "test", "path": "/metadata/uid", "value": last.metadata.uid}
        self._patch(what, where, [test, *operations])

    def set_condition(self, node: Node, condition: NodeCondition) -> None:
        """Add the condition to the Node, or replace the condition of the same type.

        Raises NotFound, and Conflict if another Node has the name now.
        """
        what, where = f"set {condition.type} of Node {node.name}", encoding.path_of(node, "status")
        conditions = [msgspec.to_builtins(condition)]
        body = {"metadata": {"uid": node.uid}, "status": {"conditions": conditions}}
        self._patch(what, where, body)

    def delete(self, last: AnyResource) -> None:
        """Delete the object. Raises NotFound, or Conflict if the object changed after the read."""
        meta = last.metadata
        what = f"delete {last.KIND} {meta.name}"
        self._require_leading(what)
        _check_was_read(what, meta)
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": meta.uid, "resourceVersion": meta.resource_version},
        }
        self._requests.send(what, RestRequest("DELETE", encoding.path_of(last), body=body))

    def watch(
        self, kind: type[AnyResource], resource_version: str, namespace: str = ""
    ) -> Iterator[Change[AnyResource]]:
        """Yield the changes since `resource_version`, until the server ends the watch.

        Raises WatchExpired, and Unavailable after a long silence. Leaves out unreadable objects.
        """
        what, where = f"watch {kind.KIND}", encoding.path(kind, namespace)
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(random.randint(*WATCH)),
            "resourceVersion": resource_version,
        }
        lines = self._requests.follow(what, where, list(query.items()))
        return self._changes(what, lines, kind, (where, ""))

    def has_pods(self, node: str) -> bool:
        what = f"list Pod of node {node}"
        # No limit: before Kubernetes 1.34, a limit makes the server read all pods from etcd, not
        # its cache.
        query = [("fieldSelector", f"spec.nodeName={node}")]
        try:
            found = self._requests.read(
                what, encoding.PODS, query, encoding.MOST_PAGE, accept=_METADATA
            )
        except AnswerTooLarge:
            return True
        return bool(decoded(what, found, encoding.Page).items)

    def unreadable(self) -> Sequence[Unreadable]:
        """The unreadable objects that the last lists and the watches found."""
        return self._reader.unreadable()

    def report(self, reason: str, message: str, regarding: Mapping[str, Any]) -> None:
        """Write a Warning event on an object (an ObjectReference). Logs a failure."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        about = str(regarding.get("name", self._writer))[:_LONGEST_EVENT].rstrip("-.")
        name = f"{about}.{uuid.uuid4().hex[:16]}"
        namespace = regarding.get("namespace") or "default"
        where = f"/api/v1/namespaces/{namespace}/events"
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": namespace},
            "involvedObject": regarding,
            "type": "Warning",
            "reason": reason,
            "message": message[:_LONGEST_MESSAGE],
            "source": self._source,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        try:
            self._requests.change(f"report {reason}", "POST", where, body)
        except ApiError as error:
            _log.warning("no event was written: %s. The text of the event: %s", error, message)

    def _write(self, verb: str, method: str, where: str, resource: AnyResource) -> AnyResource:
        what = f"{verb} {resource.KIND} {resource.metadata.name}"
        self._require_leading(what)
        if method == "PUT":
            _check_was_read(what, resource.metadata)
        stored = self._requests.change(what, method, where, encoding.document(resource))
        return decoded(what, stored, type(resource))

    def _patch(self, what: str, where: str, body: Body) -> None:
        self._require_leading(what)
        try:  # such objects are large, so the answer has only the metadata
            self._requests.change(what, "PATCH", where, body, accept=_ONE_METADATA)
        except Refused as error:  # the status 422 means that the uid or a tested value differs
            if f": {HTTPStatus.UNPROCESSABLE_ENTITY.value} " in str(error):
                raise Conflict(str(error)) from error
            raise

    def _require_leading(self, what: str) -> None:
        if not self.may_write():
            raise NotLeading(f"{what}: this process does not lead")

    def _changes(
        self, what: str, lines: Iterator[bytes], kind: type[AnyResource], key: tuple[str, str]
    ) -> Iterator[Change[AnyResource]]:
        for line in lines:
            event = decoded(what, line, encoding.WatchEvent)
            if event.type == "ERROR":
                status = decoded(what, event.object, encoding.Status)
                raise error_of(what, status.code, status)
            if event.type == "BOOKMARK":  # shows only that the watch is alive
                continue
            found, mistake = self._reader.read(kind, event.object)
            meta = encoding.server_meta(event.object) if found is None else found.metadata
            self._reader.changed(key, meta, None if event.type == "DELETED" else mistake)
            if found is not None:
                yield Change(event.type, found)


class PendingEvents:
    """Collects events from any thread. `send` writes them."""

    def __init__(self, api: ClusterApi) -> None:
        self._api = api
        self._lock = threading.Lock()
        self._seen: OrderedDict[tuple[str, ...], None] = OrderedDict()
        self._waiting: deque[tuple[str, str, dict[str, Any]]] = deque(maxlen=_MOST_WAITING)

    def of_pod(self, reason: str, message: str, pod: Pod, *, each_message: bool = False) -> None:
        """Add an event on a pod, once per reason, or with `each_message` once per text."""
        if pod.name and pod.namespace:
            regarding = {"apiVersion": "v1", "kind": "Pod", "namespace": pod.namespace}
            regarding |= {"name": pod.name, "uid": pod.uid}
            self.add(reason, message, regarding, message if each_message else "")

    def send(self, most: int = _AT_ONCE) -> bool:
        """Try to write at most `most` pending events. Returns whether more are pending."""
        for _ in range(min(most, len(self._waiting))):
            self._api.report(*self._waiting.popleft())
        return bool(self._waiting)

    def add(self, reason: str, message: str, regarding: dict[str, Any], occasion: str = "") -> None:
        """Add an event on an object, once for each `occasion`."""
        key = (reason, *map(str, regarding.values()), occasion)
        with self._lock:
            if key in self._seen:
                return
            self._seen[key] = None
            if len(self._seen) > _MOST_SEEN:
                self._seen.popitem(last=False)
            self._waiting.append((reason, message, regarding))


def _check_was_read(what: str, meta: ServerMeta) -> None:
    if not (meta.uid and meta.resource_version):
        raise Refused(f"{what}: the object has no uid or no resourceVersion: read the object first")
