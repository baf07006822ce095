"""Claims a block: POSTs its AddressBlock, whose name is the lock on its addresses.

Another node's claim of the same block is 409: then the next candidate is tried. An answer that was
lost is looked up: the nonce tells this node's claim from a twin's. What is known of a pool comes
from an earlier read, so the pool is read after the POST: a controller that changes the pool says so
first, and looks for blocks then.
"""

import math
import random
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

from msgspec.structs import replace

from cni.spec.errors import CNIError, Code
from ipam.addresses import Interval, text
from ipam.leases import block_layout
from ipam.leases.block_layout import MOST_MAPPED, Geometry, is_leased, read_map
from ipam.leases.claim_errors import is_answered, is_kept_out, is_reserved, none_left
from ipam.leases.claim_request import Want
from ipam.leases.lease_context import Leasing
from ipam.leases.objects import AddressBlock, AddressPool, BlockSpec, StickySpec
from ipam.leases.pool_cache import (
    NotReadyYet,
    Unusable,
    is_exhausted,
    kept_out,
    max_offline,
    not_offered,
    pool_of,
    require_usable,
)
from ipam.leases.sticky import StickyClaims, is_let_go, row_of, taken_over
from ipam.ranges import common, is_within, merged, outside
from ipam.store.block_rows import LeasedBlock
from kube.client import ClusterApi
from kube.resources import AlreadyExists, Conflict, Meta, NotFound, Unavailable

_LOSSES = 8  # claims that others won, before the pool is read again
_FEW_BLOCKS = 256  # of a pool: to list them costs the API server as much as the claims of one node
_LOSSES_OF_FEW = 2  # the same, and the pool's blocks are listed then
_MOST_LISTED = 4096  # blocks of a pool that are listed where its map shows none as free
_MOST_DRAWN = 32  # blocks of a pool without a map that are tried before it is read again
_ATTEMPTS = 3  # of one POST whose answers are lost


class Late(Exception):
    """The time for a claim is over."""


