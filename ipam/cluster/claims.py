"""Claims a block: POSTs its AddressBlock, whose name is the lock on its addresses.

Another node's claim of the same block is 409: then the next candidate is tried. An answer that was
lost is looked up: the nonce tells this node's claim from a twin's. What is known of a pool comes
from an earlier read, so the pool is read after the POST: a controller that changes the pool says so
first, and looks for blocks then.
"""

import math
import random
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress

from msgspec.structs import replace

from cni.spec.errors import CNIError, Code
from ipam.addresses import Interval, family, text
from ipam.blocks import LeasedBlock
from ipam.cluster import geometry
from ipam.cluster.api import AlreadyExists, Conflict, NotFound, Unavailable
from ipam.cluster.geometry import MOST_MAPPED, Geometry
from ipam.cluster.leasing import Leasing
from ipam.cluster.objects import AddressBlock, AddressPool, BlockSpec, Meta
from ipam.cluster.pools import (
    Unusable,
    foreign_within,
    kept_out,
    max_offline,
    pool_of,
    require_usable,
)
from ipam.cluster.rails import Rails
from ipam.cluster.wants import Want
from ipam.cluster.whereabouts import placeholders
from ipam.ranges import merged, outside
from ipam.store import AddressTaken

LOSSES = 8  # claims that others won, before the pool is read again
_MOST_LISTED = 4096  # blocks of a pool that are listed where its map shows none as free
_ATTEMPTS = 3  # of one POST whose answers are lost
_AHEAD = 1024  # blocks behind the last leased one that are tried in a pool without a map


class Late(Exception):
    """The time for a claim is over."""


