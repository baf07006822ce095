"""Which rules allow a value: the index of a node's rules, made once for as long as they stay.

A set of rules is a number with a bit for each of them, as in `ValueIndex`.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from cni.policy import values
from cni.policy.device_index import DeviceIndex
from cni.policy.document import COUNTS, SETTABLE, USE, Rule
from cni.policy.value_index import ValueIndex
from cni.policy.values import NOTHING, Span, Values

_FULL = 0x8000  # a P_Key's bit of a full member


class RuleIndex:
    """An index of rules. Calls share it: it does not change, but for what it keeps of devices."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        numbered = [(rule, 1 << number) for number, rule in enumerate(rules)]
        self._uses = {
            key: ValueIndex((_used(rule, key, name), number) for rule, number in numbered)
            for key, (name, _) in USE.items()
        }
        self._options = {
            key: ValueIndex((_settable(rule, key), number) for rule, number in numbered)
            for key in SETTABLE.keys() | {key for rule in rules for key in rule.fixed}
        }
        self._devices = DeviceIndex((rule.use, number) for rule, number in numbered)
        self._limits: dict[str, dict[int | None, int]] = {}
        for name in COUNTS.values():
            limits = self._limits[name] = defaultdict(int)
            for rule, number in numbered:
                limits[getattr(rule.use, name)] |= number
        self._fixing: dict[str, int] = defaultdict(int)
        for rule, number in numbered:
            for key in rule.fixed:
                self._fixing[key] |= number
        self._host_paths = [(rule.host_paths, number) for rule, number in numbered]
        self._host_paths = [each for each in self._host_paths if each[0]]

    def using(self, key: str, value: Any) -> int:  # noqa: ANN401 - of any key
        """The rules whose `use` has a value: a number or name, a count, or a `Device`."""
        if key == "devices":
            return self._devices.having(value)
        if key in COUNTS:
            limits = self._limits[COUNTS[key]].items()
            return sum(number for most, number in limits if most is None or value <= most)
        return self._uses[key].having(value)

    def within(self, first: int, last: int) -> int:
        """The rules that have a network with all addresses from `first` to `last`."""
        return self._uses["ranges"].having_all(first, last)

    def setting(self, key: str, value: int | str) -> int:
        """The rules that let a definition set an option to a value, or fix it."""
        options = self._options.get(key)
        return options.having(value) if options is not None else 0

    def fixing(self, key: str) -> int:
        """The rules that fix an option."""
        return self._fixing.get(key, 0)

    def most(self, rules: int, count: str) -> int | None:
        """The largest limit that some of the rules have for a count of `Use`; None without one."""
        limits = [most for most, numbers in self._limits[count].items() if numbers & rules]
        return None if None in limits else max(most for most in limits if most is not None)

    def host_paths(self, rules: int) -> tuple[str, ...]:
        """The directories that some of the rules list."""
        listed = (paths for paths, number in self._host_paths if number & rules)
        return tuple(dict.fromkeys(path for paths in listed for path in paths))


def _used(rule: Rule, key: str, name: str) -> Values:
    """What a rule's `use` has of a key. What it fixes it allows."""
    listed: Values = getattr(rule.use, name)
    spans: list[Span] = []
    if key == "vlans" and "vlan" in rule.fixed:
        spans = [(rule.fixed["vlan"],) * 2]
    if key == "pkeys" and "pkey" in rule.fixed:
        # The plugin ipoib makes full members of all children.
        spans = [(pkey, pkey) for pkey in (rule.fixed["pkey"], rule.fixed["pkey"] | _FULL)]
    return values.union(listed, Values(spans=tuple(spans)))


def _settable(rule: Rule, key: str) -> Values:
    """What a rule lets a definition set an option to. What it fixes it allows."""
    listed, fixed = rule.allowed.get(key, NOTHING), rule.fixed.get(key)
    if fixed is None:
        return listed
    one = Values(names=(fixed,)) if isinstance(fixed, str) else Values(spans=((fixed, fixed),))
    return values.union(listed, one)
