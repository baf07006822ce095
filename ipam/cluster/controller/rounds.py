"""One round of the controller: from what the API server has to what it should have.

A round decides by what it read at its beginning, and everything that it writes names the version
that it read. It may end after any request: the next round, or another leader's first, goes on from
what is there.
"""

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec.structs import replace

from ipam.cluster.api import (
    AlreadyExists,
    ClusterApi,
    Conflict,
    NetworkDefinition,
    Node,
    NotFound,
    Refused,
)
from ipam.cluster.controller.audit import contradictions
from ipam.cluster.controller.block_index import BlockIndex
from ipam.cluster.controller.bound_pods import BoundPods
from ipam.cluster.controller.definitions import (
    DemandedPool,
    UnusableDefinition,
    demand,
    not_of,
)
from ipam.cluster.controller.machines import Machines, Standing
from ipam.cluster.controller.plans import plans
from ipam.cluster.controller.pool_conditions import is_ready
from ipam.cluster.controller.pool_status import decides_alike, differs_in_use_only, status
from ipam.cluster.controller.ranged import Plan
from ipam.cluster.controller.reclaim import MARGIN, Reclaim, ReclaimCounts
from ipam.cluster.controller.requests import Requests
from ipam.cluster.objects import (
    GROUP,
    VERSION,
    AddressBlock,
    AddressPool,
    AddressRequest,
    Meta,
    PoolStatus,
)

QUIET_AFTER = 120.0  # seconds after which no claim of a pool that is not Ready is under way
USED_EVERY = 10.0  # seconds between two writes of how many addresses are used
COUNTS_EVERY = 2.0  # seconds between two writes of which blocks are leased
MOST_EVENTS = 1000  # remembered, so that each is reported once; and the most in EVENTS_IN
EVENTS_IN = 3600.0  # seconds
REFUSED_AGAIN = 60.0  # seconds until a pool that was refused is made again

_log = logging.getLogger(__name__)


