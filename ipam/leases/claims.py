"""Claims a block by a POST of its AddressBlock. The object's name locks the block's addresses.

If another node has the block, the API server answers 409, and this node tries the next block. If
the answer is lost, this node reads the block. The nonce shows whether the block is ours. After the
POST, this node reads the pool again, because the pool may have changed. The controller first
changes the pool, and then looks for the pool's blocks.
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
    require_usable,
)
from ipam.leases.sticky import StickyClaims, is_let_go, row_of, taken_over
from ipam.ranges import common, is_within, merged, outside
from ipam.store.block_rows import LeasedBlock
from kube.client import ClusterApi
from kube.resources import AlreadyExists, Conflict, Meta, NotFound, Unavailable

_LOSSES = 8  # claims lost to other nodes, before the pool is read again
_FEW_BLOCKS = 256  # most blocks of a small pool, which are cheap to list
_LOSSES_OF_FEW = 2  # claims lost in a small pool, before its blocks are listed
_MOST_LISTED = 4096  # most leased blocks of a pool that is listed when its map is full
_MOST_DRAWN = 32  # tried blocks of a pool without a map, before the pool is read again
_ATTEMPTS = 3  # attempts of one POST whose answers are lost


class Late(Exception):
    """The time for a claim is over."""


class Claimant:
    """Leases blocks for a holder. Counts leased blocks (`claims`) and lost claims (`conflicts`)."""

    def __init__(self, leasing: Leasing) -> None:
        self._api, self._store, self._pools, self.holder, self._clock = leasing
        self._candidates = Candidates(self.holder.instance)
        self._sticky = StickyClaims(leasing)
        self.claims = 0
        self.conflicts = 0

    def claim(self, want: Want, is_late: Callable[[], bool]) -> AddressBlock | None:
        """Lease a block for the want. Returns `None` if a block of this node now has an address for
        the want. Raises Unusable, Late, ApiError. Raises CNIError 110 or AddressTaken if no block
        fits."""
        pool = self._pools.recent(want.pool_name)
        tried: set[str] = set()
        listed = False
        while True:
            blocks = require_usable(pool)
            if pool.spec.range != str(want.pool[1]):
                raise Unusable(
                    f"AddressPool {pool.metadata.name} has the range {pool.spec.range}, but the "
                    f'network has the range {want.pool[1]}: give the network another "network_name"'
                )
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
            others = self._listed(pool, blocks) if listed else ()
            let_go = others if reserved is None else ()
            if block := self._first_let_go(let_go, pool, want, holes, mine):
                return block
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
                listed = True  # the map may be older than returned blocks
            old_map, pool = pool.status.free_map, self._pools.read(pool.metadata.name)
            if losses and (is_small or pool.status.free_map == old_map):
                listed = listed or pool.status.blocks.leased <= _MOST_LISTED  # the map is old

    def _none_left(
        self,
        pool: AddressPool,
        blocks: Geometry,
        want: Want,
        holes: Sequence[Interval],
        others: Sequence[AddressBlock],
    ) -> Exception:
        """The reason why no block can be leased. Raises ApiError."""
        if pool.status.offered is not None and not (want.fixed or is_exhausted(pool)):
            return NotReadyYet(
                f"nodes lease all blocks that AddressPool {pool.metadata.name} offers now, until "
                "podfabric's controller offers more blocks beside whereabouts: see that the "
                "controller runs (kubectl -n podfabric get deploy)"
            )
        return none_left(self._api, self.holder, pool, blocks, want, holes, others)

    def _take_over(
        self, found: AddressBlock, pool: AddressPool, want: Want, mine: Mapping[str, LeasedBlock]
    ) -> AddressBlock | None:
        """Take over the pod's sticky block. Returns `None` if this node already has the block."""
        if found.metadata.name not in mine:
            self._require_few(pool, mine.values())
        used = self._sticky.use(found, pool, want)
        self.claims += used is not None
        return used

    def _has(self, mine: Collection[LeasedBlock], pool: AddressPool, want: Want) -> bool:
        """Whether a block of this node has the fixed address now. Raises AddressTaken if the block
        is sticky, or if no pod may get the address."""
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
        self, pool: AddressPool, blocks: Geometry, index: int, want: Want, sticky: StickySpec | None
    ) -> AddressBlock | None:
        """POST one block. Returns `None` if the block is taken or does not fit."""
        new = AddressBlock(
            metadata=Meta(name=blocks.name(pool.status.space, index)),
            spec=BlockSpec(
                pool=pool.metadata.name,
                range=blocks.written(index),
                holder=self.holder,
                nonce=str(uuid.uuid4()),
                max_offline_seconds=math.ceil(max_offline(pool)),
            ),
        )
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
                f"another node is reserving an address of {want.range} for the same pod: "
                "this node reserved nothing; the runtime tries again",
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
        """Take over a drained block that has a fitting address. A lost machine may still use the
        address. So a node tries other blocks first. `mine` names this node's blocks."""
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
        """Delete an unused block. If this fails, the next confirmation finds the block."""
        with suppress(NotFound, Conflict):
            self._api.delete(stored)

    def _listed(self, pool: AddressPool, blocks: Geometry) -> Sequence[AddressBlock]:
        found = self._api.list(AddressBlock, {"spec.pool": pool.metadata.name}).items
        leased = [block for block in found if not block_layout.why_wrong(block, pool)]
        self._pools.learn_leased(pool, blocks, leased)
        return leased

    def _require_few(self, pool: AddressPool, mine: Collection[LeasedBlock]) -> None:
        most = pool.spec.max_blocks_per_node
        count = sum(block.pool == pool.metadata.name for block in mine)
        if most and count >= most:
            raise CNIError(
                Code.NO_FREE_ADDRESS,
                f"this node leases as many blocks of AddressPool {pool.metadata.name} as "
                f"spec.maxBlocksPerNode allows ({most}), and pods use all addresses of these "
                "blocks: nothing was reserved; delete pods, or raise spec.maxBlocksPerNode",
            )


