"""The rules for one pod, of all rules of a node. A set of rules is a number, as in `RuleIndex`."""

from collections.abc import Sequence
from typing import Any

from base.pod import Pod
from cni.policy.document import Rule
from cni.policy.rule_index import RuleIndex
from cni.policy.subject_index import SubjectIndex
from cni.policy.subjects import CallingPod, Facts, Subjects
from cni.policy.value_index import bits
from cni.policy.values import Span

_TOLD = 8  # rules, in an error


class Ruleset:
    """All rules of a node, in the order in which they count."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.rules = sorted(rules, key=lambda rule: rule.policy)  # which keeps their order
        self.index = RuleIndex(self.rules)
        self._subjects = SubjectIndex(self.rules)

    def of(self, pod: Pod, subjects: Subjects) -> "PodRules | None":
        """The rules for a pod; None if there are none. CNIError 11 from `subjects`."""
        if not self.rules:
            return None
        facts = self._subjects.facts(pod.namespace)
        if facts == Facts():
            calling = CallingPod(namespace=pod.namespace, name=pod.name, uid=pod.uid)
        else:
            calling = subjects(pod, facts)
        matching, untold = self._subjects.matching(calling)
        return PodRules(self, matching, untold) if matching else None

    def whole(self) -> "PodRules":
        """All rules, for a call that is for no pod."""
        return PodRules(self, (1 << len(self.rules)) - 1)


class PodRules:
    """The rules for one pod: the set `every`. Other rules may be in the sets that are asked for."""

    def __init__(self, ruleset: Ruleset, every: int, untold: int = 0) -> None:
        self._ruleset = ruleset
        self._index = ruleset.index
        self._untold = untold
        self.every = every

    def allowing(self, key: str, value: Any) -> int:  # noqa: ANN401 - of any key
        """The rules whose `use` has this value, as `RuleIndex.using` takes it."""
        return self._index.using(key, value) & self.every

    def having(self, intervals: Sequence[Span]) -> int:
        """The rules within whose networks each interval lies."""
        found = self.every
        for first, last in intervals:
            found &= self._index.within(first, last)
            if not found:
                break
        return found

    def may_set(self, key: str, value: int | str) -> bool:
        """Whether one of the rules lets a definition set an option to this value."""
        return bool(self._index.setting(key, value) & self.every)

    def fixed(self, left: int, key: str) -> Any:  # noqa: ANN401 - a value as a definition has it
        """What the first of the rules left fixes for a key; None if none does."""
        first = next(bits(left & self._index.fixing(key)), None)
        return None if first is None else self._ruleset.rules[first].fixed[key]

    def most(self, left: int, count: str) -> int | None:
        """The largest limit that the rules left have for a count of `Use`; None without one."""
        return self._index.most(left, count)

    @property
    def rules(self) -> list[Rule]:
        """The rules, in their order."""
        return [self._ruleset.rules[number] for number in bits(self.every)]

    @property
    def host_paths(self) -> tuple[str, ...]:
        """The directories in which paths of definitions may be."""
        return self._index.host_paths(self.every)

    @property
    def blind(self) -> list[str]:
        """The titles of rules that look at what this node does not know."""
        return self.titles(self._untold)

    def titles(self, left: int) -> list[str]:
        """The names of a set of rules."""
        return [self._ruleset.rules[number].title for number in bits(left)]

    def shown(self, left: int) -> str:
        """The names of a set, for an error."""
        titles = self.titles(left)
        more = f" and {len(titles) - _TOLD} more" if len(titles) > _TOLD else ""
        return ", ".join(titles[:_TOLD]) + more
