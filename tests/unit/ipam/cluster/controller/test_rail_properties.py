"""Any pools with rails, shared and private: no two that nodes may lease from give one address
twice. The oracle counts address by address."""

from collections.abc import Iterable, Mapping
from itertools import combinations
from typing import Any, NamedTuple

import hypothesis.strategies as st
from hypothesis import HealthCheck, event, given, settings
from msgspec.structs import replace

from ipam.addresses import parse, parse_interface, text
from ipam.cluster import geometry
from ipam.cluster.controller import pool_conditions
from ipam.cluster.controller.block_index import BlockIndex
from ipam.cluster.controller.plans import plans
from ipam.cluster.controller.ranged import Plan
from ipam.cluster.names import pool_name
from ipam.cluster.objects import (
    AddressBlock,
    AddressPool,
    BlockSpec,
    Holder,
    Meta,
    PoolSpec,
    PoolStatus,
)
from ipam.cluster.rails import Rails

BASE = parse_interface("10.0.0.0/24")[0]
LAST_REASONS = {"BlockSizeDiffers", "PrivateBlocks", "RailsOverlap", "RailsInUse"}


def _networks(draw: st.DrawFn, prefix: int, least: int, most: int) -> tuple[str, ...]:
    size = 1 << (32 - prefix)
    places = st.integers(0, 64 // size - 1)
    drawn = draw(st.lists(places, min_size=least, max_size=most, unique=True))
    return tuple(f"{text(BASE + place * size)}/{prefix}" for place in drawn)


@st.composite
def _pools(draw: st.DrawFn) -> list[AddressPool]:
    """Pools of two network names in 64 addresses; each range has one pool, as on the API server."""
    pools: dict[str, AddressPool] = {}
    for number in range(draw(st.integers(2, 6))):
        range_, *rails = _networks(draw, draw(st.sampled_from([27, 28, 28, 29])), 1, 3)
        name, shared = draw(st.sampled_from(["", "", "blue"])), draw(st.booleans())
        key = pool_name(name, range_, shared=shared)
        pools[key] = AddressPool(
            metadata=Meta(
                name=key, uid=str(number), creation_timestamp=str(draw(st.integers(0, 3)))
            ),
            spec=PoolSpec(
                range=range_,
                network_name=name,
                shared=shared,
                rails=tuple(rails) if draw(st.booleans()) else (),
                block_size=draw(st.sampled_from([0, 0, 2, 4])),
            ),
        )
    return list(pools.values())


class Leased(NamedTuple):
    """A block, and the addresses of the pool that it was leased from."""

    block: AddressBlock
    networks: frozenset[str]
    private: bool

    @property
    def addresses(self) -> set[int]:
        size = 1 << (32 - self.block.spec.prefix)
        firsts = (self.block.spec.first, *self.block.spec.rails)
        return {parse(each) + offset for each in firsts for offset in range(size)}


class Controller:
    """Rounds of the controller, and nodes that lease, with nothing else."""

    def __init__(self) -> None:
        self.pools: dict[str, AddressPool] = {}
        self.leased: dict[str, Leased] = {}
        self.quiet: set[str] = set()
        self.planned: Mapping[str, Plan] = {}

    def round(self) -> None:
        index = BlockIndex(each.block for each in self.leased.values())
        self.planned = plans(self.pools.values(), index, 8, self.quiet)
        for name, plan in self.planned.items():
            ready = pool_conditions.ready(plan.reason, plan.message, is_true=plan.ready)
            status = PoolStatus(
                space=plan.space,
                block_size=plan.block_size,
                rail_of=plan.rail_of,
                conditions=(ready,),
            )
            self.pools[name] = replace(self.pools[name], status=status)
        self.quiet = {name for name, plan in self.planned.items() if not plan.ready}

    def leasing(self, name: str) -> AddressPool | None:
        """The pool that a node leases from which wants an address of this one; None if it waits."""
        pool = self.pools.get(name)
        if pool is not None and pool.status.rail_of:
            pool = self.pools.get(pool.status.rail_of)
        if pool is None or pool.status.rail_of or not pool.status.block_size:
            return None
        return pool if pool_conditions.is_ready(pool) else None

    def lease(self, name: str, place: float) -> None:
        """A node leases the block at that part of the pool, if it is free."""
        pool = self.leasing(name)
        cut = None if pool is None else geometry.of_pool(pool)
        if pool is None or cut is None:
            return
        index = int(place * cut.total)
        rails = Rails.of(pool.spec)
        spec = BlockSpec(
            pool=pool.metadata.name,
            space=pool.status.space,
            first=text(cut.block(index).first),
            prefix=cut.prefix,
            rails=tuple(map(text, rails.firsts(cut.block(index).first))),
            holder=Holder(instance="store", node="node"),
        )
        key = cut.name(pool.status.space, index)
        made = AddressBlock(metadata=Meta(name=key), spec=spec)
        private = not pool.spec.shared
        self.leased.setdefault(key, Leased(made, frozenset(_ranges(pool)), private))

    def locks(self, name: str) -> dict[int, str]:
        """Which block a node must lease to give out each address of the pool's network."""
        pool, leasing = self.pools[name], self.leasing(name)
        cut = None if leasing is None else geometry.of_pool(leasing)
        if leasing is None or cut is None:
            return {}
        rails = Rails.of(leasing.spec)
        rail = parse_interface(pool.spec.range)[1]
        assert rail in rails.networks
        return {
            rail.address + index: cut.name(leasing.status.space, index // cut.block_size)
            for index in range(rail.last - rail.address + 1)
        }


def _ranges(pool: AddressPool) -> tuple[str, ...]:
    return (pool.spec.range, *pool.spec.rails)


def _share(one: AddressPool, other: AddressPool) -> bool:
    """Whether an address of both pools is unique in both, as docs/ipam.md and controller.md say."""
    if one.spec.network_name != other.spec.network_name:
        return False
    if one.spec.shared and other.spec.shared:
        return True
    if one.spec.shared == other.spec.shared:
        return one.spec.range == other.spec.range
    private, shared = (other, one) if one.spec.shared else (one, other)
    return private.spec.range in _ranges(shared)


def _require_one_lock(controller: Controller) -> None:
    """Pools that share their addresses have one lock for each."""
    ready = [name for name in controller.pools if controller.leasing(name) is not None]
    for one, other in combinations(ready, 2):
        if _share(controller.pools[one], controller.pools[other]):
            some, others = controller.locks(one), controller.locks(other)
            for address in some.keys() & others.keys():
                assert some[address] == others[address], (one, other, text(address))
    for name in ready:
        pool = controller.pools[name]
        for rail in pool.spec.rails:  # which may have no pool of its own
            network = parse_interface(rail)[1]
            for other in ready:
                if other != name and _share(pool, controller.pools[other]):
                    here = set(controller.locks(other)) & set(
                        range(network.address, network.last + 1)
                    )
                    leasing = controller.leasing(other)
                    assert not here or leasing is controller.pools[name], (name, other)


def _require_apart(leased: Iterable[Leased]) -> None:
    """No address is in two blocks, unless one of them is private and apart."""
    for one, other in combinations(leased, 2):
        if one.block.spec.space.partition("-")[0] != other.block.spec.space.partition("-")[0]:
            continue
        if one.private == other.private:
            share = not one.private or one.networks == other.networks
        else:
            private, shared = (one, other) if one.private else (other, one)
            share = private.networks <= shared.networks
        if share:
            assert not one.addresses & other.addresses, (one.block.metadata, other.block.metadata)


@settings(
    max_examples=400,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(_pools(), st.data())
def test_no_address_of_pools_that_share_is_leased_twice(
    pools: list[AddressPool],
    data: Any,  # noqa: ANN401 - its draw() is of a type that depends on the strategy
) -> None:
    """Pools come and go, also with blocks; nodes lease and give back."""
    controller = Controller()
    for pool in pools:
        controller.pools[pool.metadata.name] = pool
        for _ in range(data.draw(st.integers(1, 4))):
            controller.round()
            _require_one_lock(controller)
            act = data.draw(st.sampled_from(["lease", "lease", "lease", "return", "delete", ""]))
            names = sorted(controller.pools)
            if act == "lease":
                where = data.draw(st.sampled_from([0.0, 0.0, 0.5]))
                controller.lease(data.draw(st.sampled_from(names)), where)
            elif act == "return" and controller.leased:
                del controller.leased[data.draw(st.sampled_from(sorted(controller.leased)))]
            elif act == "delete" and len(names) > 1:
                del controller.pools[data.draw(st.sampled_from(names))]
            _require_apart(controller.leased.values())
    for _ in range(6):
        controller.round()
        _require_one_lock(controller)
    for plan in controller.planned.values():
        event(plan.reason)
        assert plan.ready or plan.reason in LAST_REASONS, "a change comes to its end"
    before = controller.planned
    controller.round()
    assert controller.planned == before
