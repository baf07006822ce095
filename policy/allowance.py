"""The allowance of an ADD: the rules that allow every value that the ADD has used so far.

One rule must list all values that an attachment uses (`use`). After each value, only the rules that
list this value remain. If no rule remains, the attachment is refused. The options that an
attachment sets need no common rule: any rule for the pod may allow an option. If no rule is for the
pod, `Policy.otherwise` applies.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from base.pod import Pod
from cni.spec.errors import CNIError, Code
from host.sysfs import selectors
from host.sysfs.discovery import HCA
from policy.document import COUNTS, EVERY_DEVICE, Rule
from policy.rules import Policy
from policy.value_lists import NOTHING, Span

Rules = tuple[Rule, ...]
"""Rules of a node, in their order."""

_SHOWN = 8  # rules that an error names
_FULL = 0x8000  # the bit of a P_Key that marks a full member


class NotAllowed(CNIError):
    """No rule allows a value. `rules` has the titles of the rules that were checked."""

    def __init__(self, message: str, key: str, value: str, rules: tuple[str, ...]) -> None:
        super().__init__(Code.NOT_ALLOWED, message)
        self.key = key
        self.value = value
        self.rules = rules


def joined(refusals: Sequence[CNIError]) -> CNIError:
    """Join refusals into one error. The error has code 11 if any refusal has code 11."""
    if len(refusals) == 1:
        return refusals[0]
    codes = [refusal.code for refusal in refusals]
    code = Code.TRY_AGAIN if Code.TRY_AGAIN in codes else max(codes)
    message = "; ".join(dict.fromkeys(refusal.message for refusal in refusals))
    refused = next((each for each in refusals if isinstance(each, NotAllowed)), None)
    if refused is None or code != Code.NOT_ALLOWED:
        return CNIError(code, message)
    return NotAllowed(message, refused.key, refused.value, refused.rules)


class Device(msgspec.Struct, frozen=True):
    """An HCA, and the pod's resources that have this HCA."""

    hca: HCA
    resources: frozenset[str] = frozenset()


