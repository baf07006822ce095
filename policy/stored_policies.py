"""The file with the cluster's policies that this node's agent read last.

A new agent reads the file while the API server does not answer. A process that runs one call
without an agent also reads the file. Without the file, each ADD fails and the runtime tries again.
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
    """A FabricPolicy. `rules` is its undecoded `spec.rules`."""

    name: str
    uid: str
    generation: int
    rules: list[Any]

    @cached_property
    def read(self) -> tuple[Rule, ...]:
        """The decoded rules. Raises DocumentError."""
        return document.rules_of(self.rules, f"{KIND} {self.name}: spec.rules", self.name)


def closed(policy: StoredPolicy) -> StoredPolicy:
    """Reduce a policy with unreadable rules to the subjects of the rules.

    The result allows nothing for the subjects' pods. Without the policy, `Policy.otherwise` would
    apply to these pods. If the subjects are unreadable, the result is for all pods.
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
    """All policies, and labels of namespaces. `namespaces` is `None` if no labels were read."""

    policies: tuple[StoredPolicy, ...]
    namespaces: dict[str, dict[str, str]] | None

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        """The rules of all policies. Raises DocumentError."""
        return tuple(rule for policy in self.policies for rule in policy.read)

    def labels(self, namespace: str) -> Mapping[str, str]:
        """The labels of a namespace. Raises CNIError 11 if they are unknown."""
        labels = None if self.namespaces is None else self.namespaces.get(namespace)
        if labels is None:
            raise unknown(f'the labels of namespace "{namespace}"')
        return labels


Present = Callable[[], ClusterPolicies]
"""Returns the active policies. Raises CNIError 11 if this node has never read the policies."""


class _Content(msgspec.Struct, frozen=True):
    """The content of the file: the policies, and the checksum of their text."""

    crc32: str
    policies: msgspec.Raw


def joined(node: rules.Source, cluster: Present) -> rules.Source:
    """A source of the node's rules, followed by the cluster's rules if `policy.cluster` is true."""

    def source() -> Policy:
        own = node()
        if not own.cluster:
            return own
        found = cluster()
        every = (*own.rules, *found.rules)
        return msgspec.structs.replace(own, rules=every, labels=found.labels)

    return source


def on_node(paths: Paths) -> rules.Source:
    """A source of the rules in the files of a node. It reads the files at each call."""
    return joined(rules.on_node(paths.config), lambda: load(paths.cluster_policies))


def load(path: Path) -> ClusterPolicies:
    """Read the policies in the file. Raises CNIError 11 if the file is missing or damaged."""
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
    """Replace the file. The new file survives a power cut. Raises OSError."""
    text = msgspec.json.encode(policies)
    content = _Content(f"{zlib.crc32(text):08x}", msgspec.Raw(text))
    write_atomically(path, msgspec.json.encode(content))


def decode(content: bytes) -> ClusterPolicies:
    """Decode the file's content. Raises DocumentError, also if a rule is unreadable."""
    try:
        file = decoding.decode(content, _Content)
        if file.crc32 != f"{zlib.crc32(bytes(file.policies)):08x}":
            raise DocumentError("its checksum differs")
        policies = decoding.decode(file.policies, ClusterPolicies)
    except msgspec.MsgspecError as error:
        raise DocumentError(str(error)) from None
    _ = policies.rules  # raises DocumentError for an unreadable rule
    return policies
