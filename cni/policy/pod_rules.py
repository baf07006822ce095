"""Which rules are for a pod, and which of them allow a value.

Both are kept: pods of one namespace ask for the same values again and again. A set of rules is a
number with a bit for each of them.
"""

from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any

import msgspec

from base.pod import Pod
from cni.policy.document import Rule, Subject, Use
from cni.policy.subjects import CallingPod, Facts, Subjects
from cni.policy.values import NOTHING, Span, Values

_KEPT = 1024  # pods or values: what is made for tenants must not grow without end
_TOLD = 8  # rules, in an error
_FEW = 4  # intervals of one range


class Device(msgspec.Struct, frozen=True):
    """The device of an attachment, as rules see it: an HCA, and the resources that have it."""

    hca: Any  # host.discovery.HCA: the policy does not look at the host
    resources: frozenset[str] = frozenset()  # by which the pod holds it


def _of_values(name: str) -> Callable[[Use, Any], bool]:
    def allows(use: Use, value: int | str) -> bool:
        listed: bool = getattr(use, name).allows(value)
        return listed

    return allows


def _has_device(use: Use, device: Device) -> bool:
    return use.has_device(device.hca) or any(map(use.pools.allows, device.resources))


def _has_count(use: Use, count: int) -> bool:
    most = use.addresses_per_attachment
    return most is None or count <= most


_USES: Mapping[str, Callable[[Use, Any], bool]] = {
    "addressesPerAttachment": _has_count,
    "devices": _has_device,
    "guids": _of_values("guids"),
    "ipamTypes": _of_values("ipam_types"),
    "macs": _of_values("macs"),
    "networkNames": _of_values("network_names"),
    "pkeys": _of_values("pkeys"),
    "vlans": _of_values("vlans"),
}
"""The keys of `use` by which an attachment narrows the rules."""

_FIXES = {"pkeys": "pkey", "vlans": "vlan"}
"""What a rule fixes it allows."""


class PodRules:
    """The rules for one pod, in their order."""

    def __init__(self, rules: tuple[Rule, ...], blind: tuple[str, ...] = ()) -> None:
        self.rules = rules
        self.every = (1 << len(rules)) - 1
        self.blind = blind  # titles of rules that look at what this node does not know
        self._masks: dict[tuple[str, Hashable], int] = {}

    def allowing(self, key: str, value: Hashable) -> int:
        """The rules whose `use` has this value."""
        at = (key, value)
        mask = self._masks.get(at)
        if mask is None:
            mask = self._kept(
                at, sum(1 << i for i, rule in enumerate(self.rules) if _allows(rule, *at))
            )
        return mask

    def having(self, intervals: tuple[Span, ...]) -> int:
        """The rules within whose networks each interval lies.

        A tenant may make a thousand intervals: what is worked out of many is not kept, and rules
        with the same networks count once.
        """
        at = ("ranges", intervals)
        mask = self._masks.get(at) if len(intervals) <= _FEW else None
        if mask is not None:
            return mask
        mask = 0
        for ranges, some in self._by_ranges.items():
            if all(ranges.allows_all(first, last) for first, last in intervals):
                mask |= some
        return self._kept(at, mask) if len(intervals) <= _FEW else mask

    @cached_property
    def _by_ranges(self) -> dict[Values, int]:
        """The rules that have the same networks. Whole once it is seen: calls share it."""
        found: dict[Values, int] = {}
        for i, rule in enumerate(self.rules):
            found[rule.use.ranges] = found.get(rule.use.ranges, 0) | 1 << i
        return found

    def may_set(self, key: str, value: int | str) -> bool:
        """Whether one of the rules lets a definition set an option to this value."""
        at = (f"set.{key}", value)
        mask = self._masks.get(at)
        if mask is None:
            mask = self._kept(
                at,
                any(
                    rule.allowed.get(key, NOTHING).allows(value) or rule.fixed.get(key) == value
                    for rule in self.rules
                ),
            )
        return bool(mask)

    def fixed(self, left: int, key: str) -> Any:  # noqa: ANN401 - a value as a definition has it
        """What the first of the rules left fixes for a key; None if none does."""
        return next((rule.fixed[key] for rule in self.of(left) if key in rule.fixed), None)

    def of(self, left: int) -> list[Rule]:
        """The rules of a set."""
        return [rule for i, rule in enumerate(self.rules) if left >> i & 1]

    def titles(self, left: int) -> str:
        """The names of a set, for an error."""
        titles = [rule.title for rule in self.of(left)]
        more = f" and {len(titles) - _TOLD} more" if len(titles) > _TOLD else ""
        return ", ".join(titles[:_TOLD]) + more

    def _kept(self, at: tuple[str, Hashable], mask: int) -> int:
        if len(self._masks) >= _KEPT:
            self._masks.clear()
        self._masks[at] = mask
        return mask


