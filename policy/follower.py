"""Follows the cluster's policies, and the labels of namespaces if a rule uses labels.

The policies that were read last stay active, in memory and in a file, until the follower reads new
policies. An unreadable policy does not replace its last readable form, and an event has the reason.
"""

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from base.documents import DocumentError
from base.loop import StepThread
from base.problems import Problems
from base.text import printable
from cni.spec.errors import CNIError
from kube.client import ClusterApi, PendingEvents
from kube.informer import Mirror, same
from kube.resources import Meta, Resource
from policy import stored_policies
from policy.document import unknown
from policy.stored_policies import ClusterPolicies, StoredPolicy

UNREADABLE = "PolicyUnreadable"
LOOK_EVERY = 30.0  # seconds between two attempts to write the file

_log = logging.getLogger(__name__)


class FabricPolicy(Resource, frozen=True, kw_only=True):
    """Rules in the cluster. `spec` is undecoded, because a newer podfabric may have written it."""

    API = "fabric.podfabric.io/v1alpha1"
    KIND = stored_policies.KIND
    PLURAL = "fabricpolicies"

    spec: dict[str, Any] = msgspec.field(default_factory=dict)

    def stored(self) -> StoredPolicy:
        """The policy in the form of the node's file. Does not check the rules."""
        listed = self.spec.get("rules")
        return StoredPolicy(
            name=self.metadata.name,
            uid=self.metadata.uid,
            generation=self.metadata.generation,
            rules=listed if isinstance(listed, list) else [listed],
        )


class NamespaceObject(Resource, frozen=True, kw_only=True):
    API = "v1"
    KIND = "Namespace"
    PLURAL = "namespaces"

    metadata: Meta


class PolicyFollower(StepThread):
    """Keeps the active policies in memory and in a file. Is thread-safe after `start`."""

    def __init__(self, api: ClusterApi, path: Path) -> None:
        super().__init__("policies")
        self._api = api
        self._path = path
        self._present: ClusterPolicies | None = None
        self._written: ClusterPolicies | None = None
        self._policies: Mirror[FabricPolicy] | None = None
        self._namespaces: Mirror[NamespaceObject] | None = None
        self._problems = Problems(_log)
        self.events = PendingEvents(api)

    def start(self) -> None:
        """Make the policies in the file active, and follow the cluster's policies in threads."""
        try:
            self._present = self._written = stored_policies.load(self._path)
        except CNIError as error:
            _log.warning("%s", error)
        self._policies = Mirror(self._api, FabricPolicy, same, self.wake)
        super().start()

    def close(self) -> None:
        for mirror in (self._policies, self._namespaces):
            if mirror is not None:
                mirror.close()
        super().close()

    def present(self) -> ClusterPolicies:
        """The active policies. Raises CNIError 11 if this node has never read the policies."""
        present = self._present
        if present is None:
            raise unknown("the policies of the cluster", "its agent has not reached the API server")
        return present

    def step(self) -> float:
        """Update the active policies, and write at most one event."""
        seen = None if self._policies is None else self._policies.items()
        if seen is not None:
            self._take(seen)
        return 0.0 if self.events.send(1) else LOOK_EVERY

    def _take(self, seen: Sequence[FabricPolicy]) -> None:
        present = self._present
        last = {each.name: each for each in present.policies} if present else {}
        found = (self._read(each, last.get(each.metadata.name)) for each in seen)
        policies = tuple(sorted(found, key=lambda each: each.name))
        if present is not None and policies == present.policies:
            policies = present.policies  # keep the objects, which cache their rules
        new = ClusterPolicies(policies=policies, namespaces=self._labels(policies))
        count = len(new.rules)  # decodes the rules, before they become active
        self._present = new
        if present is None or policies is not present.policies:
            _log.info("policies of the cluster: %d, with %d rules", len(policies), count)
        if new != self._written:
            self._write(new)

    def _write(self, new: ClusterPolicies) -> None:
        try:
            stored_policies.save(self._path, new)
        except OSError as error:
            self._problems.tell(f"writing {self._path}", error)
        else:
            self._problems.tell(f"writing {self._path}", None)
            self._written = new

    def _read(self, policy: FabricPolicy, last: StoredPolicy | None) -> StoredPolicy:
        """Return the policy that becomes active.

        An unreadable policy keeps its last readable form, or else only its subjects (see `closed`).
        """
        stored = policy.stored()
        if stored == last:
            return last
        try:
            _ = stored.read
        except DocumentError as error:
            kept = last or stored_policies.closed(stored)
            active = "only its subjects are active: the policy allows nothing for their pods"
            if kept.generation != stored.generation:
                active = f"generation {kept.generation} stays active"
            reason = DocumentError(f"{error}; {active}")
            self._problems.tell("not active", reason)
            kind = {"apiVersion": FabricPolicy.API, "kind": FabricPolicy.KIND}
            regarding = {**kind, "name": stored.name, "uid": stored.uid}
            self.events.add(UNREADABLE, printable(str(reason)), regarding, str(stored.generation))
            return kept
        return stored

    def _labels(self, policies: Iterable[StoredPolicy]) -> dict[str, dict[str, str]] | None:
        """The labels of all namespaces. `None` before a first read, or if no rule uses labels."""
        rules = (rule for policy in policies for rule in policy.read)
        subjects = (each for rule in rules for each in rule.subjects)
        if all(each.namespace_selector is None for each in subjects):
            if self._namespaces is not None:
                self._namespaces.close()
            self._namespaces = None
            return None
        if self._namespaces is None:
            self._namespaces = Mirror(self._api, NamespaceObject, same, self.wake)
        seen = self._namespaces.items()
        if seen is None:
            return None if self._present is None else self._present.namespaces
        return {each.metadata.name: each.metadata.labels for each in seen}
