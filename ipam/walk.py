"""A walk over addresses that remembers what it has passed.

A definition may have hundreds of ranges over the same addresses, and they are searched under the
store's lock. So a stretch that the search of one range has passed costs the other ranges one step.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable


class Walk:
    """Finds the next address that fits.

    `passed(address, last)` answers the end of a stretch from `address` on that does not fit, None
    if `address` fits. It may stop at `last`. Its answers must not change as long as the walk lives.
    """

    def __init__(self, passed: Callable[[int, int], int | None]) -> None:
        self._passed = passed
        # Stretches that do not fit: they are sorted, and neither overlap nor touch.
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        self._fitting: set[int] = set()

    def next(self, address: int, last: int) -> int:
        """The lowest address from `address` on that fits; behind `last` if none up to it does."""
        cursor = self._behind(address)
        while cursor <= last and cursor not in self._fitting:
            end = self._passed(cursor, last)
            if end is None:
                self._fitting.add(cursor)
                break
            cursor = self._behind(end + 1)
        if cursor > address:
            self._remember(address, cursor - 1)
        return cursor

    def _behind(self, address: int) -> int:
        """The first address from `address` on that is in no remembered stretch."""
        index = bisect_right(self._firsts, address) - 1
        if index >= 0 and self._lasts[index] >= address:
            return self._lasts[index] + 1
        return address

    def _remember(self, first: int, last: int) -> None:
        begin = bisect_left(self._lasts, first - 1)
        end = bisect_right(self._firsts, last + 1)
        if begin < end:
            first = min(first, self._firsts[begin])
            last = max(last, self._lasts[end - 1])
        self._firsts[begin:end] = [first]
        self._lasts[begin:end] = [last]