def post(
    api: ClusterApi, clock: Callable[[], float], new: AddressBlock
) -> tuple[AddressBlock | None, float]:
    """POST the block. Returns the stored block, and the time just before the last request. The
    block is `None` if another node leases the block."""
    for attempt in range(_ATTEMPTS):
        at = clock()
        try:
            return api.create(new), at
        except AlreadyExists:
            if attempt == 0:
                return None, at  # another node's block, because no answer to us was lost
        except Unavailable:
            if attempt == _ATTEMPTS - 1:
                raise
        at = clock()
        try:
            found = api.get(AddressBlock, new.metadata.name)
        except NotFound:
            continue  # the POST had no effect yet, or the other block is gone
        mine = found.spec.holder == new.spec.holder and found.spec.nonce == new.spec.nonce
        return (found if mine and found.spec.state == new.spec.state else None), at
    return None, 0.0


class Candidates:
    """The order in which a node tries the blocks of a pool.

    `instance` seeds the order. So nodes that claim at the same time try different blocks. A node
    first tries the index that it leased last. So nodes that leased different indexes in one pool do
    not compete in the next pool.
    """

    def __init__(self, instance: str) -> None:
        self._random = random.Random(instance)
        self._leased: int | None = None

    def leased(self, index: int) -> None:
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
        """Indexes of blocks with a fitting address. `use_map` skips blocks that the map shows as
        leased."""
        stretches = [
            range(blocks.index(part.first), blocks.index(part.last) + 1)
            for wanted in want.range.parts
            for part in outside(wanted, holes)
        ]
        if sum(map(_length, stretches)) > MOST_MAPPED:
            yield from self._same(stretches)
            yield from self._drawn(stretches)
            return
        bits = b""
        if use_map and pool.status.free_map:
            with suppress(ValueError):  # the map is a hint
                bits = read_map(pool.status.free_map, blocks.total)
        yield from (index for index in self._same(stretches) if not is_leased(bits, index))
        indexes = {index for each in stretches for index in each if not is_leased(bits, index)}
        yield from self._shuffled(sorted(indexes))

    def _same(self, stretches: Iterable[range]) -> Iterator[int]:
        if self._leased is not None and any(self._leased in each for each in stretches):
            yield self._leased

    def _shuffled(self, indexes: list[int]) -> Iterator[int]:
        """Shuffles lazily, because a claim tries only a few indexes."""
        while indexes:
            at = self._random.randrange(len(indexes))
            indexes[at], indexes[-1] = indexes[-1], indexes[at]
            yield indexes.pop()

    def _drawn(self, stretches: Sequence[range]) -> Iterator[int]:
        """Random block indexes in a pool without a map."""
        total = sum(map(_length, stretches))
        for _ in range(_MOST_DRAWN):
            number = self._random.randrange(total)
            for stretch in stretches:
                if number < _length(stretch):
                    yield stretch.start + number
                    break
                number -= _length(stretch)


def _length(stretch: range) -> int:
    """A stretch of IPv6 may be too long for len()."""
    return max(0, stretch.stop - stretch.start)
