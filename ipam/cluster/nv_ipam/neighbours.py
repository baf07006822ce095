"""What the other machines use of each pool, as this one read it last, and when to read it again."""

from collections.abc import Callable, Sequence
from typing import Protocol

from ipam.addresses import Interval
from ipam.cluster.nv_ipam.shares import OtherShare, Shares, common
from ipam.cluster.objects import AddressShare
from ipam.ranges import merged


class SharesWatch(Protocol):
    """All shares of a pool, as a watch shows them. It wakes the follower after a change."""

    def items(self) -> Sequence[AddressShare] | None:
        """As they were last seen; None before that."""

    def close(self) -> None:
        """Watch no more."""


class Neighbours:
    """The others' shares by pool. `watch` begins a watch of the shares of a pool."""

    def __init__(self, shares: Shares, watch: Callable[[str], SharesWatch]) -> None:
        self._shares = shares
        self._watch = watch
        self._others: dict[str, Sequence[OtherShare]] = {}
        self._watches: dict[str, SharesWatch] = {}  # of pools of which others block a part

    def of(self, key: str) -> Sequence[OtherShare]:
        """As they were read last."""
        return self._others.get(key, ())

    def intervals(self, key: str) -> tuple[Interval, ...]:
        """The addresses of all of them."""
        return _all_of(self.of(key))

    def read(self, key: str) -> None:
        """Read them now. Raises ApiError, and CNIError 6 for a share that cannot be read."""
        self._others[key] = self._shares.others(key)

    def blocked(self, key: str, entry: Sequence[Interval]) -> tuple[Interval, ...]:
        """What others use of the entry."""
        return common(entry, self.intervals(key))

    def has_news(self, key: str, entry: Sequence[Interval]) -> bool:
        """Whether the watch shows that others use another part of the entry than they did.

        A watch may be late, so that decides nothing: they are read again then. CNIError 6.
        """
        watch = self._watches.get(key)
        seen = watch.items() if watch is not None else None
        if seen is None:
            return False
        return common(entry, _all_of(self._shares.of_others(seen))) != self.blocked(key, entry)

    def keep_watch(self, key: str, *, is_blocked: bool) -> None:
        """Watch the pool as long as others use a part of the entry."""
        if is_blocked and key not in self._watches:
            self._watches[key] = self._watch(key)
        elif not is_blocked and key in self._watches:
            self._watches.pop(key).close()

    def forget(self, key: str) -> None:
        """The pool is not followed any more."""
        self._others.pop(key, None)
        self.keep_watch(key, is_blocked=False)

    def close(self) -> None:
        """Watch nothing any more."""
        for watch in tuple(self._watches.values()):
            watch.close()


def _all_of(shares: Sequence[OtherShare]) -> tuple[Interval, ...]:
    return merged(run for share in shares for run in share.intervals)
