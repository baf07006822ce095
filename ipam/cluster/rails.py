"""Rails: networks of equal size on which a pod has the same index, leased together.

The addresses of a pool with rails are named by those of its `range`: a block of index 64 to 95
there is the lease of the same indexes on every rail.
"""

from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from ipam.addresses import Interval, Network, parse_interface
from ipam.cluster.objects import PoolSpec
from ipam.cluster.wants import Want
from ipam.ranges import Range, merged


class Rails(msgspec.Struct, frozen=True):
    """The networks of a pool: its range first, which names all blocks."""

    networks: tuple[Network, ...]

    @classmethod
    def of(cls, spec: PoolSpec) -> "Rails":
        """Those of a pool. ValueError: one is not a network, or has another size than the range."""
        rails = cls(tuple(parse_interface(each)[1] for each in (spec.range, *spec.rails)))
        for written, rail in zip(spec.rails, rails.networks[1:], strict=True):
            if (rail.prefix, rail.family_prefix) != (rails.main.prefix, rails.main.family_prefix):
                raise ValueError(f"rail {written} is not of the size of {spec.range}")
        return rails

    @classmethod
    def readable(cls, spec: PoolSpec) -> "Rails":
        """The same; only the range if the rails are not right, for which the pool is refused.
        ValueError: the range is not a network."""
        try:
            return cls.of(spec)
        except ValueError:
            return cls((parse_interface(spec.range)[1],))

    @property
    def main(self) -> Network:
        """The pool's range."""
        return self.networks[0]

    @property
    def others(self) -> tuple[Network, ...]:
        """All but the pool's range."""
        return self.networks[1:]

    @property
    def intervals(self) -> tuple[Interval, ...]:
        """The addresses of each."""
        return tuple(Interval(each.address, each.last) for each in self.networks)

    def firsts(self, first: int) -> tuple[int, ...]:
        """The first addresses on the other rails of a block that begins at `first`."""
        return tuple(each.address + first - self.main.address for each in self.others)

    def on_main(self, interval: Interval) -> Interval:
        """The range's addresses of the same indexes; the interval itself if no rail has it."""
        rail = next((each for each in self.networks if interval.first in each), self.main)
        moved = self.main.address - rail.address
        return Interval(interval.first + moved, interval.last + moved)

    def all_on_main(self, intervals: Iterable[Interval]) -> tuple[Interval, ...]:
        """The indexes that the intervals have on any rail, as addresses of the range."""
        return merged(map(self.on_main, intervals))

    def sought(self, want: Want) -> Want | None:
        """What is wanted, as addresses of the range; None if it is wanted of no rail."""
        if want.pool[1] == self.main:
            return want
        if want.pool[1] not in self.others:
            return None
        range_ = want.range
        first, last = self.on_main(Interval(range_.first, range_.last))
        moved: Range = replace(
            range_, network=self.main, first=first, last=last, excluded=(), gateway=None
        )
        moved = moved.restricted(map(self.on_main, range_.parts))
        return Want(moved, (want.pool[0], self.main), want.fixed, want.sticky)
