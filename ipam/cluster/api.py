"""What podfabric does with the API server, with any client.

`kubernetes_api` implements it with the official client; tests have one of their own. All reads are
consistent (no resourceVersion parameter), but for watches: these are hints and decide nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, Literal, Protocol

import msgspec

from ipam.cluster.objects import AnyResource, Meta, Resource


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


class Unreadable(msgspec.Struct, frozen=True):
    """An object that cannot be read, or of which a part is not. `why` says which, and why."""

    api: str
    kind: str
    metadata: Meta
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


class WatchExpired(ApiError):
    """The watch cannot go on from there: list, and compare with what you knew."""


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """What a Node object says of a machine. `taints` are their keys. `labels` are those of a Node
    that was read alone: a list of all Nodes has them only if it is asked for them."""

    name: str
    uid: str
    machine_id: str = ""
    system_uuid: str = ""
    boot_id: str = ""
    ready: bool = False
    taints: tuple[str, ...] = ()
    labels: Mapping[str, str] = {}


class NetworkDefinition(msgspec.Struct, frozen=True, kw_only=True):
    """A NetworkAttachmentDefinition: its name, and `spec.config` as it is written."""

    namespace: str
    name: str
    config: str
    uid: str = ""


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """A Lease of coordination.k8s.io: which process leads.

    Each write changes `resource_version`, and "" stands for a Lease that was not yet written.
    Whether it is still renewed shows in `resource_version` only: `renewed` and `acquired` (RFC 3339
    with microseconds) are for people. No `holder` is "": the Lease was given back.
    """

    namespace: str
    name: str
    resource_version: str = ""
    holder: str = ""
    duration: int = 0
    transitions: int = 0
    acquired: str = ""
    renewed: str = ""


class ClusterApi(Protocol):
    """The verbs. Each raises ApiError; a call ends within `timeout` seconds of its client.

    A create or delete whose answer was lost is not repeated by the client: it is Unavailable.
    """

    def get(self, kind: type[AnyResource], name: str, namespace: str = "") -> AnyResource:
        """One object. NotFound."""

    def list(
        self,
        kind: type[AnyResource],
        fields: Mapping[str, str] | None = None,
        namespace: str = "",
        most: int = 0,
    ) -> Listing[AnyResource]:
        """Every object, in this namespace if one is given, whose fields ("spec.holder.instance":
        ...) have these values; with `most` (at most 500) the first so many, in one request."""

    def create(self, new: AnyResource) -> AnyResource:
        """Write a new object, without its status; as it was stored. AlreadyExists."""

    def update(self, changed: AnyResource) -> AnyResource:
        """Replace the object's spec, if its uid and resource version still are these. Conflict,
        NotFound."""

    def update_status(self, changed: AnyResource) -> AnyResource:
        """Replace the object's status in the same way."""

    def patch(self, last: Resource, operations: Sequence[Mapping[str, Any]]) -> None:
        """Change parts of the object by a JSON patch, if its uid still is this. Conflict if a test
        of the operations fails, NotFound. Only for objects of many writers, each of whom tests what
        he replaces: the version of the whole would be another all the time."""

    def delete(self, last: AnyResource) -> None:
        """Delete the object, if its uid and version still are these. Conflict, NotFound."""

    def watch(
        self,
        kind: type[AnyResource],
        resource_version: str,
        fields: Mapping[str, str] | None = None,
        namespace: str = "",
    ) -> Iterator[Change[AnyResource]]:
        """Changes since that version, until the server ends the watch (minutes). WatchExpired.
        Unavailable: it shows nothing for too long, so what is known may be too old.

        A change to an object that cannot be read is left out: see `unreadable`.
        """

    def node(self, name: str) -> Node:
        """A Node object. NotFound."""

    def nodes(self, *, labels: bool = False) -> Sequence[Node]:
        """All Node objects, with their labels if these are needed. Of one that cannot be read the
        name and uid are known: it is not ready, and not gone."""

    def has_pods(self, node: str) -> bool:
        """Whether a Pod object is bound to that node's name."""

    def network_definitions(self) -> Iterator[NetworkDefinition]:
        """All NetworkAttachmentDefinitions; none if their kind is not installed. Tenants choose how
        large each is, so a few at a time are in memory: keep of each only what is needed."""

    def definition_changes(self) -> Iterator[None]:
        """An item whenever a NetworkAttachmentDefinition may have changed since the call, until the
        server ends the watch (minutes). NotFound: their kind is not installed."""

    def lease(self, namespace: str, name: str) -> Lease:
        """A Lease. NotFound."""

    def write_lease(self, changed: Lease) -> Lease:
        """Create the Lease if it has no resource version (AlreadyExists), else replace it if it
        still has that one (Conflict). One that was deleted is written again. As it was stored."""

    def unreadable(self) -> Sequence[Unreadable]:
        """The objects of the last lists and of the watches that could not be read."""

    def report(self, reason: str, message: str, regarding: Mapping[str, Any]) -> None:
        """Write a Warning event on an object (an ObjectReference), as well as can be: no error."""
