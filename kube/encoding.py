"""Encodes and decodes the API server's JSON documents.

Tenants and nodes write some of the documents. `decode` raises only MsgspecError, for any content.
An unreadable object does not make a whole list unreadable. A value that is nested too deeply is an
error only if podfabric needs the value.
"""

import logging
import re
import threading
from collections import Counter
from collections.abc import Iterable
from itertools import chain
from typing import Any, Literal, TypeVar

import msgspec
from prometheus_client.metrics_core import Metric

from base.scrape import gauge
from base.text import printable
from kube.resources import (
    AnyResource,
    NetworkDefinition,
    NotFound,
    Resource,
    ServerMeta,
    Unreadable,
)

JSON = "application/json"
JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/strategic-merge-patch+json"  # lists are merged by key
PODS = "/api/v1/pods"
PAGE = 500
"""The largest number of objects in one answer to a LIST."""
MOST_PAGE = 8 << 20
"""The largest number of bytes in such an answer, unless it has only one object."""

_SENT = frozenset(
    (
        *("name", "namespace", "uid", "resourceVersion"),
        *("labels", "annotations", "finalizers", "ownerReferences"),
    )
)
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")  # a DNS subdomain, or a similar name

_MOST_DEPTH = 100  # levels that stay in a document that is too deep for the decoder
# Long matches save time. The number 999 limits the memory of the matcher.
_BRACKETS = re.compile(
    rb'(?:"[^"\\]*(?:\\.[^"\\]*)*"[^][{}"]*){1,999}'  # strings and the text between them
    rb'|(?:[\[{][^][{}"]*[\]}][^][{}"]*){1,999}'  # lists and objects that are not nested
    rb"|([\[{]+)|([\]}]+)",
    re.DOTALL,
)
_NOT_TEXT = b'"\xff"'
_log = logging.getLogger(__name__)

AnyType = TypeVar("AnyType")
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


class ListMeta(msgspec.Struct, rename="camel"):
    """Metadata of a page of a LIST. `continue_` requests the next page. The last page has ""."""

    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class Page(msgspec.Struct):
    """A page of a LIST with undecoded objects. For some kinds, an empty list is null."""

    metadata: ListMeta
    items: list[msgspec.Raw] | None = None


class WatchEvent(msgspec.Struct):
    """A line of a watch. The object of an ERROR is a Status."""

    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]
    object: msgspec.Raw


class Status(msgspec.Struct):
    """The API server's reason for a failed request."""

    message: str = ""
    reason: str = ""
    code: int = 0


class _DefinitionSpec(msgspec.Struct):
    config: str = ""


class _Named(msgspec.Struct):
    metadata: ServerMeta


class _Weighed(msgspec.Struct):
    metadata: msgspec.Raw = msgspec.Raw()


class _Managed(msgspec.Struct, rename="camel"):
    managed_fields: msgspec.Raw = msgspec.Raw()