class World(msgspec.Struct, frozen=True, kw_only=True):
    """What the API server has. `read_at` is the time before the nodes were asked for."""

    read_at: float
    nodes: tuple[Node, ...]
    definitions: tuple[NetworkDefinition, ...]
    pools: tuple[AddressPool, ...]
    blocks: tuple[AddressBlock, ...]
    requests: tuple[AddressRequest, ...]


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What a round saw, for metrics."""

    pools: tuple[AddressPool, ...] = ()
    states: Mapping[str, int] = {}  # blocks by their state
    standings: Mapping[str, int] = {}  # blocks by how their holders stand
    requests: int = 0
    contradictions: int = 0  # what fsck --cluster would report
    over_limit: int = 0  # nodes that hold more blocks of a pool than it allows
    unusable: int = 0  # definitions that get no pool


def read_world(api: ClusterApi, clock: Callable[[], float]) -> World:
    """Everything, by consistent reads. ApiError."""
    read_at = clock()
    return World(
        read_at=read_at,
        nodes=tuple(api.nodes()),
        definitions=tuple(api.network_definitions()),
        pools=api.list(AddressPool).items,
        blocks=api.list(AddressBlock).items,
        requests=api.list(AddressRequest).items,
    )


class Rounds:
    """What one leader remembers from round to round. A new leader begins with nothing.

    `clock` is monotonic and of this process, `wall` gives times for people. `counts` outlives the
    leader.
    """

    def __init__(
        self,
        api: ClusterApi,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        counts: ReclaimCounts | None = None,
        margin: float = MARGIN,
    ) -> None:
        self._api = api
        self._clock = clock
        self._wall = wall
        self._reclaim = Reclaim(api, clock, counts or ReclaimCounts(), margin)
        self._requests = Requests(api, clock)
        self._bound_pods = BoundPods(api, clock)
        self._paused_since: dict[str, float] = {}  # by the pool's uid
        self._written: dict[str, float] = {}  # when a status was, by the pool's uid
        self._reported: dict[tuple[str, ...], float] = {}  # when
        self._refused: dict[str, float] = {}  # when, by the pool's name

    def round(self, world: World) -> Seen:
        """Do everything once. Unavailable: the rest is left for the next round."""
        demanded = demand(world.definitions)
        mistakes = list(demanded.unusable)
        pools = {pool.metadata.name: pool for pool in world.pools}
        self._refused = {
            name: at
            for name, at in self._refused.items()
            if name in demanded.pools and name not in pools
        }
        for name, asked in demanded.pools.items():
            if name not in pools:
                self._create(name, asked, pools)
            elif pools[name].spec.range != asked.spec.range:
                why = not_of(name, pools[name].spec, asked.spec)
                mistakes.append(UnusableDefinition(asked.definition, why))
        for mistake in mistakes:
            self._report_definition(mistake)
        self._bound_pods.begin()
        machines = Machines(world.nodes, world.blocks, self._bound_pods.on)
        standings = self._reclaim.step(world.blocks, pools, machines, world.read_at)
        requests = self._requests.collect(world.requests, pools, machines)
        index = BlockIndex(world.blocks)
        found = contradictions(pools, world.blocks, index)
        quarantined = _quarantined(world.blocks, standings)
        quiet = self._quiet(pools.values())
        uids = {pool.metadata.uid for pool in pools.values()}
        self._written = {uid: at for uid, at in self._written.items() if uid in uids}
        conflicts: defaultdict[str, list[str]] = defaultdict(list)
        for each in found:
            conflicts[each.pool].append(each.text)
        planned = plans(pools.values(), index, machines.count, quiet)
        if any(_decides(plan, pools[name]) for name, plan in planned.items()):
            # What is decided must not rest on what a watch has shown: look now.
            index = BlockIndex(self._api.list(AddressBlock).items)
            planned = plans(pools.values(), index, machines.count, quiet)
        for name, plan in planned.items():
            pool = pools[name]
            wanted = status(pool, plan, index, quarantined, conflicts[name], self._now())
            pools[name] = self._write(pool, wanted)
        over_limit = self._watch_limits(world.blocks, pools)
        return Seen(
            pools=tuple(pools.values()),
            states=Counter(block.spec.state for block in world.blocks),
            standings=Counter(standing.name.lower() for standing in standings.values()),
            requests=requests,
            contradictions=len(found),
            over_limit=over_limit,
            unusable=len(mistakes) + len(self._refused),
        )

    def _create(self, name: str, asked: DemandedPool, pools: dict[str, AddressPool]) -> None:
        now = self._clock()
        if name in self._refused and now - self._refused[name] < REFUSED_AGAIN:
            return
        try:
            pools[name] = self._api.create(AddressPool(metadata=Meta(name=name), spec=asked.spec))
        except AlreadyExists:
            return  # the next round sees it
        except Refused as error:
            self._refused[name] = now
            self._report_definition(UnusableDefinition(asked.definition, str(error)))
        else:
            self._refused.pop(name, None)
            _log.info("pool %s: made, a definition names it", name)

    def _write(self, pool: AddressPool, wanted: PoolStatus) -> AddressPool:
        """Write the pool's status if it differs; the pool as it is then."""
        uid, now = pool.metadata.uid, self._clock()
        if pool.status == wanted:
            return pool
        if decides_alike(pool.status, wanted):
            pause = USED_EVERY if differs_in_use_only(pool.status, wanted) else COUNTS_EVERY
            if uid in self._written and now - self._written[uid] < pause:
                return pool
        self._written[uid] = now
        try:
            return self._api.update_status(replace(pool, status=wanted))
        except (Conflict, NotFound, Refused) as error:
            _log.info("pool %s: status left for the next round: %s", pool.metadata.name, error)
            return pool

    def _quiet(self, pools: Iterable[AddressPool]) -> set[str]:
        """The pools that this leader has seen not Ready for so long that no claim is under way."""
        now = self._clock()
        paused = {pool.metadata.uid: pool for pool in pools if not is_ready(pool)}
        self._paused_since = {uid: self._paused_since.get(uid, now) for uid in paused}
        return {
            pool.metadata.name
            for uid, pool in paused.items()
            if now - self._paused_since[uid] >= QUIET_AFTER
        }

    def _watch_limits(
        self, blocks: Iterable[AddressBlock], pools: Mapping[str, AddressPool]
    ) -> int:
        """Report the nodes that hold more blocks than a pool allows; how many there are."""
        held = Counter((block.spec.pool, block.spec.holder.node) for block in blocks)
        over = 0
        for (name, node), count in held.items():
            pool = pools.get(name)
            limit = pool.spec.max_blocks_per_node if pool is not None else 0
            if pool is None or not limit or count <= limit:
                continue
            over += 1
            self._report(
                "TooManyBlocks",
                f"{node} holds {count} blocks, spec.maxBlocksPerNode is {limit}: see whether its "
                "agent is well, and whether its token is used elsewhere",
                {
                    "apiVersion": f"{GROUP}/{VERSION}",
                    "kind": AddressPool.KIND,
                    "name": name,
                    "uid": pool.metadata.uid,
                },
                once=node,
            )
        return over

    def _report_definition(self, mistake: UnusableDefinition) -> None:
        definition = mistake.definition
        self._report(
            "NoAddressPool",
            f"it gets no AddressPool: {mistake.why}",
            {
                "apiVersion": "k8s.cni.cncf.io/v1",
                "kind": "NetworkAttachmentDefinition",
                "namespace": definition.namespace,
                "name": definition.name,
                "uid": definition.uid,
            },
            once=mistake.why,
        )

    def _report(self, reason: str, message: str, regarding: dict[str, Any], *, once: str) -> None:
        key = (reason, *map(str, regarding.values()), once)
        if key in self._reported:
            return
        now = self._clock()
        if len(self._reported) >= MOST_EVENTS:
            oldest = next(iter(self._reported))
            if now - self._reported[oldest] < EVENTS_IN:
                return
            del self._reported[oldest]
        self._reported[key] = now
        _log.warning("%s %s: %s", regarding["kind"], regarding["name"], message)
        self._api.report(reason, message, regarding)

    def _now(self) -> str:
        return datetime.fromtimestamp(self._wall(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _decides(plan: Plan, pool: AddressPool) -> bool:
    decided = pool.status.space, pool.status.block_size, pool.status.rail_of
    return (plan.space, plan.block_size, plan.rail_of) != decided


def _quarantined(
    blocks: Iterable[AddressBlock], standings: Mapping[str, Standing]
) -> frozenset[str]:
    """The blocks that nobody can use until their holder is back or proved dead."""
    return frozenset(
        block.metadata.name
        for block in blocks
        if standings[block.metadata.name] is not Standing.WELL or block.spec.state == "Reclaiming"
    )
