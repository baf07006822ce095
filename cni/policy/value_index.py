"""Which of many lists of values have a value, without a look at each list.

Sets are numbers: bit i stands for the list, or the rule, with number i. The time of a search hardly
depends on how many lists there are, and many a list is of another tenant.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import islice

from cni.policy.values import Values, fits


def bits(numbers: int) -> Iterator[int]:
    """The numbers in a set, from the lowest."""
    while numbers:
        lowest = numbers & -numbers
        yield lowest.bit_length() - 1
        numbers ^= lowest


class ValueIndex:
    """An index of lists, each with the set that its values lead to.

    Where several lists lead to the same bit, their numbers must not overlap (`values.union`).
    """

    def __init__(self, lists: Iterable[tuple[Values, int]]) -> None:
        self._any = 0
        self._names: dict[str, int] = defaultdict(int)
        patterns: dict[str, int] = defaultdict(int)
        changes: dict[int, int] = defaultdict(int)
        for values, numbers in lists:
            if values.any:
                self._any |= numbers
            for name in values.names:
                of = patterns if _fixed_length(name) < len(name) else self._names
                of[name] |= numbers
            for first, last in values.spans:
                changes[first] ^= numbers
                changes[last + 1] ^= numbers
        # Patterns by their text before the first "*" or "?", and the lengths of these texts.
        self._patterns: dict[str, list[tuple[str, int]]] = defaultdict(list)
        for pattern, numbers in patterns.items():
            self._patterns[pattern[: _fixed_length(pattern)]].append((pattern, numbers))
        self._lengths = sorted({len(start) for start in self._patterns})
        # From each of `_starts` to the next one, all numbers are in the same lists.
        self._starts = sorted(changes)
        self._within: list[int] = []
        within = 0
        for start in self._starts:
            within ^= changes[start]
            self._within.append(within)

    def having(self, value: int | str) -> int:
        """The lists that have a number, a boolean or a name, as `Values.allows`."""
        if not isinstance(value, str):
            at = bisect_right(self._starts, value) - 1
            return self._any | self._within[at] if at >= 0 else self._any
        found = self._any | self._names.get(value, 0)
        for length in self._lengths:
            if length > len(value):
                break
            for pattern, numbers in self._patterns.get(value[:length], ()):
                if numbers & ~found and fits(pattern, value):
                    found |= numbers
        return found

    def having_all(self, first: int, last: int) -> int:
        """The lists that have all numbers from `first` to `last`, as `Values.allows_all`."""
        at = bisect_right(self._starts, first) - 1
        if at < 0:
            return self._any
        found = self._within[at]
        for within in islice(self._within, at + 1, bisect_right(self._starts, last)):
            found &= within
            if not found:
                break
        return self._any | found


def _fixed_length(pattern: str) -> int:
    """How many characters are before the first "*" or "?"; all of them, if there is none."""
    ends = (pattern.find(each) for each in "*?")
    return min((end for end in ends if end >= 0), default=len(pattern))