def decode(document: bytes | msgspec.Raw, kind: type[AnyType]) -> AnyType:
    """Decode the document into a value of the type. Raises msgspec.MsgspecError."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    value: AnyType
    try:
        try:
            value = decoder.decode(document)
        except RecursionError:
            value = decoder.decode(_flat(bytes(document)))
    except UnicodeDecodeError:
        raise msgspec.DecodeError("a value is not UTF-8, or is nested too deeply") from None
    return value


def server_meta(document: msgspec.Raw) -> ServerMeta:
    """The metadata that only the server writes. The name is "" if the object has no name."""
    try:
        return decode(document, _Named).metadata
    except msgspec.MsgspecError:
        return ServerMeta(name="")


def config_of(definition: NetworkDefinition) -> str:
    """The text of `spec.config`, or "" if there is none. Multus then uses a file on the node."""
    try:
        return decode(definition.spec, _DefinitionSpec).config
    except msgspec.MsgspecError:
        return ""


def bounded(document: msgspec.Raw, most: int) -> msgspec.Raw:
    """Remove the metadata that users add, if the metadata has more than `most` bytes.

    Returns `document` itself if nothing was removed. Raises msgspec.MsgspecError.
    """
    if memoryview(document).nbytes <= most:
        return document
    whole = decode(document, msgspec.Raw)  # without deeply nested values
    metadata = decode(whole, _Weighed).metadata
    managed = decode(metadata, _Managed).managed_fields
    if memoryview(metadata).nbytes - memoryview(managed).nbytes <= most:
        return document
    plain = msgspec.json.encode(decode(metadata, ServerMeta))
    return msgspec.Raw(bytes(whole).replace(bytes(metadata), plain, 1))


def _flat(document: bytes) -> bytes:
    """Replace each value that is nested too deeply by a string that is not UTF-8.

    The decoder skips such a string if no type needs the value, and otherwise refuses it.
    """
    kept: list[bytes] = []
    depth = kept_until = 0
    for match in _BRACKETS.finditer(document):
        start, end = match.span()
        if match.lastindex == 1:
            if depth <= _MOST_DEPTH < depth + end - start:
                kept += (document[kept_until : start + _MOST_DEPTH - depth], _NOT_TEXT)
            depth += end - start
        elif match.lastindex == 2:
            if depth > _MOST_DEPTH >= depth - end + start:
                kept_until = start + depth - _MOST_DEPTH
            depth -= end - start
    kept.append(document[kept_until:])
    return b"".join(kept)


def document(resource: Resource) -> dict[str, Any]:
    """The JSON document of an object to send, without the fields that only the server writes."""
    written: dict[str, Any] = msgspec.to_builtins(resource)
    meta = {key: value for key, value in written["metadata"].items() if key in _SENT and value}
    kind = {"apiVersion": resource.API, "kind": resource.KIND}
    return {**kind, **written, "metadata": meta}


def path(kind: type[Resource], namespace: str = "", name: str = "", subresource: str = "") -> str:
    """The path of an object, or the path of a kind's objects if `name` is "".

    Raises NotFound for an impossible name, such as "../../other" in a pod's annotation.
    """
    for what, each in ((" in namespace", namespace), ("", name)):
        if each and not _NAME.fullmatch(each):
            raise NotFound(
                f"{kind.KIND}{what} {each!r}: no object can have that name: correct the name"
            )
    where = f"/apis/{kind.API}" if "/" in kind.API else f"/api/{kind.API}"
    if namespace:
        where = f"{where}/namespaces/{namespace}"
    return "/".join(filter(None, (where, kind.PLURAL, name, subresource)))


def path_of(resource: Resource, subresource: str = "") -> str:
    meta = resource.metadata
    return path(type(resource), meta.namespace, meta.name, subresource)


Query = tuple[str, str]
"""The path and the selector of a list and its watch."""


class ObjectReader:
    """Decodes objects, and remembers the unreadable objects. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._noted: dict[Query, dict[tuple[str, str], Unreadable]] = {}

    def unreadable(self) -> tuple[Unreadable, ...]:
        """The unreadable objects of the last lists and of later watch events, each object once."""
        with self._lock:
            noted = list(chain.from_iterable(each.values() for each in self._noted.values()))
        return tuple({(each.kind, *_key(each.metadata)): each for each in noted}.values())

    def read(
        self, kind: type[AnyResource], document: msgspec.Raw
    ) -> tuple[AnyResource | None, Unreadable | None]:
        """Decode an object. Returns the object and the problem. Either may be `None`."""
        try:
            kept = bounded(document, kind.MOST_METADATA)
            found = decode(kept, kind)
        except msgspec.MsgspecError as error:
            return None, _unreadable(kind, document, str(error))
        if kept is document:
            return found, None
        why = (
            f"its metadata has more than {kind.MOST_METADATA} bytes: its labels, annotations, "
            "finalizers and owners are not read, and are removed with the next change"
        )
        return found, _unreadable(kind, document, why)

    def listed(self, query: Query, mistakes: Iterable[Unreadable]) -> None:
        """Replace a query's unreadable objects by the unreadable objects of a new list."""
        by_key = {_key(each.metadata): each for each in mistakes}
        with self._lock:
            before = self._noted.pop(query, {})
            if by_key:
                self._noted[query] = by_key
        for key, each in by_key.items():
            _log_once(each, before.get(key))

    def changed(self, query: Query, meta: ServerMeta, mistake: Unreadable | None) -> None:
        """Record whether the object of a watch event is readable."""
        if mistake is None and query not in self._noted:
            return
        with self._lock:
            noted = self._noted.setdefault(query, {})
            before = noted.pop(_key(meta), None)
            if mistake is not None:
                noted[_key(meta)] = mistake
        if mistake is not None:
            _log_once(mistake, before)


def _unreadable(kind: type[Resource], document: msgspec.Raw, why: str) -> Unreadable:
    return Unreadable(kind.API, kind.KIND, server_meta(document), printable(why))


def unreadable_family(found: Iterable[Unreadable]) -> Metric:
    """The number of unreadable objects of each kind, for a scrape."""
    return gauge(
        "podfabric_unreadable_objects",
        "Objects on the API server that podfabric cannot read completely.",
        ("kind",),
        Counter((each.kind,) for each in found),
    )


def _key(meta: ServerMeta) -> tuple[str, str]:
    return meta.namespace, meta.name


def _log_once(found: Unreadable, before: Unreadable | None) -> None:
    if before is None or before.why != found.why:
        name = "/".join(filter(None, _key(found.metadata)))
        _log.warning("%s %s cannot be read: %s", found.kind, name, found.why)
