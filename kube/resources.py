"""The objects that podfabric reads and writes on the API server, and the errors of its requests."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, Literal, TypeVar

import msgspec
from msgspec.structs import replace


class ApiError(Exception):
    """A request failed. The text names the verb, the object and the reason."""


class NotFound(ApiError):
    """404: no object has this name, or the kind is not installed."""


class AlreadyExists(ApiError):
    """409 after a create: another object has the name."""


class Conflict(ApiError):
    """409 after a change: the object changed since it was read, or has another uid."""


class Refused(ApiError):
    """400, 401, 403, 422 and similar: the server refused the request. A repeat does not help."""


class Unavailable(ApiError):
    """No answer, 429 or 5xx, after all attempts of the client.

    The server may have made the change, or may still make it. Read the object before a retry.
    """


class NotLeading(ApiError):
    """The client did not send the change, because this process does not lead."""


class WatchExpired(ApiError):
    """The watch or the pages of a list have expired. The caller must list again."""


class ServerMeta(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The metadata that only the server writes.

    `uid` is different for each object that ever had the name. A lease of addresses uses the `uid`
    as its fencing token. `resource_version` changes with each write, and is "" for a new object.
    """

    name: str
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    creation_timestamp: str = ""
    generation: int = 0


class Meta(ServerMeta, frozen=True, kw_only=True, rename="camel"):
    """All metadata that podfabric uses.

    Users own the labels, annotations, finalizers and owners. A write sends these fields as they
    were read.
    """

    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    finalizers: tuple[str, ...] = ()
    owner_references: tuple[dict[str, Any], ...] = ()


class Resource(msgspec.Struct, frozen=True, kw_only=True):
    """The common part of all kinds. `API` is the group and the version.

    If the metadata is larger than `MOST_METADATA`, podfabric does not read the labels, annotations,
    finalizers and owners, and a write removes them. The limit is for kinds that a node or a tenant
    writes, because no schema limits the labels.
    """

    API: ClassVar[str]
    KIND: ClassVar[str]
    PLURAL: ClassVar[str]
    MOST_METADATA: ClassVar[int] = 2 << 20  # bytes; etcd accepts no object of this size

    metadata: ServerMeta


AnyResource = TypeVar("AnyResource", bound=Resource)


class Unreadable(msgspec.Struct, frozen=True):
    """An object that cannot be read, or cannot be read completely, and the reason `why`."""

    api: str
    kind: str
    metadata: ServerMeta
    why: str


class Listing(msgspec.Struct, Generic[AnyResource], frozen=True):
    """The objects of a kind at one moment, which `resource_version` names.

    `is_whole` is False if only the first objects were requested, and more exist. `items` lacks the
    objects in `unreadable`.
    """

    items: tuple[AnyResource, ...]
    resource_version: str
    is_whole: bool = True
    unreadable: tuple[Unreadable, ...] = ()


class Change(msgspec.Struct, Generic[AnyResource], frozen=True):
    type: Literal["ADDED", "MODIFIED", "DELETED"]
    object: AnyResource


class Taint(msgspec.Struct, frozen=True):
    key: str


class NodeSpec(msgspec.Struct, frozen=True):
    taints: tuple[Taint, ...] = ()


class NodeCondition(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """A condition of a Node: `status` is "True", "False" or "Unknown". Times are RFC 3339."""

    type: str
    status: str
    reason: str = ""
    message: str = ""
    last_transition_time: str | None = None
    last_heartbeat_time: str | None = None


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True):
    machine_id: str = msgspec.field(default="", name="machineID")
    system_uuid: str = msgspec.field(default="", name="systemUUID")
    boot_id: str = msgspec.field(default="", name="bootID")


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    conditions: tuple[NodeCondition, ...] = ()
    node_info: NodeInfo = NodeInfo()