class Claimant:
    """Claims blocks for a holder. `conflicts` counts lost claims."""

    def __init__(self, leasing: Leasing) -> None:
        self._api, self._store, self._pools, self.holder, self._clock = leasing
        self._candidates = Candidates(self.holder.instance)
        self._sticky = StickyClaims(leasing)
        self.claims = 0
        self.conflicts = 0

    def claim(self, want: Want, is_late: Callable[[], bool]) -> AddressBlock | None:
        """Lease a block with an address that is wanted; None if a present one has one now.

        Raises Unusable, Late, ApiError; CNIError 110 or AddressTaken if no block could help, or
        other nodes have all that could.
        """
        pool = self._pools.recent(pool_of(want))
        tried: set[str] = set()
        listed = False
        while True:
            blocks = require_usable(pool)
            _require_same_range(pool, want)
            mine = self._store.serve(pool.status.space, want.range.domain)
            if mine is None:
                return None
            reserved = self._sticky.reserved(pool, want)
            if reserved is not None and reserved.block is not None:
                return self._take_over(reserved.block, pool, want, mine)
            holes = merged((*kept_out(pool), *not_offered(pool)))
            if want.fixed and self._has(mine.values(), pool, want):
                return None
            self._require_few(pool, mine.values())
            others = self._listed(pool) if listed else ()
            let_go = others if reserved is None else ()
            if block := self._first_let_go(let_go, pool, want, holes, mine):
                return block
            if listed:
                self._pools.learn_leased(pool, blocks, others)
            sticky = None if reserved is None else reserved.spec
            known = {*mine, *(block.metadata.name for block in others)}
            is_small, losses = blocks.total <= _FEW_BLOCKS, 0
            for index in self._candidates.of(pool, blocks, want, holes, use_map=not listed):
                name = blocks.name(pool.status.space, index)
                if name in tried or name in known:
                    continue
                if is_late():
                    raise Late
                if block := self._attempt(pool, blocks, index, want, sticky):
                    return block
                tried.add(name)
                losses += 1
                if losses == (_LOSSES_OF_FEW if is_small else _LOSSES):
                    break
            else:
                if listed or pool.status.blocks.leased > _MOST_LISTED:
                    raise self._none_left(pool, blocks, want, holes, others)
                listed = True  # the map may be older than what others gave back
            former, pool = pool, self._pools.read(pool.metadata.name)
            if losses and (is_small or pool.status.free_map == former.status.free_map):
                listed = listed or pool.status.blocks.leased <= _MOST_LISTED  # the map is old

    def _none_left(
        self,
        pool: AddressPool,
        blocks: Geometry,
        want: Want,
        holes: Sequence[Interval],
        others: Sequence[AddressBlock],
    ) -> Exception:
        """Why no block with an address that is wanted can be leased. ApiError."""
        if pool.status.offered is not None and not (want.fixed or is_exhausted(pool)):
            return NotReadyYet(
                f"nodes have leased all blocks that AddressPool {pool.metadata.name} offers: "
                "podfabric's controller takes more from whereabouts: see that it runs "
                "(kubectl -n podfabric get deploy)"
            )
        return none_left(self._api, self.holder, pool, blocks, want, holes, others)

    def _take_over(
        self, found: AddressBlock, pool: AddressPool, want: Want, mine: Mapping[str, LeasedBlock]
    ) -> AddressBlock | None:
        """The block for the pod's name as this node's; None if it is here already. See `claim`."""
        if found.metadata.name not in mine:
            self._require_few(pool, mine.values())
        used = self._sticky.use(found, pool, want)
        self.claims += used is not None
        return used

    def _has(self, mine: Collection[LeasedBlock], pool: AddressPool, want: Want) -> bool:
        """Whether a block with a fixed address was leased meanwhile, for another want.

        Raises AddressTaken if the block keeps the address out, or is for the name of a pod: to
        lease it does not help.
        """
        address, now = want.range.first, self._clock()
        for block in mine:
            if (
                block.space == pool.status.space
                and block.first <= address <= block.last
                and block.is_confirmed(self.holder.boot, now)
            ):
                if block.sticky:
                    raise is_reserved(want)
                if is_within(address, block.kept_out):
                    raise is_kept_out(want, pool)
                if is_within(address, block.answered):
                    raise is_answered(want)
                return True
        return False

    def _attempt(
        self,
        pool: AddressPool,
        blocks: Geometry,
        index: int,
        want: Want,
        sticky: StickySpec | None,
    ) -> AddressBlock | None:
        """POST one block; None if it is another's, or has no address that is wanted."""
        new = self._block(pool, blocks, index)
        if sticky is not None:
            usable = want.range.restricted(outside(blocks.block(index), kept_out(pool))).parts
            if not usable:
                return None
            sticky = replace(sticky, address=text(usable[0].first))
            new = replace(new, spec=replace(new.spec, sticky=sticky))
        stored, at = post(self._api, self._clock, new)
        if stored is None:
            self.conflicts += 1
            return None
        fresh = self._pools.read(pool.metadata.name)
        try:
            found = require_usable(fresh), fresh.status.space
            is_offered = not any(common([blocks.block(index)], not_offered(fresh)))
        except Exception:
            self._give_up(stored)
            raise
        if found != (blocks, pool.status.space) or not is_offered:
            self._give_up(stored)
            return None
        if sticky is not None and not self._sticky.is_alone(stored, fresh):
            self._give_up(stored)
            raise CNIError(
                Code.TRY_AGAIN,
                f"another node reserves an address of {want.range} for the same pod: "
                "nothing was reserved; the runtime tries again",
            )
        row = row_of(stored, fresh, want.range.domain, self.holder.boot, at)
        self._store.put(replace(row, max_offline=min(max_offline(pool), row.max_offline)))
        self._candidates.leased(index)
        self.claims += 1
        return stored

    def _first_let_go(
        self,
        others: Iterable[AddressBlock],
        pool: AddressPool,
        want: Want,
        holes: Sequence[Interval],
        mine: Collection[str],
    ) -> AddressBlock | None:
        """Take over a block of which a lost machine may use addresses, if one has an address that
        is wanted: nodes do so when no other block is free. `mine` are this node's."""
        for found in others:
            if not is_let_go(found) or found.metadata.name in mine or found.spec.sticky.reservation:
                continue
            if not want.range.restricted(outside(block_layout.interval(found), holes)).parts:
                continue
            taken = taken_over(self._api, self._clock, self.holder, found, pool)
            if taken is None:  # another node was faster
                self.conflicts += 1
                continue
            stored, at = taken
            self._store.put(row_of(stored, pool, want.range.domain, self.holder.boot, at))
            self.claims += 1
            return stored
        return None

    def _give_up(self, stored: AddressBlock) -> None:
        """Delete a block that was never used. What remains is found by the next confirmation."""
        with suppress(NotFound, Conflict):
            self._api.delete(stored)

    def _block(self, pool: AddressPool, blocks: Geometry, index: int) -> AddressBlock:
        return AddressBlock(
            metadata=Meta(name=blocks.name(pool.status.space, index)),
            spec=BlockSpec(
                pool=pool.metadata.name,
                range=blocks.written(index),
                holder=self.holder,
                nonce=str(uuid.uuid4()),
                max_offline_seconds=math.ceil(max_offline(pool)),
            ),
        )

    def _listed(self, pool: AddressPool) -> Sequence[AddressBlock]:
        listed = self._api.list(AddressBlock, {"spec.pool": pool.metadata.name}).items
        return [block for block in listed if not block_layout.why_wrong(block, pool)]

    def _require_few(self, pool: AddressPool, mine: Collection[LeasedBlock]) -> None:
        most = pool.spec.max_blocks_per_node
        count = sum(block.pool == pool.metadata.name for block in mine)
        if most and count >= most:
            raise CNIError(
                Code.NO_FREE_ADDRESS,
                f"this node has all {most} blocks of AddressPool {pool.metadata.name} that its "
                "spec.maxBlocksPerNode allows, and no free address in them: nothing was "
                "reserved; delete pods that no longer need one, or raise that number",
            )