class Claimant:
    """Claims blocks for a holder. `conflicts` counts lost claims."""

    def __init__(self, leasing: Leasing) -> None:
        self._api, self._store, self._pools, self.holder, self._clock = leasing
        self._random = random.Random(self.holder.instance)  # so that nodes try different ones
        self.claims = 0
        self.conflicts = 0

    def claim(self, want: Want, is_late: Callable[[], bool]) -> AddressBlock | None:
        """Lease a block with an address that is wanted; None if a present one has one now.

        Raises Unusable, Late, ApiError; CNIError 110 or AddressTaken if there is no such block.
        """
        pool = self._pools.recent(pool_of(want))
        if pool.spec.compat != "None" and (pool.spec.rails or pool.status.rail_of):
            raise Unusable(
                f"AddressPool {pool.metadata.name} has rails, which whereabouts cannot share: set "
                "its spec.compat to None"
            )
        if pool.status.rail_of:
            pool = self._pools.recent(pool.status.rail_of)
        name = pool.metadata.name
        tried: set[str] = set()
        listed = False
        while True:
            blocks = require_usable(pool)
            sought = _rails(pool).sought(want)
            if sought is None:
                raise Unusable(
                    f"AddressPool {name} is of {pool.spec.range}, and not of {want.pool[1]}: give "
                    'the network another "network_name"'
                )
            if self._store.serve(pool.status.space, want.range.domain):
                return None
            foreign = self._pools.foreign(pool)
            if pool.spec.compat == "Coexist":
                placeholders.require_whole(self._api, pool)
            holes = merged((*kept_out(pool), *(Interval(each, each) for each in foreign)))
            mine = self._store.blocks()
            if want.fixed and self._has(mine.values(), pool, sought):
                return None
            self._require_few(pool, mine.values())
            leased = self._leased(pool) if listed else frozenset()
            losses = 0
            for index in self._candidates(pool, blocks, sought, holes, use_map=not listed):
                block_name = blocks.name(pool.status.space, index)
                if block_name in tried or block_name in mine or block_name in leased:
                    continue
                if is_late():
                    raise Late
                block = self._attempt(pool, blocks, index, want, foreign)
                if block is not None:
                    return block
                tried.add(block_name)
                losses += 1
                if losses == LOSSES:
                    break
            else:
                if listed or pool.status.blocks.leased > _MOST_LISTED:
                    raise self._none_left(pool, blocks, want, sought, holes, len(foreign))
                listed = True  # the map may be older than what others gave back
            former, pool = pool, self._pools.read(name)
            if losses and pool.status.free_map == former.status.free_map:
                listed = listed or pool.status.blocks.leased <= _MOST_LISTED  # it is old

    def _has(self, mine: Collection[LeasedBlock], pool: AddressPool, sought: Want) -> bool:
        """Whether a block with a fixed address was leased meanwhile, for another want.

        Raises AddressTaken if the block keeps the address out: to lease it does not help.
        """
        address, now = sought.range.first, self._clock()
        for block in mine:
            if (
                block.space == pool.status.space
                and block.first <= address <= block.last
                and block.is_confirmed(self.holder.boot, now)
            ):
                if _is_within(address, block.kept_out):
                    raise _is_kept_out(sought, pool)
                return True
        return False

    def _attempt(
        self,
        pool: AddressPool,
        blocks: Geometry,
        index: int,
        want: Want,
        foreign: Iterable[int],
    ) -> AddressBlock | None:
        """POST one block; None if it is another's."""
        stored, at = self._post(self._block(pool, blocks, index, foreign))
        if stored is None:
            self.conflicts += 1
            return None
        if pool.spec.compat == "Coexist":
            at = self._clock()
            stored = self._activated(pool, stored)
        fresh = self._pools.read(pool.metadata.name)
        try:
            fits = (
                require_usable(fresh),
                fresh.status.space,
                fresh.spec.rails,
                fresh.spec.compat,
            ) == (
                blocks,
                pool.status.space,
                pool.spec.rails,
                pool.spec.compat,
            )
        except Exception:
            self._give_up(stored)
            raise
        if not fits:
            self._give_up(stored)
            return None
        interval = blocks.block(index)
        row = LeasedBlock(
            name=stored.metadata.name,
            uid=stored.metadata.uid,
            space=stored.spec.space,
            pool=stored.spec.pool,
            domains=(want.range.domain,),
            first=interval.first,
            last=interval.last,
            kept_out=kept_out(fresh, stored.spec.foreign),
            max_offline=min(max_offline(pool), max_offline(fresh)),
            boot=self.holder.boot,
            confirmed=at,
            rails=_rails(pool).firsts(interval.first),
        )
        self._store.put(row)
        self.claims += 1
        return stored

    def _activated(self, pool: AddressPool, pending: AddressBlock) -> AddressBlock:
        """The block with its placeholders. ApiError: the next confirmation goes on from there."""
        interval = geometry.interval(pending)
        held = placeholders.put(self._api, pool, interval, pending.metadata.uid)
        spec = replace(
            pending.spec, state="Active", compat="Coexist", foreign=foreign_within(held, interval)
        )
        return self._api.update(replace(pending, spec=spec))

    def _post(self, new: AddressBlock) -> tuple[AddressBlock | None, float]:
        """The block as it was stored, None if it is another's; and a time before that was known."""
        for attempt in range(_ATTEMPTS):
            at = self._clock()
            try:
                return self._api.create(new), at
            except AlreadyExists:
                pass
            except Unavailable:
                if attempt == _ATTEMPTS - 1:
                    raise
            at = self._clock()
            try:
                found = self._api.get(AddressBlock, new.metadata.name)
            except NotFound:
                continue  # the POST had no effect yet, or the other one is gone
            mine = found.spec.holder == new.spec.holder and found.spec.nonce == new.spec.nonce
            return (found if mine and found.spec.state == new.spec.state else None), at
        return None, 0.0

    def _give_up(self, stored: AddressBlock) -> None:
        """Delete a block that was never used. What remains is found by the next confirmation."""
        with suppress(NotFound, Conflict):
            if stored.spec.compat == "Coexist":
                placeholders.remove(self._api, stored.metadata.uid)
            self._api.delete(stored)

    def _block(
        self, pool: AddressPool, blocks: Geometry, index: int, foreign: Iterable[int]
    ) -> AddressBlock:
        interval, coexists = blocks.block(index), pool.spec.compat == "Coexist"
        return AddressBlock(
            metadata=Meta(name=blocks.name(pool.status.space, index)),
            spec=BlockSpec(
                pool=pool.metadata.name,
                space=pool.status.space,
                first=text(interval.first),
                prefix=blocks.prefix,
                rails=tuple(map(text, _rails(pool).firsts(interval.first))),
                holder=self.holder,
                nonce=str(uuid.uuid4()),
                foreign=foreign_within(foreign, interval),
                compat="None" if coexists else pool.spec.compat,
                state="Pending" if coexists else "Active",
                max_offline_seconds=math.ceil(max_offline(pool)),
            ),
        )

    def _candidates(
        self,
        pool: AddressPool,
        blocks: Geometry,
        want: Want,
        holes: Sequence[Interval],
        *,
        use_map: bool,
    ) -> Iterator[int]:
        """Blocks with an address that is wanted: in this node's own order, or from the top."""
        stretches = [
            range(blocks.index(part.first), blocks.index(part.last) + 1)
            for wanted in want.parts
            for part in outside(wanted, holes)
        ]
        if sum(map(_length, stretches)) > MOST_MAPPED:
            end = 2 * pool.status.high_water + _AHEAD
            low = [range(each.start, min(each.stop, end)) for each in stretches]
            return self._drawn([each for each in low if each] or stretches[:1])
        indexes = {index for stretch in stretches for index in stretch}
        if use_map and pool.status.free_map:
            with suppress(ValueError):  # it is a hint
                indexes &= set(geometry.free_indexes(pool.status.free_map, blocks.total))
        # whereabouts hands out the lowest address first
        from_top = pool.spec.claim_from == "High" or pool.spec.compat == "Coexist"
        order = sorted(indexes, reverse=from_top)
        if not from_top:
            self._random.shuffle(order)
        return iter(order)

    def _drawn(self, stretches: Sequence[range]) -> Iterator[int]:
        """Indexes of a pool without a map, each at most some times."""
        total = sum(map(_length, stretches))
        for _ in range(4 * LOSSES):
            number = self._random.randrange(total)
            for stretch in stretches:
                if number < _length(stretch):
                    yield stretch.start + number
                    break
                number -= _length(stretch)

    def _leased(self, pool: AddressPool) -> frozenset[str]:
        listing = self._api.list(AddressBlock, {"spec.pool": pool.metadata.name})
        return frozenset(block.metadata.name for block in listing.items)

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

    def _none_left(
        self,
        pool: AddressPool,
        blocks: Geometry,
        want: Want,
        sought: Want,
        holes: Sequence[Interval],
        foreign: int,
    ) -> CNIError:
        if want.fixed:
            if _is_within(sought.range.first, holes):
                return _is_kept_out(want, pool)
            name = blocks.name(pool.status.space, blocks.index(sought.range.first))
            if name in self._store.blocks():
                return CNIError(
                    Code.TRY_AGAIN,
                    f"{want.range.where}: this node may not hand out {text(want.range.first)} now: "
                    f"its lease of AddressBlock {name} is not confirmed, or ends; try again",
                )
            return AddressTaken(
                f"{want.range.where}: address {text(want.range.first)} is in a block that another "
                "node has leased: nothing was reserved; ask for another address",
                f"see who holds AddressBlock {name}",
            )
        if not any(list(outside(part, kept_out(pool))) for part in sought.parts):
            return CNIError(
                Code.NO_FREE_ADDRESS,
                f"{want.range} and AddressPool {pool.metadata.name} exclude every address: nothing "
                "was reserved; exclude less, or widen the range",
            )
        used, capacity = pool.status.addresses.used, pool.status.addresses.capacity
        return CNIError(
            Code.NO_FREE_ADDRESS,
            f"AddressPool {pool.metadata.name} has no free address for this node: {used} of "
            f"{capacity} are used, and all {blocks.total} blocks of {blocks.block_size} addresses "
            f"that {want.range} may use are leased (IPv{family(want.range.first)})"
            + (f", or whereabouts' pods hold what is left ({foreign} addresses)" if foreign else "")
            + ": nothing was reserved; delete pods that no longer need one, or widen the range",
        )


def _rails(pool: AddressPool) -> Rails:
    """The networks of a pool. Unusable: they are none."""
    try:
        return Rails.of(pool.spec)
    except ValueError as error:
        raise Unusable(f"AddressPool {pool.metadata.name}: {error}") from None


def _is_within(address: int, holes: Collection[Interval]) -> bool:
    return any(hole.first <= address <= hole.last for hole in holes)


def _is_kept_out(want: Want, pool: AddressPool) -> AddressTaken:
    return AddressTaken(
        f"{want.range.where}: address {text(want.range.first)} is kept out of AddressPool "
        f"{pool.metadata.name}: nothing was reserved; ask for another address",
        f"see spec.exclude of AddressPool {pool.metadata.name}, and spec.foreign of its blocks",
    )


def _length(stretch: range) -> int:
    """How many blocks it has: in IPv6 more than len() can tell."""
    return max(0, stretch.stop - stretch.start)
