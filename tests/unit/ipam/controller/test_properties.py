"""Properties of any pools and blocks, compared with counting address by address."""

from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, given, settings

from ipam.addresses import parse_interface, text
from ipam.controller.block_index import BlockIndex
from ipam.controller.block_sizes import Plan, plans
from ipam.controller.pool_status import Told, condition, status
from ipam.leases import block_layout
from ipam.leases.block_layout import Geometry
from ipam.leases.objects import AddressBlock, AddressPool, BlockSpec, Holder, PoolSpec, PoolStatus
from kube.resources import Meta

QUICK = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
BASE = "10.0.0.0"


def _block(space: str, cut: Geometry, index: int) -> AddressBlock:
    holder = Holder(instance="store", node="node")
    spec = BlockSpec(pool="pool", range=cut.written(index), holder=holder)
    return AddressBlock(metadata=Meta(name=cut.name(space, index)), spec=spec)


@st.composite
def _leased_pools(draw: st.DrawFn) -> tuple[AddressPool, Geometry, set[int]]:
    prefix = draw(st.integers(24, 29))
    size = 1 << draw(st.integers(0, 32 - prefix))
    cut = Geometry(parse_interface(f"{BASE}/{prefix}")[1], size)
    leased = draw(st.sets(st.integers(0, cut.total - 1)))
    base, addresses = cut.range.address, (1 << (32 - prefix))
    bounds = st.tuples(st.integers(0, addresses - 1), st.integers(0, 40))
    exclude = tuple(
        f"{text(base + first)}-{text(base + first + length)}"
        for first, length in draw(st.lists(bounds, max_size=4))
    )
    spec = PoolSpec(range=f"{BASE}/{prefix}", exclude=exclude)
    return AddressPool(metadata=Meta(name="pool"), spec=spec), cut, leased


@QUICK
@given(_leased_pools())
def test_counts_are_those_of_counting_one_by_one(
    given_: tuple[AddressPool, Geometry, set[int]],
) -> None:
    pool, cut, leased = given_
    blocks = [_block("default", cut, index) for index in leased]
    plan = Plan(space="default", block_size=cut.block_size)
    made = status(pool, plan, BlockIndex(blocks), (), Told(), "now")

    excluded: set[int] = {cut.range.address, cut.range.last}
    for written in pool.spec.exclude:
        first, last = (parse_interface(f"{each}/32")[0] for each in written.split("-"))
        excluded |= set(range(first, last + 1))
    usable = set(range(cut.range.address, cut.range.last + 1)) - excluded
    free = {cut.index(address) for address in usable} - leased
    exhausted = {each.type: each.status for each in made.conditions}["Exhausted"]
    assert made.addresses.capacity == len(usable)
    assert made.blocks.leased == len(leased)
    assert (exhausted == "True") == (not free)
    assert made.free_map == block_layout.free_map(leased, cut.total)


@st.composite
def _pools(draw: st.DrawFn) -> list[AddressPool]:
    """Pools that may overlap, some of them decided, as other controllers may have left them."""
    pools = []
    for number in range(draw(st.integers(1, 6))):
        prefix = draw(st.integers(20, 28))
        offset = draw(st.integers(0, 7)) << (32 - prefix)
        cidr = f"{text(parse_interface(f'{BASE}/16')[0] + offset)}/{prefix}"
        shared = draw(st.booleans())
        written = draw(st.sampled_from([0, 0, 0, 4, 16, 64]))
        pools.append(
            AddressPool(
                metadata=Meta(
                    name=f"pool-{number}",
                    uid=str(number),
                    creation_timestamp=str(draw(st.integers(0, 3))),
                ),
                spec=PoolSpec(range=cidr, shared=shared, block_size=written),
            )
        )
    return pools


@QUICK
@given(_pools(), st.data())
def test_equal_addresses_of_ready_pools_have_equal_names(
    pools: list[AddressPool],
    data: Any,  # noqa: ANN401 - its draw() is of a type that depends on the strategy
) -> None:
    """Also when pools come one after the other, and nodes lease and return blocks meanwhile."""
    present: list[AddressPool] = []
    blocks: dict[str, AddressBlock] = {}
    for pool in pools:
        present.append(pool)
        for _ in range(data.draw(st.integers(1, 3))):
            planned = plans(present, BlockIndex(blocks.values()), 8)
            _require_equal_names(present, planned)
            present = [_as_planned(each, planned[each.metadata.name]) for each in present]
            ready = [each for each in present if planned[each.metadata.name].ready]
            if ready and data.draw(st.booleans()):
                block = _first_block(data.draw(st.sampled_from(ready)))
                blocks[block.metadata.name] = block
            elif blocks and data.draw(st.booleans()):
                del blocks[data.draw(st.sampled_from(sorted(blocks)))]
        assert not list(BlockIndex(blocks.values()).neighbours())
    for _ in range(4):
        planned = plans(present, BlockIndex(blocks.values()), 8)
        present = [_as_planned(each, planned[each.metadata.name]) for each in present]
    reasons = {plan.reason for plan in planned.values() if not plan.ready}
    assert reasons <= {"BlockSizeDiffers", "PrivateBlocks"}, "a change comes to its end"
    assert plans(present, BlockIndex(blocks.values()), 8) == planned


def _first_block(pool: AddressPool) -> AddressBlock:
    cut = block_layout.of_pool(pool)
    assert cut is not None
    return _block(pool.status.space, cut, 0)


def _as_planned(pool: AddressPool, plan: Plan) -> AddressPool:
    ready = condition("Ready", plan.reason, plan.message, is_true=plan.ready)
    decided = PoolStatus(space=plan.space, block_size=plan.block_size, conditions=(ready,))
    return AddressPool(metadata=pool.metadata, spec=pool.spec, status=decided)


def _require_equal_names(pools: list[AddressPool], planned: dict[str, Plan]) -> None:
    ready = [(pool, plan) for pool in pools if (plan := planned[pool.metadata.name]).ready]
    for pool, plan in ready:
        for other, others in ready:
            one, two = (parse_interface(each.spec.range)[1] for each in (pool, other))
            overlap = one.address <= two.last and two.address <= one.last
            if overlap and plan.space == others.space:
                assert plan.block_size == others.block_size
            if pool.spec.range == other.spec.range:
                assert plan.space == others.space
