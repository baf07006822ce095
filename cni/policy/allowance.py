"""What an ADD may still use: the rules that allow everything that it asked for so far.

`use` counts as a whole: each value narrows the rules to those that list it too, and an attachment
is refused when none is left. Options (`set`) count one by one: any rule for the pod may allow one.
Where no rule is for the pod, the settings of the node decide (`rules.Policy`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from base.pod import Pod
from cni.policy import rules
from cni.policy.document import Rule, Subjects
from cni.policy.rules import Policy
from cni.policy.values import Span
from cni.spec.errors import CNIError, Code

T = TypeVar("T")
Rules = tuple[Rule, ...]
"""Some of a node's rules, in the order in which they count."""

_TOLD = 8  # rules, in an error
_SET_KEYS = {
    "ipam_directories": "hostPaths",
    "log_directories": "hostPaths",
    "private_ranges": "private_ranges",
    "resolv_conf_directories": "hostPaths",
    "unassigned_devices": "unassigned_devices",
    "unmatched_devices": "match_device",
    "whole_pfs": "pfOnly",
}
"""The key of `set` that stands for each setting of the node."""


class NotAllowed(CNIError):
    """The rules for a pod do not allow a value. `rules` are those that were left before it."""

    def __init__(self, message: str, key: str, value: str, rules: tuple[str, ...]) -> None:
        super().__init__(Code.NOT_ALLOWED, message)
        self.key = key
        self.value = value
        self.rules = rules

    def among(self, code: int, messages: Iterable[str]) -> CNIError:
        """The error for several candidates of which this one was refused by the rules."""
        message = "; ".join(dict.fromkeys(messages))
        if code != Code.NOT_ALLOWED:
            return CNIError(code, message)
        return NotAllowed(message, self.key, self.value, self.rules)


