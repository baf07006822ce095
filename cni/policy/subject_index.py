"""Which rules are for a pod, by their subjects, without a look at each subject."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from cni.policy.document import LabelSelector, Rule
from cni.policy.subjects import CallingPod, Facts
from cni.policy.value_index import ValueIndex, bits
from cni.policy.values import EVERYTHING, Values


class SubjectIndex:
    """An index of the subjects of rules. Sets are numbers, as in `ValueIndex`."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        every = [
            (subject, 1 << number) for number, rule in enumerate(rules) for subject in rule.subjects
        ]
        plain = [
            (_all_if_none(subject.namespaces), rule)
            for subject, rule in every
            if subject.namespace_selector is None and subject.service_accounts is None
        ]
        self._plain = ValueIndex(plain)  # which look at the namespace's name alone: rules
        self._looking = [  # the others, which have numbers of their own below
            (subject, rule)
            for subject, rule in every
            if subject.namespace_selector is not None or subject.service_accounts is not None
        ]
        numbered = [(subject, 1 << at) for at, (subject, _) in enumerate(self._looking)]
        self._named = ValueIndex(
            (_all_if_none(subject.namespaces), number) for subject, number in numbered
        )
        self._accounts = ValueIndex(
            (_all_if_none(subject.service_accounts), number) for subject, number in numbered
        )
        self._labels = 0  # those that look at labels
        self._accountable = 0  # those that look at service accounts
        self._by_label: dict[tuple[str, str], int] = defaultdict(int)
        self._by_no_label = 0
        for subject, number in numbered:
            selector = subject.namespace_selector
            self._labels |= number if selector is not None else 0
            self._accountable |= number if subject.service_accounts is not None else 0
            needed = [] if selector is None else _needed(selector)
            for label in needed:
                self._by_label[label] |= number
            self._by_no_label |= 0 if needed else number

    def facts(self, namespace: str) -> Facts:
        """What of the API server the rules look at that may be for pods of a namespace."""
        named = self._named.having(namespace)
        return Facts(
            labels=bool(named & self._labels), service_account=bool(named & self._accountable)
        )

    def matching(self, pod: CallingPod) -> tuple[int, int]:
        """The rules for a pod, and those of which this node cannot tell: it does not know what they
        look at.
        """
        found, untold = self._plain.having(pod.namespace), 0
        left, unknown = self._named.having(pod.namespace), 0
        if pod.labels is None:
            unknown |= self._labels
        else:
            left &= self._with_labels(pod.labels)
        if pod.service_account is None:
            unknown |= self._accountable
        else:
            left &= self._accounts.having(pod.service_account)
        for number in bits(left):
            subject, rule = self._looking[number]
            selector = subject.namespace_selector
            if selector is not None and pod.labels is not None and not selector.selects(pod.labels):
                continue
            if unknown >> number & 1:
                untold |= rule
            else:
                found |= rule
        return found, untold & ~found

    def _with_labels(self, labels: Mapping[str, str]) -> int:
        """The subjects that such labels may match."""
        found = self._by_no_label
        for label in labels.items():
            found |= self._by_label.get(label, 0)
        return found


def _all_if_none(values: Values | None) -> Values:
    return EVERYTHING if values is None else values


def _needed(selector: LabelSelector) -> list[tuple[str, str]]:
    """Labels of which a namespace has one if the selector matches it; [] if it need not."""
    for requirement in selector.requirements:
        if requirement.operator == "In":
            return [(requirement.key, value) for value in requirement.values]
    return []