class Node(Resource, frozen=True, kw_only=True):
    """A machine of the cluster, with the fields that leases depend on."""

    API = "v1"
    KIND = "Node"
    PLURAL = "nodes"

    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def uid(self) -> str:
        return self.metadata.uid

    @property
    def machine(self) -> NodeInfo:
        return self.status.node_info

    @property
    def is_ready(self) -> bool:
        ready = self.condition("Ready")
        return ready is not None and ready.status == "True"

    def condition(self, type_: str) -> NodeCondition | None:
        return next((each for each in self.status.conditions if each.type == type_), None)

    def with_conditions(self, conditions: tuple[NodeCondition, ...]) -> "Node":
        return replace(self, status=replace(self.status, conditions=conditions))

    def has_taint(self, key: str) -> bool:
        return any(each.key == key for each in self.spec.taints)


class NetworkDefinition(Resource, frozen=True, kw_only=True):
    """A NetworkAttachmentDefinition. Tenants write it, and its kind may have no schema."""

    API = "k8s.cni.cncf.io/v1"
    KIND = "NetworkAttachmentDefinition"
    PLURAL = "network-attachment-definitions"

    spec: msgspec.Raw = msgspec.Raw(b"{}")


class LeaseSpec(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """`holder_identity` is the leading process, or "" if the Lease was released.

    A process recognises a renewal by the new resource version. The times (RFC 3339) are for humans.
    """

    holder_identity: str = ""
    lease_duration_seconds: int = 0
    lease_transitions: int = 0
    acquire_time: str = ""
    renew_time: str = ""


class Lease(Resource, frozen=True, kw_only=True):
    API = "coordination.k8s.io/v1"
    KIND = "Lease"
    PLURAL = "leases"

    spec: LeaseSpec = LeaseSpec()


class Requirement(msgspec.Struct, frozen=True):
    key: str
    operator: str
    values: tuple[str, ...] | None = None


class SelectorTerm(msgspec.Struct, frozen=True, rename="camel"):
    """All requirements must be met. A term without requirements does not select a node."""

    match_expressions: tuple[Requirement, ...] | None = None
    match_fields: tuple[Requirement, ...] | None = None


class NodeSelector(msgspec.Struct, frozen=True, rename="camel"):
    """At least one term must select the node (k8s.io/component-helpers/scheduling/corev1)."""

    node_selector_terms: tuple[SelectorTerm, ...] | None = None


def selects(selector: NodeSelector | None, name: str, labels: Mapping[str, str]) -> bool:
    """Whether the selector selects a node with this name and these labels."""
    if selector is None:
        return True
    return any(_meets(term, name, labels) for term in selector.node_selector_terms or ())


def _meets(term: SelectorTerm, name: str, labels: Mapping[str, str]) -> bool:
    expressions, fields = term.match_expressions or (), term.match_fields or ()
    if not expressions and not fields:
        return False
    return all(_is_met(each, labels) for each in expressions) and all(
        # For a field, Kubernetes accepts only these operators and one value.
        each.operator in ("In", "NotIn")
        and len(each.values or ()) == 1
        and _is_met(each, {"metadata.name": name})
        for each in fields
    )


def _is_met(requirement: Requirement, labels: Mapping[str, str]) -> bool:
    value = labels.get(requirement.key)
    check = _OPERATORS.get(requirement.operator)
    return check is not None and check(value, requirement.values or ())


def _compared(value: str | None, bounds: Sequence[str]) -> int | None:
    """The value minus the bound. Returns `None` if they cannot be compared."""
    try:
        return int(value or "") - int(bounds[0]) if len(bounds) == 1 else None
    except ValueError:
        return None


_OPERATORS: Mapping[str, Callable[[str | None, Sequence[str]], bool]] = {
    "In": lambda value, values: value is not None and value in values,
    "NotIn": lambda value, values: value is None or value not in values,
    "Exists": lambda value, values: value is not None,
    "DoesNotExist": lambda value, values: value is None,
    "Gt": lambda value, values: (_compared(value, values) or 0) > 0,
    "Lt": lambda value, values: (_compared(value, values) or 0) < 0,
}