class _NamedRules(msgspec.Struct, frozen=True):
    """Rules that may be for pods of a namespace, and what of the API server these look at."""

    facts: Facts
    rules: tuple[tuple[Rule, tuple[Subject, ...]], ...]  # with the subjects that name it


class Ruleset:
    """All rules of a node."""

    def __init__(self, rules: tuple[Rule, ...]) -> None:
        self._rules = tuple(sorted(rules, key=lambda rule: rule.policy))  # which keeps their order
        self._by_namespace: dict[str, _NamedRules] = {}
        self._of: dict[Hashable, PodRules | None] = {}
        self._made: dict[tuple[str, ...], PodRules] = {}

    def of(self, pod: Pod, subjects: Subjects) -> PodRules | None:
        """The rules for a pod; None if there are none. CNIError 11 from `subjects`."""
        if not self._rules:
            return None
        named = self._named(pod.namespace)
        if named.facts == Facts():
            calling = CallingPod(namespace=pod.namespace, name=pod.name, uid=pod.uid)
        else:
            calling = subjects(pod, named.facts)
        labels = calling.labels
        key = (
            calling.namespace,
            None if labels is None else frozenset(labels.items()),
            calling.service_account,
        )
        with suppress(KeyError):
            return self._of[key]
        if len(self._of) >= _KEPT:
            self._of.clear()
            self._made.clear()
        found = self._of[key] = self._matching(calling, named)
        return found

    def _named(self, namespace: str) -> _NamedRules:
        found = self._by_namespace.get(namespace)
        if found is None:
            pairs = (
                (rule, [each for each in rule.subjects if _names(each, namespace)])
                for rule in self._rules
            )
            rules = tuple((rule, tuple(subjects)) for rule, subjects in pairs if subjects)
            every = [subject for _, subjects in rules for subject in subjects]
            facts = Facts(
                labels=any(subject.namespace_selector is not None for subject in every),
                service_account=any(subject.service_accounts is not None for subject in every),
            )
            found = _NamedRules(facts, rules)
            if len(self._by_namespace) >= _KEPT:
                self._by_namespace.clear()
            self._by_namespace[namespace] = found
        return found

    def _matching(self, pod: CallingPod, named: _NamedRules) -> PodRules | None:
        matching = []
        blind = []
        for rule, subjects in named.rules:
            answers = [_is_for(subject, pod) for subject in subjects]
            if True in answers:
                matching.append(rule)
            elif None in answers:
                blind.append(rule.title)
        if not matching:
            return None
        # Namespaces for which the same rules are share what is kept of them.
        titles = (*(rule.title for rule in matching), "", *blind)
        return self._made.setdefault(titles, PodRules(tuple(matching), tuple(blind)))


def _allows(rule: Rule, key: str, value: Any) -> bool:  # noqa: ANN401 - of any key
    if _USES[key](rule.use, value):
        return True
    fixed = rule.fixed.get(_FIXES.get(key, ""))
    # The plugin ipoib makes full members of all children.
    return fixed is not None and value in (fixed, fixed | 0x8000 if key == "pkeys" else fixed)


def _names(subject: Subject, namespace: str) -> bool:
    return subject.namespaces is None or subject.namespaces.allows(namespace)


def _is_for(subject: Subject, pod: CallingPod) -> bool | None:
    """Whether a subject that names a pod's namespace matches the pod; None if this node does not
    know what it looks at.
    """
    selector, accounts = subject.namespace_selector, subject.service_accounts
    known = True
    if selector is not None:
        if pod.labels is None:
            known = False
        elif not selector.selects(pod.labels):
            return False
    if accounts is not None:
        if pod.service_account is None:
            known = False
        elif not accounts.allows(pod.service_account):
            return False
    return True if known else None
