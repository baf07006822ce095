"""The API server's JSON documents: our objects to and from them, and what is read of others.

Tenants and nodes write some of them. Whatever one of them holds, `decode` raises one kind of error,
and a page of a LIST or a line of a watch can be taken apart: what is nested too deeply in an object
is an error only where it is needed. Managed fields may be so deep, and nothing needs them.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from ipam.cluster.api import Lease, NetworkDefinition, Node, NotFound
from ipam.cluster.objects import Meta, Resource

JSON = "application/json"
JSON_PATCH = "application/json-patch+json"
NODES = "/api/v1/nodes"
PODS = "/api/v1/pods"
DEFINITIONS = "/apis/k8s.cni.cncf.io/v1/network-attachment-definitions"
PAGE = 500
"""How many objects one answer to a LIST has at most."""
MOST_PAGE = 8 << 20
"""How many bytes, unless it has one object only."""

_SENT = frozenset(
    (
        *("name", "namespace", "uid", "resourceVersion"),
        *("labels", "annotations", "finalizers", "ownerReferences"),
    )
)
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")  # a DNS subdomain, and a little more
_LONGEST_MESSAGE = 1024  # characters of an event's message

_MOST_DEPTH = 100  # of a document that is too deep for the decoder
# A match is as long as can be, since each costs some time. The matcher's memory bounds how long.
_BRACKETS = re.compile(
    rb'(?:"[^"\\]*(?:\\.[^"\\]*)*"[^][{}"]*){1,999}'  # strings, and what is between them
    rb'|(?:[\[{][^][{}"]*[\]}][^][{}"]*){1,999}'  # lists and objects that hold none of these
    rb"|([\[{]+)|([\]}]+)",
    re.DOTALL,
)
_NOT_TEXT = b'"\xff"'

AnyType = TypeVar("AnyType")
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


class ListMeta(msgspec.Struct, rename="camel"):
    """Of a page of a LIST. `continue_` leads to the next page; "" on the last."""

    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class Page(msgspec.Struct):
    """A page of a LIST, its objects undecoded. Some kinds have null for none."""

    metadata: ListMeta
    items: list[msgspec.Raw] | None = None


class WatchEvent(msgspec.Struct):
    """A line of a watch. The object of an ERROR is a Status."""

    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]
    object: msgspec.Raw


class Bookmark(msgspec.Struct):
    """All that a BOOKMARK's object has: the version up to which the watch has shown everything."""

    metadata: ListMeta


class Status(msgspec.Struct):
    """Why a request failed."""

    message: str = ""
    reason: str = ""
    code: int = 0


class _NodeMeta(msgspec.Struct):
    name: str
    uid: str
    labels: dict[str, str] | None = None


class _Taint(msgspec.Struct):
    key: str


class _NodeSpec(msgspec.Struct):
    taints: list[_Taint] = []


class _NodeCondition(msgspec.Struct):
    type: str
    status: str


class _Machine(msgspec.Struct):
    machine_id: str = msgspec.field(default="", name="machineID")
    system_uuid: str = msgspec.field(default="", name="systemUUID")
    boot_id: str = msgspec.field(default="", name="bootID")


class _NodeStatus(msgspec.Struct, rename="camel"):
    conditions: list[_NodeCondition] = []
    node_info: _Machine = msgspec.field(default_factory=_Machine)


class NodeDocument(msgspec.Struct):
    """A Node, as far as a lease depends on it."""

    metadata: _NodeMeta
    spec: _NodeSpec = msgspec.field(default_factory=_NodeSpec)
    status: _NodeStatus = msgspec.field(default_factory=_NodeStatus)

    def node(self, *, labels: bool = False) -> Node:
        """The typed value, with its labels if they are needed."""
        machine = self.status.node_info
        conditions = {each.type: each.status for each in self.status.conditions}
        return Node(
            name=self.metadata.name,
            uid=self.metadata.uid,
            machine_id=machine.machine_id,
            system_uuid=machine.system_uuid,
            boot_id=machine.boot_id,
            ready=conditions.get("Ready") == "True",
            taints=tuple(each.key for each in self.spec.taints),
            labels=(self.metadata.labels or {}) if labels else {},
        )


class _DefinitionMeta(msgspec.Struct):
    name: str
    namespace: str = ""
    uid: str = ""


class _DefinitionSpec(msgspec.Struct):
    config: str = ""


class DefinitionDocument(msgspec.Struct):
    """A NetworkAttachmentDefinition. It may have no `spec`: the file on the node is meant then.

    Tenants write it, and their kind may have no schema: one of any form must not hide the others.
    """

    metadata: _DefinitionMeta
    spec: msgspec.Raw = msgspec.Raw(b"{}")

    def definition(self) -> NetworkDefinition:
        """The typed value. A configuration that is not text counts as empty."""
        meta = self.metadata
        try:
            config = decode(self.spec, _DefinitionSpec).config
        except msgspec.MsgspecError:
            config = ""
        return NetworkDefinition(
            namespace=meta.namespace, name=meta.name, config=config, uid=meta.uid
        )


class _LeaseMeta(msgspec.Struct, rename="camel"):
    namespace: str
    name: str
    resource_version: str


class _LeaseSpec(msgspec.Struct, rename="camel"):
    holder_identity: str = ""
    lease_duration_seconds: int = 0
    lease_transitions: int = 0
    acquire_time: str | None = None
    renew_time: str | None = None


