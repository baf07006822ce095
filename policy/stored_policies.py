"""The policies of the cluster, as this node's agent saw them last: a file in the state directory.

The agent writes it whenever they change. While the API server is away, an agent that starts, and a
process that does one call without an agent, go by it. Without the file nobody knows the rules, so
no pod is attached: the runtime tries again.
"""

import zlib
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from base import decoding
from base.documents import DocumentError
from base.files import read, write_atomically
from base.paths import Paths
from policy import document, rules
from policy.document import Rule, unknown
from policy.rules import Policy

KIND = "FabricPolicy"


class StoredPolicy(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A FabricPolicy in the last form that could be read. `rules` is its `spec.rules`."""

    name: str
    uid: str
    generation: int
    rules: list[Any]

    @cached_property
    def read(self) -> tuple[Rule, ...]:
        """The rules, typed. Raises DocumentError."""
        return document.rules_of(self.rules, f"{KIND} {self.name}: spec.rules", self.name)


def closed(policy: StoredPolicy) -> StoredPolicy:
    """A policy whose rules cannot be read, with their subjects alone: it allows their pods nothing.

    Otherwise pods would have what the node allows all others, for as long as their rules are of a
    later version of podfabric. If a rule's subjects cannot be read either, it is for all pods.
    """
    try:
        rules = [
            {"name": f"unreadable-{index}", "subjects": rule["subjects"]}
            for index, rule in enumerate(policy.rules)
        ]
        document.rules_of(rules, policy.name)
    except (DocumentError, LookupError, TypeError):
        rules = [{"name": "unreadable", "subjects": [{"namespaces": ["*"]}]}]
    return msgspec.structs.replace(policy, rules=rules)


class ClusterPolicies(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """All policies by name, and the labels of all namespaces; None if no rule looks at these."""

    policies: tuple[StoredPolicy, ...]
    namespaces: dict[str, dict[str, str]] | None

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        """The rules of all policies. Raises DocumentError."""
        return tuple(rule for policy in self.policies for rule in policy.read)

    def labels(self, namespace: str) -> Mapping[str, str]:
        """The labels of a namespace. CNIError 11 if they are not known."""
        labels = None if self.namespaces is None else self.namespaces.get(namespace)
        if labels is None:
            raise unknown(f'the labels of namespace "{namespace}"')
        return labels


Present = Callable[[], ClusterPolicies]
"""Returns the policies that are in force. CNIError 11 if none were ever seen."""


class _Content(msgspec.Struct, frozen=True):
    """The file: the policies, and the checksum of their text."""

    crc32: str
    policies: msgspec.Raw


def joined(node: rules.Source, cluster: Present) -> rules.Source:
    """The rules of the node, and behind them those of the cluster where the node follows them."""

    def source() -> Policy:
        own = node()
        if not own.cluster:
            return own
        found = cluster()
        every = (*own.rules, *found.rules)
        return msgspec.structs.replace(own, rules=every, labels=found.labels)

    return source


def on_node(paths: Paths) -> rules.Source:
    """The rules by the files of a node, which are read at each call."""
    return joined(rules.on_node(paths.config), lambda: load(paths.cluster_policies))


def load(path: Path) -> ClusterPolicies:
    """What the agent saw last. CNIError 11 if there is no such file, or it is damaged."""
    try:
        return decode(read(str(path)))
    except FileNotFoundError:
        why = f"{path} is missing"
    except OSError as error:
        why = f"{path}: cannot be read: {error.strerror}"
    except DocumentError as error:
        why = f"{path} is damaged: {error}"
    raise unknown("the policies of the cluster", why)


def save(path: Path, policies: ClusterPolicies) -> None:
    """Replace the file, durably. Raises OSError."""
    text = msgspec.json.encode(policies)
    content = _Content(f"{zlib.crc32(text):08x}", msgspec.Raw(text))
    write_atomically(path, msgspec.json.encode(content))


def decode(content: bytes) -> ClusterPolicies:
    """The policies in the file's content, whose rules can be read. Raises DocumentError."""
    try:
        file = decoding.decode(content, _Content)
        if file.crc32 != f"{zlib.crc32(bytes(file.policies)):08x}":
            raise DocumentError("its checksum differs")
        policies = decoding.decode(file.policies, ClusterPolicies)
    except msgspec.MsgspecError as error:
        raise DocumentError(str(error)) from None
    _ = policies.rules  # which reads them
    return policies
