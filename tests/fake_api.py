"""A stand-in for the API server, in memory: it does what `ClusterApi` promises, with faults.

One `FakeApi` is the server. `client` gives a node's client with its own faults; the server itself
is a client too. `look`, `put` and `remove` are for the test: no fault, no count, no outage.

tests/unit/kube/contract.py tests this and the real API server for the same behaviour.
"""

import enum
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeVar, cast

import msgspec
from msgspec.structs import replace

from kube.client import ClusterApi
from kube.resources import (
    AlreadyExists,
    AnyResource,
    ApiError,
    Change,
    Conflict,
    Listing,
    Meta,
    NetworkDefinition,
    Node,
    NodeCondition,
    NodeInfo,
    NodeSpec,
    NodeStatus,
    NotFound,
    NotLeading,
    Refused,
    Resource,
    ServerMeta,
    Taint,
    Unavailable,
    Unreadable,
    WatchExpired,
)
from tests.fake_api_rules import (
    Key,
    check,
    check_selector,
    copied,
    key,
    patched,
    selected,
    with_status,
    without_status,
)

HISTORY = 1000  # changes that a watch can still see

T = TypeVar("T")


class Fault(enum.Enum):
    """The fault of one call."""

    LOST_REQUEST = "Unavailable; it has no effect"
    LOST_ANSWER = "Unavailable; it has its effect"
    LATE = "Unavailable; it has its effect when the test calls `deliver`"
    CONFLICT = "Conflict (AlreadyExists to a create); it has no effect"
    REFUSED = "Refused; it has no effect"


Faults = Callable[[str, str, str], Fault | None]
"""What goes wrong with a call of this verb, kind and name ("" for all). It is called before the
effect and without a lock, so it may also wait, change the server, or raise."""


class FakeClient(ClusterApi):
    """A client. `down`: this client reaches no server. `calls` counts calls by verb and kind."""

    def __init__(self, server: "FakeApi", name: str, faults: Faults | None = None) -> None:
        self.server = server
        self.name = name
        self.faults = faults
        self.down = False
        self.calls: Counter[tuple[str, str]] = Counter()
        self.may_write = lambda: True
        self.errors = Counter()

    def get(self, kind: type[AnyResource], name: str, namespace: str = "") -> AnyResource:
        return self._call("get", kind.KIND, name, lambda: self.server.look(kind, name, namespace))

    def list(
        self,
        kind: type[AnyResource],
        fields: Mapping[str, str] | None = None,
        namespace: str = "",
        most: int = 0,
        *,
        labels: str = "",
    ) -> Listing[AnyResource]:
        found = self._call(
            "list", kind.KIND, "", lambda: self.server.look_at_all(kind, fields, namespace, labels)
        )
        if not most or len(found.items) <= most:
            return found
        return replace(found, items=found.items[:most], is_whole=False)

    def create(self, new: AnyResource) -> AnyResource:
        return self._change("create", new, self.server.store_new)

    def update(self, changed: AnyResource) -> AnyResource:
        return self._change("update", changed, self.server.store_spec)

    def update_status(self, changed: AnyResource) -> AnyResource:
        return self._change("update_status", changed, self.server.store_status)

    def patch(self, last: Resource, operations: Sequence[Mapping[str, Any]]) -> None:
        self._change("patch", last, lambda each: self.server.store_patch(each, operations))

    def set_condition(self, node: Node, condition: NodeCondition) -> None:
        self._change(
            "set_condition", node, lambda each: self.server.store_condition(each, condition)
        )

    def delete(self, last: AnyResource) -> None:
        self._change("delete", last, self.server.store_deletion)

    def watch(
        self,
        kind: type[AnyResource],
        resource_version: str,
        namespace: str = "",
    ) -> Iterator[Change[AnyResource]]:
        return self._call(
            "watch", kind.KIND, "", lambda: self.server.follow(kind, resource_version, self)
        )

    def pages(
        self,
        kind: type[AnyResource],
        fields: Mapping[str, str] | None = None,
        namespace: str = "",
        most: int = 0,
        *,
        labels: str = "",
    ) -> Iterator[Listing[AnyResource]]:
        yield self.list(kind, fields, namespace, most, labels=labels)

    def has_pods(self, node: str) -> bool:
        return self._call("list", "Pod", node, lambda: self.server.pods[node] > 0)

    def unreadable(self) -> Sequence[Unreadable]:
        return ()

    def report(self, reason: str, message: str, regarding: Mapping[str, Any]) -> None:
        event = Event(self.name, reason, message, dict(regarding))
        name = str(regarding.get("name", ""))
        try:
            self._call("create", "Event", name, lambda: self.server.events.append(event))
        except ApiError:
            return

    def _change(self, verb: str, resource: AnyResource, effect: Callable[[AnyResource], T]) -> T:
        if not self.may_write():
            raise NotLeading(verb)
        return self._call(verb, resource.KIND, resource.metadata.name, lambda: effect(resource))

    def _call(self, verb: str, kind: str, name: str, effect: Callable[[], T]) -> T:
        try:
            return self._answer(verb, kind, name, effect)
        except ApiError as error:
            self.errors[verb, type(error).__name__] += 1
            raise

    def _answer(self, verb: str, kind: str, name: str, effect: Callable[[], T]) -> T:
        what = f"{verb} {kind} {name}".rstrip()
        with self.server.changed:
            self.calls[verb, kind] += 1
        fault = self.faults(verb, kind, name) if self.faults else None
        if self.down or self.server.down or fault is Fault.LOST_REQUEST:
            raise Unavailable(f"{what}: no answer")
        if fault is Fault.CONFLICT:
            raise (AlreadyExists if verb == "create" else Conflict)(f"{what}: conflict (fault)")
        if fault is Fault.REFUSED:
            raise Refused(f"{what}: refused (fault)")
        if fault is Fault.LATE:
            self.server.late.append(effect)
            raise Unavailable(f"{what}: no answer yet")
        if fault is Fault.LOST_ANSWER:
            try:
                effect()
            except ApiError as error:
                raise Unavailable(f"{what}: no answer") from error
            raise Unavailable(f"{what}: no answer")
        with self.server.changed:
            return effect()