def post(
    api: ClusterApi, clock: Callable[[], float], new: AddressBlock
) -> tuple[AddressBlock | None, float]:
    """The block as it was stored, None if it is another's; and a time before that was known."""
    for attempt in range(_ATTEMPTS):
        at = clock()
        try:
            return api.create(new), at
        except AlreadyExists:
            if attempt == 0:
                return None, at  # no answer of ours was lost before it
        except Unavailable:
            if attempt == _ATTEMPTS - 1:
                raise
        at = clock()
        try:
            found = api.get(AddressBlock, new.metadata.name)
        except NotFound:
            continue  # the POST had no effect yet, or the other one is gone
        mine = found.spec.holder == new.spec.holder and found.spec.nonce == new.spec.nonce
        return (found if mine and found.spec.state == new.spec.state else None), at
    return None, 0.0


def _require_same_range(pool: AddressPool, want: Want) -> None:
    """Unusable: the pool has none of the addresses that are wanted."""
    if pool.spec.range != str(want.pool[1]):
        raise Unusable(
            f"AddressPool {pool.metadata.name} is of {pool.spec.range}, and not of "
            f'{want.pool[1]}: give the network another "network_name"'
        )


class Candidates:
    """Which blocks of a pool the node tries, and in which order; `instance` is its store's.

    Each node has an order of its own, so that nodes which claim at the same time try different
    blocks. And each tries the index first that it leased last: a pod has interfaces of several
    pools, and nodes that won different indexes of the first do not try each other's in the next.
    """

    def __init__(self, instance: str) -> None:
        self._random = random.Random(instance)
        self._leased: int | None = None

    def leased(self, index: int) -> None:
        """This node has leased the block with that index of a pool."""
        self._leased = index

    def of(
        self,
        pool: AddressPool,
        blocks: Geometry,
        want: Want,
        holes: Sequence[Interval],
        *,
        use_map: bool,
    ) -> Iterator[int]:
        """Indexes of blocks with an address that is wanted: in the node's order.

        `use_map`: only those that the pool's map shows as free.
        """
        stretches = [
            range(blocks.index(part.first), blocks.index(part.last) + 1)
            for wanted in want.parts
            for part in outside(wanted, holes)
        ]
        if sum(map(_length, stretches)) > MOST_MAPPED:
            yield from self._same(stretches)
            yield from self._drawn(stretches)
            return
        bits = b""
        if use_map and pool.status.free_map:
            with suppress(ValueError):  # it is a hint
                bits = read_map(pool.status.free_map, blocks.total)
        yield from (index for index in self._same(stretches) if not is_leased(bits, index))
        indexes = {index for each in stretches for index in each if not is_leased(bits, index)}
        yield from self._shuffled(sorted(indexes))

    def _same(self, stretches: Iterable[range]) -> Iterator[int]:
        """The index that was leased last, if these have it."""
        if self._leased is not None and any(self._leased in each for each in stretches):
            yield self._leased

    def _shuffled(self, indexes: list[int]) -> Iterator[int]:
        """All of them in a random order. A claim tries a few: the others are not moved."""
        while indexes:
            at = self._random.randrange(len(indexes))
            indexes[at], indexes[-1] = indexes[-1], indexes[at]
            yield indexes.pop()

    def _drawn(self, stretches: Sequence[range]) -> Iterator[int]:
        """Indexes of a pool without a map, each at most some times."""
        total = sum(map(_length, stretches))
        for _ in range(_MOST_DRAWN):
            number = self._random.randrange(total)
            for stretch in stretches:
                if number < _length(stretch):
                    yield stretch.start + number
                    break
                number -= _length(stretch)


def _length(stretch: range) -> int:
    """How many blocks it has: in IPv6 more than len() can tell."""
    return max(0, stretch.stop - stretch.start)
