"""What an ADD may still use: the rules that allow everything that it asked for so far.

`use` counts as a whole: each value narrows the rules to those that list it too, and an attachment
is refused when none is left. Options (`set`) count one by one: any rule for the pod may allow one.
Where no rule is for the pod, the settings of the node decide (`rules.Policy`).
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from base.pod import Pod
from cni.policy import pod_rules, rules
from cni.policy.pod_rules import PodRules, Rules
from cni.policy.rules import Policy
from cni.policy.subjects import Subjects, nothing_known
from cni.policy.values import Span
from cni.spec.errors import CNIError, Code

T = TypeVar("T")

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
    rules: PodRules | None = None  # None: no rule is for the pod
    left: Rules = ()

    def using(self, key: str, value: Hashable, what: str, shown: object) -> "Allowance":
        """The allowance of an attachment that uses this value too. NotAllowed if no rule is left.

        Args:
            key: of `use`.
            value: as `pod_rules.allowing` takes it.
            what: the configuration's key, for the error.
            shown: the value, for the error.
        """
        if self.rules is None:
            return self
        left = pod_rules.allowing(self.left, key, value)
        if not left:
            raise self._refused(
                what,
                shown,
                f"none of the rules that allow the rest ({pod_rules.shown(self.left)}) lists it "
                f'in "use.{key}"',
                self.left,
            )
        return Allowance(self.policy, self.rules, left)

    def within(
        self, intervals: Sequence[Span], what: str, shown: Callable[[Span], str]
    ) -> "Allowance":
        """`using` of addresses: each interval lies within one network of a rule."""
        if self.rules is None or not intervals:
            return self
        left = pod_rules.having(self.left, intervals)
        if left:
            return Allowance(self.policy, self.rules, left)
        alone = (each for each in intervals if not pod_rules.having(self.left, (each,)))
        raise self._refused(
            what,
            shown(next(alone, intervals[0])),
            f"none of the rules that allow the rest ({pod_rules.shown(self.left)}) lists it "
            'in "use.ranges"',
            self.left,
        )

    def require_option(self, key: str, value: int | str, what: str, shown: object) -> None:
        """Raise NotAllowed unless a rule lets the definition set an option to this value."""
        if self.rules is not None and not self.rules.may_set(key, value):
            raise self._refused(
                what,
                shown,
                f"no rule for this namespace ({pod_rules.shown(self.rules.every)}) lists it in "
                f'"set.{key}"',
                self.rules.every,
            )

    def fixed(self, key: str) -> Any:  # noqa: ANN401 - a value as a definition has it
        """What the rules left put in where a definition has no value; None if nothing."""
        return None if self.rules is None else pod_rules.fixed(self.left, key)

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
        if self.rules is None:
            return None
        return pod_rules.most(self.left, count)

    def titles(self) -> tuple[str, ...]:
        """The names of the rules that are left."""
        return pod_rules.titles(self.left)

    def not_allowed(self, what: str, setting: str, remedy: str = "remove it") -> CNIError:
        """The error for what neither the settings nor the rules allow, as `rules.not_allowed`."""
        if self.rules is None:
            return rules.not_allowed(what, setting, remedy)
        every = self.rules.every
        return NotAllowed(
            f"{what} is not allowed for this namespace: {remedy}, or ask the administrator, who "
            f'can list it in "set.{_SET_KEYS[setting]}" of a rule for it '
            f"({pod_rules.shown(every)})",
            _SET_KEYS[setting],
            what,
            pod_rules.titles(every),
        )

    def _refused(self, what: str, shown: object, why: str, left: Rules) -> NotAllowed:
        assert self.rules is not None
        blind = ""
        if self.rules.untold:
            blind = (
                f" (this node does not know the labels and service accounts that rules "
                f"{pod_rules.shown(self.rules.untold)} look at)"
            )
        return NotAllowed(
            f'"{what}": {shown} is not allowed for this namespace: {why}{blind}: use another '
            "value, or ask the administrator",
            what,
            str(shown),
            pod_rules.titles(left),
        )


def of_pod(policy: Policy, pod: Pod, subjects: Subjects = nothing_known) -> Allowance:
    """What the ADD of a pod may use. CNIError 11 if that cannot be told now."""
    found = policy.ruleset.of(pod, subjects)
    return Allowance(policy) if found is None else _by_rules(found)


def for_anyone(policy: Policy, check: Callable[[Allowance], T]) -> T:
    """A check of a call that is for no pod, such as STATUS: it fails if it fails for every pod."""
    try:
        return check(Allowance(policy))
    except CNIError as error:
        if error.code != Code.NOT_ALLOWED or not policy.rules:
            raise
    return check(_by_rules(policy.ruleset.whole()))


def _by_rules(found: PodRules) -> Allowance:
    directories = found.host_paths
    settings = Policy(
        log_directories=directories,
        resolv_conf_directories=directories,
        ipam_types=(),  # asked as "ipamTypes"
        ipam_directories=directories,
        unmatched_devices=found.may_set("match_device", False),
        whole_pfs=found.may_set("pfOnly", True),
        unassigned_devices=found.may_set("unassigned_devices", True),
        private_ranges=found.may_set("private_ranges", True),
    )
    return Allowance(settings, found, found.every)