class Event(NamedTuple):
    """An event that a client reported."""

    client: str
    reason: str
    message: str
    regarding: dict[str, Any]


def changed_node(
    node: Node,
    *,
    ready: bool | None = None,
    taints: Sequence[str] | None = None,
    **machine: str,
) -> Node:
    """The Node with another Ready condition, other taints, or other machine ids."""
    status = replace(node.status, node_info=replace(node.machine, **machine))
    if ready is not None:
        status = replace(status, conditions=(NodeCondition("Ready", str(ready)),))
    spec = node.spec if taints is None else NodeSpec(tuple(map(Taint, taints)))
    return replace(node, spec=spec, status=status)


def definition(
    config: str, name: str = "fabric", namespace: str = "team-a", uid: str = ""
) -> NetworkDefinition:
    """A NetworkAttachmentDefinition."""
    spec = msgspec.Raw(msgspec.json.encode({"config": config}))
    meta = ServerMeta(name=name, namespace=namespace, uid=uid)
    return NetworkDefinition(metadata=meta, spec=spec)


class _Past(NamedTuple):
    """A change. `before` is `None` for a new object, `after` for a deleted one."""

    version: int
    before: Resource | None
    after: Resource | None


class FakeApi(FakeClient):
    """The server. A test sets `machines` (Node objects by name), `pods` (the number of pods bound
    to each node name) and `definitions`, and reads `events`.

    `down`: no client reaches the server. `clock` gives the creation time of objects, in seconds
    since 1970.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        super().__init__(self, "test")
        self.clock = clock
        self.machines: dict[str, Node] = {}
        self.pods: Counter[str] = Counter()
        self.definitions: list[NetworkDefinition] = []
        self.events: list[Event] = []
        self.late: list[Callable[[], object]] = []
        self.changed = threading.Condition()
        self._objects: dict[Key, Resource] = {}
        self._past: list[_Past] = []
        self._version = 0
        self._oldest = 0  # a watch from an earlier version has expired
        self.watches_ended = 0

    def client(self, name: str, faults: Faults | None = None) -> FakeClient:
        """A new client with its own faults."""
        return FakeClient(self, name, faults)

    # --- for the test -------------------------------------------------------------------------

    def put(self, resource: AnyResource) -> AnyResource:
        """Store the object unchanged, with its status, without regard to the stored version."""
        with self.changed:
            last = self._objects.get(key(resource))
            return self._store(resource, last)

    def remove(self, kind: type[Resource], name: str, namespace: str = "") -> None:
        """Delete the object, at any version."""
        with self.changed:
            self.store_deletion(self.look(kind, name, namespace))

    def add_node(
        self, name: str, machine_id: str = "", system_uuid: str = "", boot_id: str = ""
    ) -> Node:
        """Add a ready Node object with a new uid."""
        ids = NodeInfo(machine_id=machine_id, system_uuid=system_uuid, boot_id=boot_id)
        node = Node(
            metadata=Meta(name=name, uid=str(uuid.uuid4())),
            status=NodeStatus(conditions=(NodeCondition("Ready", "True"),), node_info=ids),
        )
        with self.changed:
            self.machines[name] = node
        return node

    def deliver(self) -> None:
        """Apply each late request, in order. Its answer is lost."""
        with self.changed:
            requests, self.late = self.late, []
            for request in requests:
                with suppress(ApiError):
                    request()

    def end_watches(self) -> None:
        """End all open watches, as a server does every few minutes."""
        with self.changed:
            self.watches_ended += 1
            self.changed.notify_all()

    def expire_watches(self) -> None:
        """Forget all changes, so that a watch from an earlier version has expired."""
        with self.changed:
            self._past.clear()
            self._version += 1
            self._oldest = self._version
            self.end_watches()

    # --- the server ---------------------------------------------------------------------------

    def look(self, kind: type[AnyResource], name: str, namespace: str = "") -> AnyResource:
        """The object in its current state. Raises NotFound if it does not exist."""
        with self.changed:
            found = self._of_kind(kind).get((kind.KIND, namespace, name))
            if found is None:
                raise NotFound(f"get {kind.KIND} {name}: not found")
            return copied(cast(AnyResource, found), kind)

    def look_at_all(
        self,
        kind: type[AnyResource],
        fields: Mapping[str, str] | None = None,
        namespace: str = "",
        labels: str = "",
    ) -> Listing[AnyResource]:
        """All objects of the kind that the fields and the labels select, by name."""
        check_selector(kind, fields)
        with self.changed:
            found = [each for each in self._of_kind(kind).values() if isinstance(each, kind)]
            found = [each for each in found if namespace in ("", each.metadata.namespace)]
            found = sorted((each for each in found if selected(each, fields, labels)), key=key)
            return Listing(tuple(map(copied, found)), str(self._version))

    def _of_kind(self, kind: type[Resource]) -> Mapping[Key, Resource]:
        """The stored objects, among them those of the kind."""
        if issubclass(kind, Node):
            nodes = self.machines.values()
            return {key(each): each for each in nodes}
        if kind is NetworkDefinition:
            return {key(each): each for each in self.definitions}
        return self._objects

    def store_new(self, new: AnyResource) -> AnyResource:
        """Create an object (POST)."""
        with self.changed:
            if key(new) in self._objects:
                raise AlreadyExists(f"create {new.KIND} {new.metadata.name}: already exists")
            if new.metadata.resource_version:
                raise Refused(f"create {new.KIND} {new.metadata.name}: it has a resourceVersion")
            check(new, None)
            return self._store(without_status(new), None)

    def store_spec(self, changed: AnyResource) -> AnyResource:
        """Replace an object (PUT)."""
        with self.changed:
            last = self._of_this_version(changed, "update")
            check(changed, last)
            return self._store(with_status(changed, last), last)

    def store_patch(self, last: Resource, operations: Sequence[Mapping[str, Any]]) -> None:
        """Apply JSON operations to an object (PATCH)."""
        with self.changed:
            there = self.look(type(last), last.metadata.name, last.metadata.namespace)
            if there.metadata.uid != last.metadata.uid:
                raise Conflict(f"patch {last.KIND} {last.metadata.name}: another uid")
            changed = patched(there, operations)
            check(changed, there)
            self._store(changed, there)

    def store_condition(self, node: Node, condition: NodeCondition) -> None:
        with self.changed:
            there = self.look(Node, node.name)
            if there.uid != node.uid:
                raise Conflict(f"set condition of {node.name}: another uid")
            others = (each for each in there.status.conditions if each.type != condition.type)
            status = replace(there.status, conditions=(*others, condition))
            self.machines[node.name] = replace(there, status=status)

    def store_status(self, changed: AnyResource) -> AnyResource:
        """Replace the status (PUT)."""
        with self.changed:
            last = self._of_this_version(changed, "update status of")
            return self._store(with_status(last, changed), last)

    def store_deletion(self, last: AnyResource) -> None:
        """Delete an object, with preconditions (DELETE)."""
        with self.changed:
            if key(last) not in self._objects:
                raise NotFound(f"delete {last.KIND} {last.metadata.name}: not found")
            self._of_this_version(last, "delete")
            self._add_to_past(self._objects.pop(key(last)), None)

    def follow(
        self,
        kind: type[AnyResource],
        resource_version: str,
        client: FakeClient,
    ) -> Iterator[Change[AnyResource]]:
        """A watch. It ends when the server ends it, or when the client loses its connection."""
        seen, ended = int(resource_version), self.watches_ended
        if kind is NetworkDefinition:
            return self._follow_definitions(kind, client)

        def changes() -> Iterator[Change[AnyResource]]:
            nonlocal seen
            while True:
                with self.changed:
                    if seen < self._oldest:
                        raise WatchExpired(f"watch {kind.KIND} from {seen}: too old")
                    past = self._first_after(seen)
                    if past is None:
                        if self.watches_ended != ended or self.down or client.down:
                            return
                        self.changed.wait(0.1)
                        continue
                seen = past.version
                change = _change_of(past, kind)
                if change is not None:
                    yield change

        return changes()

    def _follow_definitions(
        self, kind: type[AnyResource], client: FakeClient
    ) -> Iterator[Change[AnyResource]]:
        """A watch of `definitions`, a list to which a test appends. It starts with the present
        ones."""
        known, ended = dict[Key, Resource](), self.watches_ended
        while self.watches_ended == ended and not (self.down or client.down):
            with self.changed:
                now = dict(self._of_kind(kind))
                if now == known:
                    self.changed.wait(0.02)
                    continue
            gone = [known[each] for each in known.keys() - now.keys()]
            there = [now[each] for each in now if now[each] != known.get(each)]
            known = now
            for each in (*gone, *there):
                found = cast(AnyResource, each)
                version = replace(found.metadata, resource_version="1")
                found = replace(found, metadata=version)
                yield Change("DELETED" if each in gone else "ADDED", found)

    def _first_after(self, version: int) -> _Past | None:
        for past in self._past:
            if past.version > version:
                return past
        return None

    def _of_this_version(self, resource: AnyResource, verb: str) -> AnyResource:
        """The stored object, if its version is the one that was read."""
        what = f"{verb} {resource.KIND} {resource.metadata.name}"
        if not (resource.metadata.resource_version and resource.metadata.uid):
            raise Refused(f"{what}: it has no uid or no resourceVersion")
        last = self._objects.get(key(resource))
        # A real server, too, compares uids before it notices that the object is missing.
        if last is None or last.metadata.uid != resource.metadata.uid:
            raise Conflict(f"{what}: the object has another uid")
        if last.metadata.resource_version != resource.metadata.resource_version:
            raise Conflict(f"{what}: the object has changed")
        return cast(AnyResource, last)

    def _store(self, resource: AnyResource, last: Resource | None) -> AnyResource:
        before = last.metadata if last else None
        spec_changed = last is not None and getattr(last, "spec", None) != getattr(
            resource, "spec", None
        )
        meta = replace(
            resource.metadata,
            uid=before.uid if before else str(uuid.uuid4()),
            resource_version=before.resource_version if before else "",
            creation_timestamp=before.creation_timestamp if before else self._now(),
            generation=before.generation + spec_changed if before else 1,
        )
        stored = copied(replace(resource, metadata=meta))
        if stored == last:
            return stored  # an update that changes nothing makes no new version
        stored = replace(stored, metadata=replace(meta, resource_version=str(self._version + 1)))
        self._objects[key(stored)] = stored
        self._add_to_past(last, stored)
        return copied(stored)

    def _add_to_past(self, before: Resource | None, after: Resource | None) -> None:
        self._version += 1
        self._past.append(_Past(self._version, before, after))
        if len(self._past) > HISTORY:
            self._oldest = self._past.pop(0).version
        self.changed.notify_all()

    def _now(self) -> str:
        return datetime.fromtimestamp(self.clock(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _change_of(past: _Past, kind: type[AnyResource]) -> Change[AnyResource] | None:
    """The change as a watch shows it; `None` if it is of another kind."""
    both = (past.before, past.after)
    before, after = (each if isinstance(each, kind) else None for each in both)
    if after is not None:
        return Change("MODIFIED" if before else "ADDED", copied(after))
    if before is None:
        return None
    gone = replace(before.metadata, resource_version=str(past.version))
    return Change("DELETED", copied(replace(before, metadata=gone)))