class Allowance(msgspec.Struct, frozen=True):
    """What one ADD may use. `policy` has the settings that count for its pod."""

    policy: Policy = Policy()
    rules: Rules | None = None  # all for its pod; None: no rule is for it
    left: Rules = ()

    def using(self, key: str, value: Any, what: str, shown: object) -> "Allowance":  # noqa: ANN401
        """The allowance of an attachment that uses this value too. NotAllowed if no rule is left.

        Args:
            key: of `use`.
            value: as `Rule.uses` takes it.
            what: the configuration's key, for the error.
            shown: the value, for the error.
        """
        if self.rules is None:
            return self
        left = tuple(rule for rule in self.left if rule.uses(key, value))
        if not left:
            raise self._not_listed(what, shown, key)
        return Allowance(self.policy, self.rules, left)

    def within(
        self, intervals: Sequence[Span], what: str, shown: Callable[[Span], str]
    ) -> "Allowance":
        """`using` of addresses: each interval lies within one network of a rule."""
        if self.rules is None or not intervals:
            return self
        left = _having(self.left, intervals)
        if left:
            return Allowance(self.policy, self.rules, left)
        alone = (each for each in intervals if not _having(self.left, (each,)))
        raise self._not_listed(what, shown(next(alone, intervals[0])), "ranges")

    def require_option(self, key: str, value: int | str, what: str, shown: object) -> None:
        """Raise NotAllowed unless a rule lets the definition set an option to this value."""
        if self.rules is None or any(rule.may_set(key, value) for rule in self.rules):
            return
        why = f'no rule for this namespace ({titled(self.rules)}) lists it in "set.{key}"'
        raise _refused(what, shown, why, self.rules)

    def fixed(self, key: str) -> Any:  # noqa: ANN401 - a value as a definition has it
        """What the first of the rules left puts in where a definition has no value; else None."""
        return next((rule.fixed[key] for rule in self.left if key in rule.fixed), None)

    def filled(self, written: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
        """By key, what the rules left put into a definition: into those of `keys` without a value.

        `written` are the keys as the plugin reads them: of two spellings, the one that counts.
        """
        if self.rules is None:
            return {}
        # 0 stands for no MTU.
        said = {
            key
            for key, value in written.items()
            if value not in (None, "") and (value != 0 or key != "mtu")
        }
        fixed = {key: self.fixed(key) for key in keys if key not in said}
        return {key: value for key, value in fixed.items() if value is not None}

    def most(self, count: str) -> int | None:
        """The largest limit that the rules left have for a count of `Use`; None without one."""
        if any(count not in rule.use.counts for rule in self.left):
            return None
        return max((rule.use.counts[count] for rule in self.left), default=None)

    def titles(self) -> tuple[str, ...]:
        """The names of the rules that are left."""
        return _titles(self.left)

    def not_allowed(self, what: str, setting: str, remedy: str = "remove it") -> CNIError:
        """The error for what neither the settings nor the rules allow, as `rules.not_allowed`."""
        if self.rules is None:
            return rules.not_allowed(what, setting, remedy)
        key = _SET_KEYS[setting]
        return NotAllowed(
            f"{what} is not allowed for this namespace: {remedy}, or ask the administrator, who "
            f'can list it in "set.{key}" of a rule for it ({titled(self.rules)})',
            key,
            what,
            _titles(self.rules),
        )

    def _not_listed(self, what: str, shown: object, key: str) -> NotAllowed:
        why = f"none of the rules that allow the rest ({titled(self.left)}) lists it in "
        return _refused(what, shown, f'{why}"use.{key}"', self.left)


def of_pod(policy: Policy, pod: Pod, subjects: Subjects | None = None) -> Allowance:
    """What the ADD of a pod may use. CNIError 11 if that cannot be told now."""
    subjects = subjects or Subjects()
    found = [rule for rule in policy.rules if rule.is_for(pod, subjects)]
    return _by_rules(found) if found else Allowance(policy)


def for_anyone(policy: Policy, check: Callable[[Allowance], T]) -> T:
    """A check of a call that is for no pod, such as STATUS: it fails if it fails for every pod."""
    try:
        return check(Allowance(policy))
    except CNIError as error:
        if error.code != Code.NOT_ALLOWED or not policy.rules:
            raise
    return check(_by_rules(policy.rules))


def titled(found: Rules) -> str:
    """The names of rules, for an error."""
    more = f" and {len(found) - _TOLD} more" if len(found) > _TOLD else ""
    return ", ".join(_titles(found[:_TOLD])) + more


def _by_rules(found: Iterable[Rule]) -> Allowance:
    every = tuple(sorted(found, key=lambda rule: rule.policy))  # which keeps their order
    directories = tuple(dict.fromkeys(path for rule in every for path in rule.host_paths))

    def may(key: str, *, value: bool = True) -> bool:
        return any(rule.may_set(key, value) for rule in every)

    settings = Policy(
        log_directories=directories,
        resolv_conf_directories=directories,
        ipam_types=(),  # asked as "ipamTypes"
        ipam_directories=directories,
        unmatched_devices=may("match_device", value=False),
        whole_pfs=may("pfOnly"),
        unassigned_devices=may("unassigned_devices"),
        private_ranges=may("private_ranges"),
    )
    return Allowance(settings, every, every)


def _having(found: Rules, intervals: Sequence[Span]) -> Rules:
    """The rules that have, for each interval, one network with all of its addresses."""
    return tuple(
        rule
        for rule in found
        if all(rule.use.values("ranges").allows_all(first, last) for first, last in intervals)
    )


def _titles(found: Rules) -> tuple[str, ...]:
    return tuple(rule.title for rule in found)


def _refused(what: str, shown: object, why: str, left: Rules) -> NotAllowed:
    return NotAllowed(
        f'"{what}": {shown} is not allowed for this namespace: {why}: use another value, or ask '
        "the administrator",
        what,
        str(shown),
        _titles(left),
    )