class LeaseDocument(msgspec.Struct):
    """A Lease of coordination.k8s.io/v1."""

    metadata: _LeaseMeta
    spec: _LeaseSpec = msgspec.field(default_factory=_LeaseSpec)

    def lease(self) -> Lease:
        """The typed value."""
        return Lease(
            namespace=self.metadata.namespace,
            name=self.metadata.name,
            resource_version=self.metadata.resource_version,
            holder=self.spec.holder_identity,
            duration=self.spec.lease_duration_seconds,
            transitions=self.spec.lease_transitions,
            acquired=self.spec.acquire_time or "",
            renewed=self.spec.renew_time or "",
        )


class _PlainMeta(msgspec.Struct, rename="camel"):
    """The metadata that only the server writes."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    creation_timestamp: str = ""
    generation: int = 0


class _Named(msgspec.Struct):
    metadata: _PlainMeta


class _Weighed(msgspec.Struct):
    metadata: msgspec.Raw = msgspec.Raw()


class _Managed(msgspec.Struct, rename="camel"):
    managed_fields: msgspec.Raw = msgspec.Raw()


def decode(document: bytes | msgspec.Raw, kind: type[AnyType]) -> AnyType:
    """The document as a value of the type. msgspec.MsgspecError if it is none."""
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
        raise msgspec.DecodeError("a value is no text, or is nested too deeply") from None
    return value


def plain_meta(document: msgspec.Raw) -> Meta:
    """The metadata of an object that only the server writes; without a name if it has none."""
    try:
        plain = decode(document, _Named).metadata
    except msgspec.MsgspecError:
        return Meta(name="")
    return Meta(**msgspec.structs.asdict(plain))


def bounded(document: msgspec.Raw, most: int) -> msgspec.Raw:
    """The document, without the metadata that users add if all of it has more than `most` bytes:
    then it is another one than `document`. msgspec.MsgspecError."""
    if memoryview(document).nbytes <= most:
        return document
    whole = decode(document, msgspec.Raw)  # nowhere too deep
    metadata = decode(whole, _Weighed).metadata
    managed = decode(metadata, _Managed).managed_fields
    if memoryview(metadata).nbytes - memoryview(managed).nbytes <= most:
        return document
    plain = msgspec.json.encode(decode(metadata, _PlainMeta))
    return msgspec.Raw(bytes(whole).replace(bytes(metadata), plain, 1))


def _flat(document: bytes) -> bytes:
    """The document with a string that is no UTF-8 in place of what is nested too deeply.

    The decoder passes over such a string, and refuses it where a value of it is needed.
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
    """What is sent of an object: all of it but what only the server writes."""
    written: dict[str, Any] = msgspec.to_builtins(resource)
    meta = {key: value for key, value in written["metadata"].items() if key in _SENT and value}
    kind = {"apiVersion": resource.API, "kind": resource.KIND}
    return {**kind, **written, "metadata": meta}


def lease_document(lease: Lease) -> dict[str, Any]:
    """What is sent of a Lease. The server takes no times that are "", and no duration of 0."""
    meta = {"namespace": lease.namespace, "name": lease.name}
    spec = {
        "holderIdentity": lease.holder,
        "leaseDurationSeconds": lease.duration,
        "acquireTime": lease.acquired,
        "renewTime": lease.renewed,
    }
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": meta | ({"resourceVersion": v} if (v := lease.resource_version) else {}),
        "spec": {
            "leaseTransitions": lease.transitions,
            **{key: value for key, value in spec.items() if value},
        },
    }


def patch(last: Resource, operations: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A JSON patch (RFC 6902) of just that object."""
    uid = {"op": "test", "path": "/metadata/uid", "value": last.metadata.uid}
    return [uid, *map(dict, operations)]


def deletion(uid: str, resource_version: str) -> dict[str, Any]:
    """What is sent with a DELETE of just that version of just that object."""
    return {
        "apiVersion": "v1",
        "kind": "DeleteOptions",
        "preconditions": {"uid": uid, "resourceVersion": resource_version},
    }


def event(
    name: str,
    reason: str,
    message: str,
    regarding: Mapping[str, Any],
    source: Mapping[str, str],
    now: str,
) -> dict[str, Any]:
    """A Warning event on an object. That of an object without a namespace is in `default`.
    `source` has the `component` that writes it, and its node as `host`."""
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": regarding.get("namespace") or "default"},
        "involvedObject": dict(regarding),
        "type": "Warning",
        "reason": reason,
        "message": message[:_LONGEST_MESSAGE],
        "source": dict(source),
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }


def path(kind: type[Resource], namespace: str = "", name: str = "", subresource: str = "") -> str:
    """Where an object is, or all of a kind (`name` is ""), or all in a namespace.

    NotFound if no object can have that name: a pod's annotation may name "../../other/...", and a
    client takes that out of a path.
    """
    for each in filter(None, (namespace, name)):
        if not _NAME.fullmatch(each):
            raise NotFound(f"{kind.KIND} {each!r}: no object can have that name")
    where = f"/apis/{kind.API}" if "/" in kind.API else f"/api/{kind.API}"
    if namespace:
        where = f"{where}/namespaces/{namespace}"
    return "/".join(filter(None, (where, kind.PLURAL, name, subresource)))


def leases(namespace: str) -> str:
    """Where the Leases of a namespace are."""
    return f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"


def events(namespace: str) -> str:
    """Where the events of a namespace are."""
    return f"/api/v1/namespaces/{namespace}/events"
