"""The rules for one pod, of all rules of a node, and what each of them allows."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from base.pod import Pod
from cni.policy.document import COUNTS, USE, Rule, Subject
from cni.policy.subjects import CallingPod, Facts, Subjects
from cni.policy.values import NOTHING, Span, Values
from host.discovery import HCA

Rules = tuple[Rule, ...]
"""Some of a node's rules, in the order in which they count."""

_FULL = 0x8000  # a P_Key's bit of a full member
_TOLD = 8  # rules, in an error


class Device(msgspec.Struct, frozen=True):
    """The device of an attachment, as rules see it: an HCA, and the resources that have it."""

    hca: HCA
    resources: frozenset[str] = frozenset()  # by which the pod holds it


class Ruleset:
    """All rules of a node, by the namespaces that they name."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self.rules = tuple(sorted(rules, key=lambda rule: rule.policy))  # which keeps their order
        self._named: dict[str, list[int]] = {}  # rules that name each of their namespaces
        self._others: list[int] = []
        for number, rule in enumerate(self.rules):
            names = _namespaces(rule)
            if names is None:
                self._others.append(number)
            else:
                for name in names:
                    self._named.setdefault(name, []).append(number)

    def of(self, pod: Pod, subjects: Subjects) -> "PodRules | None":
        """The rules for a pod; None if there are none. CNIError 11 from `subjects`."""
        numbers = sorted((*self._named.get(pod.namespace, ()), *self._others))
        rules = [self.rules[number] for number in numbers]
        calling = CallingPod(namespace=pod.namespace, name=pod.name, uid=pod.uid)
        facts = _facts(rules, pod.namespace)
        if facts != Facts():
            calling = subjects(pod, facts)
        found = [(rule, rule.is_for(calling)) for rule in rules]
        every = tuple(rule for rule, is_for in found if is_for)
        untold = tuple(rule for rule, is_for in found if is_for is None)
        return PodRules(every, untold) if every else None

    def whole(self) -> "PodRules":
        """All rules, for a call that is for no pod."""
        return PodRules(self.rules)


class PodRules(msgspec.Struct, frozen=True):
    """The rules for one pod. Of `untold` this node cannot tell whether they are for it."""

    every: Rules
    untold: Rules = ()

    def may_set(self, key: str, value: int | str) -> bool:
        """Whether one of the rules lets a definition set an option to this value, or fixes it."""
        return any(
            rule.allowed.get(key, NOTHING).allows(value) or rule.fixed.get(key) == value
            for rule in self.every
        )

    @property
    def host_paths(self) -> tuple[str, ...]:
        """The directories in which paths of definitions may be."""
        return tuple(dict.fromkeys(path for rule in self.every for path in rule.host_paths))


def allowing(rules: Rules, key: str, value: Any) -> Rules:  # noqa: ANN401 - of any key
    """The rules whose `use` has a value: a number or name, a count, or a `Device`."""
    return tuple(rule for rule in rules if _uses(rule, key, value))


def having(rules: Rules, intervals: Sequence[Span]) -> Rules:
    """The rules that have, for each interval, one network with all of its addresses."""
    return tuple(
        rule
        for rule in rules
        if all(rule.use.ranges.allows_all(first, last) for first, last in intervals)
    )


def fixed(rules: Rules, key: str) -> Any:  # noqa: ANN401 - a value as a definition has it
    """What the first of the rules fixes for a key; None if none does."""
    return next((rule.fixed[key] for rule in rules if key in rule.fixed), None)


def most(rules: Rules, count: str) -> int | None:
    """The largest limit that the rules have for a count of `Use`; None without one."""
    limits = [getattr(rule.use, count) for rule in rules]
    return None if None in limits else max(limits)


def titles(rules: Rules) -> tuple[str, ...]:
    """The names of rules."""
    return tuple(rule.title for rule in rules)


def shown(rules: Rules) -> str:
    """The names of rules, for an error."""
    more = f" and {len(rules) - _TOLD} more" if len(rules) > _TOLD else ""
    return ", ".join(titles(rules[:_TOLD])) + more


def _uses(rule: Rule, key: str, value: Any) -> bool:  # noqa: ANN401 - of any key
    """Whether a rule's `use` has a value. What the rule fixes it allows."""
    if key == "devices":
        return rule.use.has_device(value.hca) or any(map(rule.use.pools.allows, value.resources))
    if key in COUNTS:
        limit = getattr(rule.use, COUNTS[key])
        return limit is None or value <= limit
    listed: Values = getattr(rule.use, USE[key][0])
    if listed.allows(value):
        return True
    if key == "vlans":
        return "vlan" in rule.fixed and value == rule.fixed["vlan"]
    if key == "pkeys":  # the plugin ipoib makes full members of all children
        return "pkey" in rule.fixed and value in (rule.fixed["pkey"], rule.fixed["pkey"] | _FULL)
    return False


def _namespaces(rule: Rule) -> set[str] | None:
    """The namespaces that a rule names; None if it is for others, too."""
    names: set[str] = set()
    for subject in rule.subjects:
        listed = subject.namespaces
        if listed is None or listed.any or any(set(name) & {"*", "?"} for name in listed.names):
            return None
        names.update(listed.names)
    return names


def _facts(rules: Sequence[Rule], namespace: str) -> Facts:
    """What of the API server the rules look at that may be for pods of a namespace."""
    looking: list[Subject] = [
        subject
        for rule in rules
        for subject in rule.subjects
        if subject.namespaces is None or subject.namespaces.allows(namespace)
    ]
    return Facts(
        labels=any(subject.namespace_selector is not None for subject in looking),
        service_account=any(subject.service_accounts is not None for subject in looking),
    )
