"""One round of the controller brings the API server's objects to their wanted state.

A round decides from the objects that were read at its beginning. Each write names the resource
version that was read. A round may end after any request. The next round, or a new leader,
continues.
"""

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Protocol

import msgspec
from msgspec.structs import replace

from ipam.addresses import Interval
from ipam.controller.address_reservations import reserve
from ipam.controller.block_index import BlockIndex, contradictions, decisive
from ipam.controller.block_sizes import Plan, plans
from ipam.controller.death_proofs import Machines, Standing
from ipam.controller.definitions import POOLS_PER_NAMESPACE, PoolMaker, ReadDefinition
from ipam.controller.pool_status import Told, decides_alike, differs_in_use_only, status
from ipam.controller.reclaim import Reclaim, ReclaimCounts
from ipam.controller.steps import Steps, unless_changed
from ipam.controller.warnings import Reports
from ipam.controller.whereabouts_coexistence import Mode, Sharing
from ipam.leases.objects import AddressBlock, AddressPool, AddressReservation, PoolStatus
from ipam.leases.sticky import is_let_go
from kube.client import ClusterApi
from kube.informer import Polled
from kube.resources import ApiError

USED_EVERY = 10.0  # seconds between two writes of the count of used addresses
COUNTS_EVERY = 2.0  # seconds between two writes of the map of leased blocks

_log = logging.getLogger(__name__)


class World(msgspec.Struct, frozen=True, kw_only=True):
    polled: Polled
    definitions: tuple[ReadDefinition, ...]
    pools: tuple[AddressPool, ...]
    blocks: tuple[AddressBlock, ...]
    reservations: tuple[AddressReservation, ...] = ()


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """The results of a round, for metrics."""

    pools: tuple[AddressPool, ...] = ()
    states: Mapping[str, int] = {}  # blocks by their state
    standings: Mapping[str, int] = {}  # blocks by the standing of their holders
    contradictions: int = 0  # contradictions that fsck --cluster reports
    over_limit: int = 0  # nodes that lease more blocks of a pool than the pool allows
    unusable: int = 0  # definitions, and pools of other plugins, that get no AddressPool


class OtherPools(Protocol):
    """Makes AddressPools from the pools of another IPAM plugin. `kept_out` maps the name of an
    AddressPool to addresses that no pod gets."""

    kept_out: dict[str, Sequence[Interval]]

    def keep(self, pools: dict[str, AddressPool], reports: Reports, steps: Steps) -> int:
        """Update the AddressPools on the API server and in `pools`. Returns how many pools of the
        other plugin get no AddressPool."""

    def close(self) -> object:
        """Stop following the pools."""


