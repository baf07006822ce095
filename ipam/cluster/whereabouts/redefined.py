"""Sees soon that whereabouts may look for our addresses in IPPools without placeholders.

Ranges that overlap a block of ours come with definitions, of which podfabric's controller makes
AddressPools, and slices go from node to node. Both are followed while a block of this node is
used beside whereabouts (`Coexist`). What a watch shows is a hint: a confirmation looks again.
"""

from collections.abc import Mapping, Sequence

from ipam.cluster import geometry
from ipam.cluster.api import ClusterApi, NotFound
from ipam.cluster.controller.mirror import KIND_EVERY, Mirror
from ipam.cluster.objects import AddressBlock, AddressPool
from ipam.cluster.pools import Pools
from ipam.cluster.whereabouts.objects import NodeSlicePool
from ipam.cluster.whereabouts.placeholders import meet, pools_beside
from ipam.cluster.whereabouts.slices import given


class _SlicePools(Mirror[NodeSlicePool]):
    """All NodeSlicePools; whereabouts before 0.9 has none."""

    def _follow(self) -> None:
        try:
            super()._follow()
        except NotFound:
            self._closed.wait(KIND_EVERY)


class Redefined:
    """For one thread, but for `_note`. `objects` are the lessee's blocks as they were last seen."""

    def __init__(self, api: ClusterApi, pools: Pools, objects: Mapping[str, AddressBlock]) -> None:
        self._api = api
        self._pools = pools
        self._objects = objects
        self._mirrors: tuple[Mirror[AddressPool], _SlicePools] | None = None
        self._has_news = False
        self._seen: Mapping[str, object] = {}

    def follow(self) -> None:
        """Follow from now on, in threads of its own, if a block is used beside whereabouts."""
        if self._mirrors is None and self._coexisting():
            self._mirrors = (
                Mirror(self._api, AddressPool, self._note),
                _SlicePools(self._api, NodeSlicePool, self._note),
            )

    def close(self) -> None:
        """Follow nothing any more."""
        for mirror in self._mirrors or ():
            mirror.close()

    def has_changed(self) -> bool:
        """Whether a block lies in other ranges or slices than at the last call. A block that is new
        does: what its claim saw may be over."""
        if self._mirrors is None or not (self._has_news or self._is_new()):
            return False
        self._has_news = False  # before the look: what comes meanwhile counts for the next call
        mirrored, slices = self._mirrors
        pools = mirrored.items()
        if pools is None:  # not listed yet
            return False
        before, self._seen = self._seen, self._looked(pools, slices.items() or ())
        return any(before.get(name) != each for name, each in self._seen.items())

    def _note(self) -> None:
        self._has_news = True

    def _coexisting(self) -> Mapping[str, AddressBlock]:
        blocks = self._objects.items()
        return {name: each for name, each in blocks if each.spec.compat == "Coexist"}

    def _is_new(self) -> bool:
        return not self._coexisting().keys() <= self._seen.keys()

    def _looked(
        self, all_pools: Sequence[AddressPool], all_slices: Sequence[NodeSlicePool]
    ) -> Mapping[str, object]:
        """Which ranges and slices each block lies in."""
        ranges: dict[str, object] = {}  # by the pool's name
        found: dict[str, object] = {}
        for name, block in self._coexisting().items():
            pool = self._pools.of_block(block)
            if pool is None:
                found[name] = None
                continue
            if pool.metadata.name not in ranges:
                ranges[pool.metadata.name] = {
                    each.metadata.uid: (each.spec, each.status.space)
                    for each in pools_beside(pool, all_pools)
                }
            interval = geometry.interval(block)
            cut = {each for each in given(pool, all_slices) if meet(each.interval, interval)}
            found[name] = ranges[pool.metadata.name], cut
        return found
