"""What the other machines use of each pool, as this one read it last, and when to read it again."""

from collections.abc import Callable, Collection, Iterable, Sequence, Set
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


class LeasedElsewhere(Protocol):
    """What is leased of pools that overlap one: no share says it."""

    def is_due(self, key: str) -> bool:
        """Whether to read it again."""

    def read(self, key: str, runs: Sequence[Interval]) -> Sequence[OtherShare]:
        """What of these runs of the pool is leased now. ApiError."""


class NothingLeased:
    """Implements `LeasedElsewhere` where nodes lease nothing of nv-ipam's pools."""

    def is_due(self, key: str) -> bool:
        """Never."""
        return False

    def read(self, key: str, runs: Sequence[Interval]) -> Sequence[OtherShare]:
        """Nothing."""
        return ()


class Neighbours:
    """The others' shares by pool. `watch` begins a watch of the shares of a pool."""

    def __init__(
        self,
        shares: Shares,
        watch: Callable[[str], SharesWatch],
        leases: LeasedElsewhere | None = None,
    ) -> None:
        self._shares = shares
        self._watch = watch
        self._leases = leases or NothingLeased()
        self._leased: dict[str, Sequence[OtherShare]] = {}
        self._others: dict[str, Sequence[OtherShare]] = {}
        self._with: dict[str, frozenset[str]] = {}
        # By pool of which others block a part: of that pool, and of those that overlap it.
        self._watches: dict[str, dict[str, SharesWatch]] = {}

    def of(self, key: str) -> Sequence[OtherShare]:
        """As they were read last."""
        return (*self._others.get(key, ()), *self._leased.get(key, ()))

    def intervals(self, key: str) -> tuple[Interval, ...]:
        """The addresses of all of them."""
        return _all_of(self.of(key))

    def read(self, key: str, overlapping: Collection[str], entry: Sequence[Interval] = ()) -> None:
        """Read them now, also those of pools that overlap it, and what is leased of the entry.
        Raises ApiError, and CNIError 6 for a share that cannot be read."""
        self._others[key] = self._shares.others(key, overlapping)
        self._leased[key] = self._leases.read(key, entry)
        self._with[key] = frozenset(overlapping)

    def now(
        self, key: str, overlapping: Collection[str], runs: Sequence[Interval]
    ) -> Sequence[OtherShare]:
        """The same for other runs, which is not remembered."""
        return (*self._shares.others(key, overlapping), *self._leases.read(key, runs))

    def were_read_with(self, key: str, overlapping: Collection[str]) -> bool:
        """Whether these pools that overlap it were read, and no others."""
        return self._with.get(key, frozenset()) == frozenset(overlapping)

    def blocking(self, key: str, entry: Sequence[Interval]) -> set[str]:
        """The pools by which others use a part of the entry."""
        shares = self._others.get(key, ())
        return {each.pool for each in shares if common(entry, each.intervals)}

    def blocked(self, key: str, entry: Sequence[Interval]) -> tuple[Interval, ...]:
        """What others use of the entry."""
        return common(entry, self.intervals(key))

    def has_news(self, key: str, entry: Sequence[Interval]) -> bool:
        """Whether the watch shows that others use another part of the entry than they did.

        A watch may be late, so that decides nothing: they are read again then. CNIError 6.
        """
        if self._leases.is_due(key):
            return True
        for pool, watch in self._watches.get(key, {}).items():
            seen = watch.items()
            if seen is None:
                continue
            now = common(entry, _all_of(self._shares.of_others(key, seen)))
            read = (each for each in self._others.get(key, ()) if each.pool == pool)
            if now != common(entry, _all_of(read)):
                return True
        return False

    def keep_watch(self, key: str, blocking: Set[str]) -> None:
        """Watch these pools, by which others use a part of the entry, and no longer."""
        watches = self._watches.setdefault(key, {})
        for pool in blocking - watches.keys():
            watches[pool] = self._watch(pool)
        for pool in watches.keys() - blocking:
            watches.pop(pool).close()

    def forget(self, key: str) -> None:
        """The pool is not followed any more."""
        self._others.pop(key, None)
        self._leased.pop(key, None)
        self._with.pop(key, None)
        self.keep_watch(key, set())
        del self._watches[key]

    def close(self) -> None:
        """Watch nothing any more."""
        for watches in tuple(self._watches.values()):
            for watch in tuple(watches.values()):
                watch.close()


def _all_of(shares: Iterable[OtherShare]) -> tuple[Interval, ...]:
    return merged(run for share in shares for run in share.intervals)
