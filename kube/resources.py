"""The objects that podfabric reads and writes on the API server, and the errors there.

`client` has the verbs.
"""

from typing import Any, ClassVar, Generic, Literal, TypeVar

import msgspec


class ApiError(Exception):
    """A request without effect, or with an unknown one. The text names verb, object and reason."""


class NotFound(ApiError):
    """404: no object has this name, or the kind is not installed."""


class AlreadyExists(ApiError):
    """409 to a create: another object has the name."""


class Conflict(ApiError):
    """409 to a change: the object changed since it was read, or has another uid."""


class Refused(ApiError):
    """400, 401, 403 or 422: a repeat cannot help until somebody changes something."""


class Unavailable(ApiError):
    """No answer, 429 or 5xx, after the client's own attempts.

    The request may have had its effect, or may still have it: read before you repeat it.
    """


class NotLeading(ApiError):
    """Not sent: this process does not lead, so it changes nothing."""


class WatchExpired(ApiError):
    """The watch cannot continue: list again, and compare."""


class ServerMeta(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The metadata that only the server writes.

    `uid` differs for each object that ever had the name: it is the fencing token of a lease.
    `resource_version` changes with each write, and is "" for a new object.
    """

    name: str
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    creation_timestamp: str = ""
    generation: int = 0


class Meta(ServerMeta, frozen=True, kw_only=True, rename="camel"):
    """All metadata that decides something. Users own labels and the fields below them: a write
    replaces the whole object, so it sends them as they were read."""

    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    finalizers: tuple[str, ...] = ()
    owner_references: tuple[dict[str, Any], ...] = ()


class Resource(msgspec.Struct, frozen=True, kw_only=True):
    """The common part of all kinds. `API` is group and version. A kind whose metadata is written,
    or whose labels count, has `Meta`.

    From metadata larger than `MOST_METADATA`, the parts of users are not read, and a write removes
    them. This is for kinds that a node or a tenant writes: no schema limits labels.
    """

    API: ClassVar[str]
    KIND: ClassVar[str]
    PLURAL: ClassVar[str]
    MOST_METADATA: ClassVar[int] = 2 << 20  # bytes; more than etcd takes of an object

    metadata: ServerMeta


AnyResource = TypeVar("AnyResource", bound=Resource)


class Unreadable(msgspec.Struct, frozen=True):
    """An object that is unreadable, or a part of it, and `why`."""

    api: str
    kind: str
    metadata: ServerMeta
    why: str


class Listing(msgspec.Struct, Generic[AnyResource], frozen=True):
    """All objects of a kind at one moment, which `resource_version` names.

    `is_whole` is False if only the first objects were requested, and more exist. `unreadable`
    objects exist too, and are not in `items`.
    """

    items: tuple[AnyResource, ...]
    resource_version: str
    is_whole: bool = True
    unreadable: tuple[Unreadable, ...] = ()


class Change(msgspec.Struct, Generic[AnyResource], frozen=True):
    """An event of a watch."""

    type: Literal["ADDED", "MODIFIED", "DELETED"]
    object: AnyResource


class Taint(msgspec.Struct, frozen=True):
    """A taint of a Node."""

    key: str


class NodeSpec(msgspec.Struct, frozen=True):
    """The administrator's settings of a machine."""

    taints: tuple[Taint, ...] = ()


class NodeCondition(msgspec.Struct, frozen=True):
    """A condition of a Node: `status` is "True", "False" or "Unknown"."""

    type: str
    status: str


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of a machine and of its boot."""

    machine_id: str = msgspec.field(default="", name="machineID")
    system_uuid: str = msgspec.field(default="", name="systemUUID")
    boot_id: str = msgspec.field(default="", name="bootID")


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The kubelet's report of a machine."""

    conditions: tuple[NodeCondition, ...] = ()
    node_info: NodeInfo = NodeInfo()


class Node(Resource, frozen=True, kw_only=True):
    """A machine of the cluster, as far as a lease depends on it."""

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
        """Whether its kubelet reports that it can run pods."""
        return NodeCondition("Ready", "True") in self.status.conditions

    def has_taint(self, key: str) -> bool:
        return any(each.key == key for each in self.spec.taints)


class NetworkDefinition(Resource, frozen=True, kw_only=True):
    """A NetworkAttachmentDefinition. Tenants write it, and its kind may have no schema."""

    API = "k8s.cni.cncf.io/v1"
    KIND = "NetworkAttachmentDefinition"
    PLURAL = "network-attachment-definitions"

    spec: msgspec.Raw = msgspec.Raw(b"{}")


class LeaseSpec(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """The leading process (`holder_identity`), "" if the Lease was given back. Only the resource
    version shows a renewal: the times (RFC 3339 with microseconds) are for people."""

    holder_identity: str = ""
    lease_duration_seconds: int = 0
    lease_transitions: int = 0
    acquire_time: str = ""
    renew_time: str = ""


class Lease(Resource, frozen=True, kw_only=True):
    """A Lease of coordination.k8s.io."""

    API = "coordination.k8s.io/v1"
    KIND = "Lease"
    PLURAL = "leases"

    spec: LeaseSpec = LeaseSpec()