class Allowance(msgspec.Struct, frozen=True):
    """The rules for the pod of an ADD. `left` has the rules that allow all values so far."""

    rules: Rules = (Policy().otherwise,)
    left: Rules = (Policy().otherwise,)

    def using(self, key: str, value: Any, what: str, shown: object) -> "Allowance":  # noqa: ANN401
        """Keep the rules that list `value` for the key `key` of `use`.

        Raises NotAllowed if no rule remains. The error text has the configuration's key `what` and
        the value `shown`.
        """
        left = tuple(rule for rule in self.left if _uses(rule, key, value))
        if not left:
            raise self._not_listed(what, shown, key)
        return Allowance(self.rules, left)

    def within(
        self, intervals: Sequence[Span], what: str, shown: Callable[[Span], str]
    ) -> "Allowance":
        """Like `using`, for intervals of addresses (see `_having`)."""
        left = _having(self.left, intervals)
        if left:
            return Allowance(self.rules, left)
        alone = (each for each in intervals if not _having(self.left, (each,)))
        raise self._not_listed(what, shown(next(alone, intervals[0])), "ranges")

    def may(self, key: str, value: int | str) -> bool:
        """Whether a rule for the pod allows this value of the option."""
        return any(
            rule.allowed.get(key, NOTHING).allows(value) or rule.fixed.get(key) == value
            for rule in self.rules
        )

    def require_option(self, key: str, value: int | str, what: str, shown: object) -> None:
        """Raise NotAllowed if no rule allows this value for the option (see `may`)."""
        if not self.may(key, value):
            raise self.not_settable(key, f'"{what}": {shown}', what)

    def require_match(self, *, match_device: bool, pf_only: bool = False) -> None:
        """Raise NotAllowed if no rule allows the value of `match_device`, or of `pfOnly`."""
        if not match_device:
            self.require_option("match_device", False, "match_device", "false")
        if pf_only:
            self.require_option("pfOnly", True, "pfOnly", "true")

    def not_settable(
        self, key: str, text: str, what: str, remedy: str = "use another value"
    ) -> NotAllowed:
        """The error for an option that no rule allows in `set`. The text begins with `text`."""
        return NotAllowed(
            f"{text} is not allowed for this namespace: no rule for it ({titled(self.rules)}) "
            f'lists it in "set.{key}": {remedy}, or ask the administrator',
            what,
            text,
            _titles(self.rules),
        )

    @property
    def host_paths(self) -> tuple[str, ...]:
        """Directories of the host whose files the definition may name."""
        return tuple(dict.fromkeys(path for rule in self.rules for path in rule.host_paths))

    @property
    def has_every_device(self) -> bool:
        """Whether every remaining rule lists all devices, so that no device must be checked."""
        return all(EVERY_DEVICE in rule.devices for rule in self.left)

    def fixed(self, key: str) -> Any:  # noqa: ANN401 - a value as a definition has it
        """The value of the option in the first remaining rule that fixes it, or `None`."""
        return next((rule.fixed[key] for rule in self.left if key in rule.fixed), None)

    def filled(self, written: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
        """The fixed value of each option in `keys` that the configuration does not set."""
        # An MTU of 0 means that the MTU is missing.
        present = {
            key
            for key, value in written.items()
            if value not in (None, "") and (value != 0 or key != "mtu")
        }
        fixed = {key: self.fixed(key) for key in keys if key not in present}
        return {key: value for key, value in fixed.items() if value is not None}

    def most(self, count: str) -> int | None:
        """The remaining rules' largest limit for `count`, or `None` if a rule has no limit."""
        if any(count not in rule.counts for rule in self.left):
            return None
        return max((rule.counts[count] for rule in self.left), default=None)

    def titles(self) -> tuple[str, ...]:
        return _titles(self.left)

    def _not_listed(self, what: str, shown: object, key: str) -> NotAllowed:
        return NotAllowed(
            f'"{what}": {shown} is not allowed for this namespace: no rule that allows the '
            f'other values of the attachment ({titled(self.left)}) lists it in "use.{key}": use '
            "another value, or ask the administrator",
            what,
            str(shown),
            _titles(self.left),
        )


def of_pod(policy: Policy, pod: Pod) -> Allowance:
    """The allowance of a pod's ADD. Raises CNIError 11 if the namespace's labels are unknown."""
    own = [rule for rule in policy.rules if rule.is_for(pod.namespace, policy.labels)]
    return _by(own or [policy.otherwise])


def of_anyone(policy: Policy) -> Allowance:
    """The allowance of all rules together, for a call without a pod, such as STATUS."""
    return _by([*policy.rules, policy.otherwise])


def _by(found: Iterable[Rule]) -> Allowance:
    every = tuple(sorted(found, key=lambda rule: rule.policy))
    return Allowance(every, every)


def _uses(rule: Rule, key: str, value: Any) -> bool:  # noqa: ANN401 - of any key
    """Whether the rule lists a value (a number, name, count or `Device`), or fixes it."""
    if key == "devices":
        # `match` without selectors would match every HCA.
        if rule.devices and selectors.match(rule.devices, value.hca) is not None:
            return True
        return any(map(rule.use.get("pools", NOTHING).allows, value.resources))
    if key in COUNTS:
        return bool(value <= rule.counts.get(key, value))
    if rule.use.get(key, NOTHING).allows(value):
        return True
    if key == "vlans":
        return bool(rule.fixed.get("vlan") == value)
    # The plugin ipoib makes every child interface a full member.
    pkey = rule.fixed.get("pkey") if key == "pkeys" else None
    return pkey is not None and value in (pkey, pkey | _FULL)


def titled(found: Rules) -> str:
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(_titles(found[:_SHOWN])) + more


def _having(found: Rules, intervals: Sequence[Span]) -> Rules:
    """The rules whose `ranges` contain each interval."""
    return tuple(
        rule
        for rule in found
        if all(rule.use.get("ranges", NOTHING).allows_all(*interval) for interval in intervals)
    )


def _titles(found: Rules) -> tuple[str, ...]:
    return tuple(rule.title for rule in found)
