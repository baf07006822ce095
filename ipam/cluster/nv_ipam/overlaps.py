"""Pools of nv-ipam whose addresses overlap, which nv-ipam gives twice.

The older pool has the addresses that both could give: by the younger one no pod gets them. What
pods hold by the younger one already, as it came to overlap later, is in shares; so nodes read the
shares of all pools that overlap one before they use more of it.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ipam.addresses import Interval
from ipam.cluster.nv_ipam.objects import Invalid, NvPool, excluded_runs
from ipam.cluster.nv_ipam.shares import common, without
from ipam.cluster.objects import GROUP
from ipam.ranges import merged

PRIVATE = f"{GROUP}/private"
"""The annotation ("true") of a pool whose network is apart from all others: its addresses are
unique within the pool only."""


class OlderPool(NamedTuple):
    """A pool, and its addresses that a younger one leaves to it."""

    key: str
    runs: tuple[Interval, ...]


class Overlaps:
    """Which of these pools overlap. Of two, the older one was made first; within a second it is the
    one whose key is first."""

    def __init__(self, pools: Iterable[NvPool] = ()) -> None:
        self._others: dict[str, tuple[str, ...]] = {}
        self._older: dict[str, tuple[OlderPool, ...]] = {}
        pools = tuple(pools)
        self._private = {pool.key for pool in pools if _is_private(pool)}
        spans = [each for pool in pools if (each := _span(pool)) is not None]
        self._runs = {each.key: each.runs for each in spans}
        self._whole = {each.key: each.whole for each in spans}
        spans.sort(key=lambda each: (each.made, each.key))
        for index, young in enumerate(spans):
            for old in spans[:index]:
                if old.whole.first <= young.whole.last and young.whole.first <= old.whole.last:
                    left = OlderPool(old.key, common((young.whole,), old.runs))
                    self._older[young.key] = (*self._older.get(young.key, ()), left)
                    for one, other in ((young.key, old.key), (old.key, young.key)):
                        self._others[one] = (*self._others.get(one, ()), other)

    def of(self, key: str, before: Iterable[str]) -> tuple[str, ...]:
        """The pools that overlap it, and those of `before` that did: they may be gone, or have
        another range now, while their pods run."""
        if key in self._private:
            return ()
        return tuple(sorted({*self._others.get(key, ()), *before} - self._private))

    def is_private(self, key: str) -> bool:
        """Whether its addresses are unique within that pool only."""
        return key in self._private

    def given(self, key: str, runs: Sequence[Interval]) -> tuple[Interval, ...]:
        """What of the runs it gives to pods, be they asked for: where it overlaps others, no
        address that it excludes. So two pools may divide a subnet by their exclusions."""
        return common(runs, self._runs[key]) if key in self._others else tuple(runs)

    def older(self, key: str, runs: Sequence[Interval]) -> tuple[str, ...]:
        """The older pools that have addresses of these runs."""
        return tuple(each.key for each in self._older.get(key, ()) if common(runs, each.runs))

    def part(self, key: str) -> tuple[Interval, ...]:
        """All that it may give: what it does not exclude, and no older pool has. Nothing of one
        that overlaps none."""
        return self.left_by(key, self._runs[key]) if key in self._others else ()

    def now(self, key: str) -> tuple[Interval, ...]:
        """All that it may give: of one that overlaps none, all of it."""
        whole = self._whole.get(key)
        if key in self._others or whole is None:
            return self.part(key)
        return (whole,)

    def meets(self, key: str, runs: Sequence[Interval]) -> bool:
        """Whether an address of these runs is in its range. A private pool meets none."""
        return key in self._whole and bool(common(runs, (self._whole[key],)))

    def left_to(self, key: str) -> tuple[OlderPool, ...]:
        """What of the pool each older one has."""
        return self._older.get(key, ())

    def of_older(self, key: str) -> tuple[Interval, ...]:
        """What of the pool older ones have."""
        return merged(run for each in self._older.get(key, ()) for run in each.runs)

    def left_by(self, key: str, runs: Sequence[Interval]) -> tuple[Interval, ...]:
        """What of the runs it may give: no address of an older pool."""
        return without(runs, self.of_older(key)) if key in self._older else tuple(runs)


class _Span(NamedTuple):
    """The addresses of a pool: all, and those that it may give."""

    made: str
    key: str
    whole: Interval
    runs: tuple[Interval, ...]


def _is_private(pool: NvPool) -> bool:
    return pool.metadata.annotations.get(PRIVATE) == "true"


def _span(pool: NvPool) -> _Span | None:
    """None of a private pool, and of one whose range cannot be read: nothing of it is given."""
    if _is_private(pool):
        return None
    try:
        network = pool.network
    except Invalid:
        return None
    whole = Interval(network.address, network.last)
    try:
        holes = excluded_runs(pool)
    except Invalid:
        holes = []
    return _Span(pool.metadata.creation_timestamp, pool.key, whole, without((whole,), holes))