class Rounds:
    """The memory of one leader between rounds. A new leader makes new `Rounds`. `clock` is
    monotonic, `wall` gives the times in statuses."""

    def __init__(
        self,
        api: ClusterApi,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        reclaim: Reclaim | None = None,
        pools_per_namespace: int = POOLS_PER_NAMESPACE,
        steps: Steps | None = None,
        whereabouts: Mode = "None",
        other_pools: OtherPools | None = None,
    ) -> None:
        self._api = api
        self._clock = clock
        self._wall = wall
        self.steps = steps or Steps()
        self._reports = Reports(api, clock)
        self._pool_maker = PoolMaker(api, clock, self._reports, pools_per_namespace)
        self._sharing = Sharing(api, whereabouts, clock)
        self._other_pools = other_pools
        self._reclaim = reclaim or Reclaim(api, clock, ReclaimCounts())
        self._written: dict[str, float] = {}  # times, by the pool's uid

    def round(self, world: World) -> Seen:
        """Do each step once. The next round repeats failed steps."""
        pools = {pool.metadata.name: pool for pool in world.pools}
        unusable = self._pool_maker.make(world.definitions, pools, world.blocks, self.steps)
        blocks = decisive(world.blocks, pools)
        if self._other_pools is not None:
            unusable += self._other_pools.keep(pools, self._reports, self.steps)
        machines = Machines(world.polled.nodes, world.blocks)
        standings = self._reclaim.step(world.blocks, pools, machines, world.polled, self.steps)
        reserve(self._api, world.reservations, blocks, self.steps)
        index = BlockIndex(blocks)
        found = contradictions(pools, world.blocks, index)
        quarantined = _quarantined(world.blocks, standings)
        conflicts: defaultdict[str, list[str]] = defaultdict(list)
        for each in found:
            conflicts[each.pool].append(each.text)
        kept_out = self._other_pools.kept_out if self._other_pools is not None else {}
        shares = self._sharing.look(pools, index, machines.count, self.steps)
        told = {
            name: Told(conflicts=conflicts[name], kept_out=kept_out.get(name, ()), share=share)
            for name, share in shares.items()
        }
        self._write_statuses(pools, index, machines.count, quarantined, told)
        over_limit = self._watch_limits(blocks, pools)
        for unreadable in self._api.unreadable():
            self._reports.unreadable(unreadable)
        return Seen(
            pools=tuple(pools.values()),
            states=Counter(block.spec.state for block in world.blocks),
            standings=Counter(standing.name.lower() for standing in standings.values()),
            contradictions=len(found),
            over_limit=over_limit,
            unusable=unusable,
        )

    def _write_statuses(
        self,
        pools: dict[str, AddressPool],
        index: BlockIndex,
        nodes: int,
        quarantined: Collection[str],
        told: Mapping[str, Told],
    ) -> None:
        """Update the statuses on the API server and in `pools`."""
        uids = {pool.metadata.uid for pool in pools.values()}
        self._written = {uid: at for uid, at in self._written.items() if uid in uids}
        planned = plans(pools.values(), index, nodes)
        if any(_decides(plan, pools[name]) for name, plan in planned.items()):
            # A watch may be late: read again before a decision, the pools before the blocks.
            try:
                listed = self._api.list(AddressPool)
                kept = {each.metadata.name for each in listed.unreadable}
                now = {name: pool for name, pool in pools.items() if name in kept}
                now |= {pool.metadata.name: pool for pool in listed.items}
                index = BlockIndex(decisive(self._api.list(AddressBlock).items, now))
            except ApiError as error:
                self.steps.failed(error)
                planned = {
                    name: plan for name, plan in planned.items() if not _decides(plan, pools[name])
                }
            else:
                planned = {n: p for n, p in plans(now.values(), index, nodes).items() if n in told}
                pools |= {name: now[name] for name in planned}

        now_text = datetime.fromtimestamp(self._wall(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

        def write(item: tuple[str, Plan]) -> None:
            name, plan = item
            wanted = status(pools[name], plan, index, quarantined, told[name], now_text)
            if self._is_due(pools[name], wanted):
                with unless_changed(_log, f"pool {name}"):
                    pools[name] = self._api.update_status(replace(pools[name], status=wanted))

        self.steps.each("status", [(item[0], item) for item in planned.items()], write)

    def _is_due(self, pool: AddressPool, wanted: PoolStatus) -> bool:
        """Whether to write the pool's status now. Changed counts can wait."""
        uid, now = pool.metadata.uid, self._clock()
        if pool.status == wanted:
            return False
        if decides_alike(pool.status, wanted):
            pause = USED_EVERY if differs_in_use_only(pool.status, wanted) else COUNTS_EVERY
            if uid in self._written and now - self._written[uid] < pause:
                return False
        self._written[uid] = now
        return True

    def _watch_limits(
        self, blocks: Iterable[AddressBlock], pools: Mapping[str, AddressPool]
    ) -> int:
        """Report nodes with more blocks than a pool allows. Returns the number of these nodes."""
        held = Counter(
            (block.spec.pool, block.spec.holder.node) for block in blocks if not is_let_go(block)
        )
        over = 0
        for (name, node), count in held.items():
            pool = pools.get(name)
            limit = pool.spec.max_blocks_per_node if pool is not None else 0
            if pool is None or not limit or count <= limit:
                continue
            over += 1
            self._reports.resource(
                "TooManyBlocks",
                f"{node} holds {count} blocks, but spec.maxBlocksPerNode is {limit}: check that "
                "its agent is well, and that no other machine uses its token",
                pool,
                once=node,
            )
        return over


def _decides(plan: Plan, pool: AddressPool) -> bool:
    return (plan.space, plan.block_size) != (pool.status.space, pool.status.block_size)


def _quarantined(
    blocks: Iterable[AddressBlock], standings: Mapping[str, Standing]
) -> frozenset[str]:
    """Blocks that no other node can use until the holder is back or proved dead."""
    return frozenset(
        block.metadata.name
        for block in blocks
        if block.spec.state == "Reclaiming"
        or (standings[block.metadata.name] is not Standing.WELL and not is_let_go(block))
    )
