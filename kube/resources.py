"""What podfabric reads and writes of the API server, and what can go wrong there.

`client` has the verbs.
"""

from typing import Any, ClassVar, Generic, Literal, TypeVar

import msgspec


class ApiError(Exception):
    """A request that had no effect, or an unknown one. The text names verb, object and reason."""


class NotFound(ApiError):
    """404: no object has that name, or the kind is not installed."""


class AlreadyExists(ApiError):
    """409 to a create: another object has the name."""


class Conflict(ApiError):
    """409 to a change: the object has changed since it was read, or has another uid."""


class Refused(ApiError):
    """400, 401, 403 or 422: repeating the request cannot help until somebody changes something."""


class Unavailable(ApiError):
    """No answer, 429 or 5xx, after the client's own attempts.

    The request may have had its effect, or may still have it: read before you repeat it.
    """


class NotLeading(ApiError):
    """Not sent: this process does not lead (any more), so it changes nothing."""


class WatchExpired(ApiError):
    """The watch cannot go on from there: list, and compare with what you knew."""


class ServerMeta(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The metadata that only the server writes.

    `uid` differs for each object that ever had the name: it is the fencing token of a lease.
    `resource_version` changes with each write, and is "" for an object that was not yet written.
    """

    name: str
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    creation_timestamp: str = ""
    generation: int = 0


class Meta(ServerMeta, frozen=True, kw_only=True, rename="camel"):
    """All metadata that decides something. Labels and what follows them are users': a write
    replaces all of the object, so it sends them as they were read."""

    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    finalizers: tuple[str, ...] = ()
    owner_references: tuple[dict[str, Any], ...] = ()


class Resource(msgspec.Struct, frozen=True, kw_only=True):
    """What all kinds have in common. `API` is group and version. A kind of which all metadata is
    needed, since it is written or has labels that count, has `Meta`.

    Where metadata is larger than `MOST_METADATA`, what users add is not read, and a write removes
    it: for kinds that a node or a tenant writes, since no schema says how much labels may hold.
    """

    API: ClassVar[str]
    KIND: ClassVar[str]
    PLURAL: ClassVar[str]
    MOST_METADATA: ClassVar[int] = 2 << 20  # bytes; more than etcd takes of an object

    metadata: ServerMeta


AnyResource = TypeVar("AnyResource", bound=Resource)


class Unreadable(msgspec.Struct, frozen=True):
    """An object that cannot be read, or of which a part is not. `why` says which, and why."""

    api: str
    kind: str
    metadata: ServerMeta
    why: str


class Listing(msgspec.Struct, Generic[AnyResource], frozen=True):
    """All objects of a kind at one moment, which `resource_version` names.

    `is_whole` is False if no more than the first ones were asked for, and there are others.
    `unreadable` are the objects that are there and not among `items`: who takes an object that is
    missing for one that is gone must look there, too.
    """

    items: tuple[AnyResource, ...]
    resource_version: str
    is_whole: bool = True
    unreadable: tuple[Unreadable, ...] = ()


class Change(msgspec.Struct, Generic[AnyResource], frozen=True):
    """An event of a watch."""

    type: Literal["ADDED", "MODIFIED", "DELETED"]
    object: AnyResource


# --- kinds of Kubernetes -------------------------------------------------------------------------


class Taint(msgspec.Struct, frozen=True):
    """A taint of a Node."""

    key: str


class NodeSpec(msgspec.Struct, frozen=True):
    """What an administrator has said of a machine."""

    taints: tuple[Taint, ...] = ()


class NodeCondition(msgspec.Struct, frozen=True):
    """A condition of a Node: `status` is "True", "False" or "Unknown"."""

    type: str
    status: str


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Which machine it is, and in which boot."""

    machine_id: str = msgspec.field(default="", name="machineID")
    system_uuid: str = msgspec.field(default="", name="systemUUID")
    boot_id: str = msgspec.field(default="", name="bootID")


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What the kubelet says of a machine."""

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
        """Its name, which another machine may get later."""
        return self.metadata.name

    @property
    def uid(self) -> str:
        """Which Node object of the name it is."""
        return self.metadata.uid

    @property
    def machine(self) -> NodeInfo:
        """Which machine it is."""
        return self.status.node_info

    @property
    def is_ready(self) -> bool:
        """Whether its kubelet says that it can run pods."""
        return NodeCondition("Ready", "True") in self.status.conditions

    def has_taint(self, key: str) -> bool:
        """Whether it has a taint with the key."""
        return any(each.key == key for each in self.spec.taints)


class NetworkDefinition(Resource, frozen=True, kw_only=True):
    """A NetworkAttachmentDefinition. Tenants write it, and its kind may have no schema."""

    API = "k8s.cni.cncf.io/v1"
    KIND = "NetworkAttachmentDefinition"
    PLURAL = "network-attachment-definitions"

    spec: msgspec.Raw = msgspec.Raw(b"{}")


class LeaseSpec(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Which process leads: `holder_identity`, "" if the Lease was given back. Whether it still is
    renewed shows in the resource version only: the times (RFC 3339 with microseconds) are for
    people."""

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
