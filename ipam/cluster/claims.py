"""Claims a block: POSTs its AddressBlock, whose name is the lock on its addresses.

Another node's claim of the same block is 409: then the next candidate is tried. An answer that was
lost is looked up: the nonce tells this node's claim from a twin's. What is known of a pool comes
from an earlier read, so the pool is read after the POST: a controller that changes the pool says so
first, and looks for blocks then.
"""

import math
import random
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress

from msgspec.structs import replace

from cni.spec.errors import CNIError, Code
from ipam.addresses import Interval, family, parse, text
from ipam.blocks import LeasedBlock
from ipam.cluster import geometry
from ipam.cluster.api import AlreadyExists, ClusterApi, Conflict, NotFound, Unavailable
from ipam.cluster.geometry import MOST_MAPPED, Geometry
from ipam.cluster.leasing import Leasing
from ipam.cluster.names import sub_block_name
from ipam.cluster.objects import AddressBlock, AddressPool, BlockSpec, Meta, StickySpec
from ipam.cluster.pools import (
    Unusable,
    foreign_within,
    kept_out,
    max_offline,
    pool_of,
    require_usable,
)
from ipam.cluster.rails import Rails
from ipam.cluster.sticky import StickyBlocks
from ipam.cluster.wants import PodInterface, Want
from ipam.cluster.whereabouts import placeholders
from ipam.ranges import merged, outside
from ipam.store import AddressTaken

LOSSES = 8  # claims that others won, before the pool is read again
_MOST_LISTED = 4096  # blocks of a pool that are listed where its map shows none as free
_ATTEMPTS = 3  # of one POST whose answers are lost
_MOST_NAMED = 3  # nodes in an error
_AHEAD = 1024  # blocks behind the last leased one that are tried in a pool without a map


class Late(Exception):
    """The time for a claim is over."""


class NoneLeft(Exception):
    """No block with an address that is wanted is free. `error` is for who asked.

    `pool` and `blocks` are as they were read for it, `sought` is what was wanted in that pool.
    """

    def __init__(self, error: CNIError, pool: AddressPool, blocks: Geometry, sought: Want) -> None:
        super().__init__(error.message)
        self.error = error
        self.pool = pool
        self.blocks = blocks
        self.sought = sought


class Claimant:
    """Claims blocks for a holder. `conflicts` counts lost claims."""

    def __init__(self, leasing: Leasing) -> None:
        self._api, self._store, self._pools, self.holder, self._clock = leasing
        self._random = random.Random(self.holder.instance)  # so that nodes try different ones
        self._sticky = StickyBlocks(leasing)
        self.claims = 0
        self.conflicts = 0

    def claim(self, want: Want, is_late: Callable[[], bool]) -> AddressBlock | None:
        """Lease a block with an address that is wanted; None if a present one has one now.

        Raises Unusable, Late, ApiError; NoneLeft if other nodes have all such blocks; CNIError 110
        or AddressTaken if no block could help.
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
            sticky = self._reserved(pool, want)
            if sticky is not None:
                bound = self._sticky.bound(sticky.reservation, _pod(want))
                if bound:
                    return self._of_pod(bound[0], pool, want)
            foreign = self._pools.foreign(pool)
            if pool.spec.compat == "Coexist":
                placeholders.require_whole(self._api, pool)
            holes = merged((*kept_out(pool), *(Interval(each, each) for each in foreign)))
            mine = self._store.blocks()
            if want.fixed and self._has(mine.values(), pool, sought):
                return None
            self._require_few(pool, mine.values())
            others = self._listed(pool) if listed else ()
            leased = {block.metadata.name for block in others}
            losses = 0
            for index in self._candidates(pool, blocks, sought, holes, use_map=not listed):
                block_name = blocks.name(pool.status.space, index)
                if block_name in tried or block_name in mine or block_name in leased:
                    continue
                if is_late():
                    raise Late
                block = self._attempt(pool, blocks, index, want, sticky, foreign)
                if block is not None:
                    return block
                tried.add(block_name)
                losses += 1
                if losses == LOSSES:
                    break
            else:
                if listed or pool.status.blocks.leased > _MOST_LISTED:
                    error = self._none_left(pool, blocks, want, sought, holes, others)
                    if sticky is not None:  # what others cede goes back to them
                        raise error
                    raise NoneLeft(error, pool, blocks, sought)
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
                and _is_within(address, block.own)
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
        sticky: StickySpec | None,
        foreign: Iterable[int],
    ) -> AddressBlock | None:
        """POST one block; None if it is another's, or has no address that is wanted."""
        new = self._block(pool, blocks, index, foreign)
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
        if sticky is not None and not self._sticky.is_alone(stored):
            self._give_up(stored)
            raise CNIError(
                Code.TRY_AGAIN,
                f"another node reserves an address of {want.range} for the same pod: nothing was "
                "reserved; the runtime tries again",
            )
        row = self._sticky.row(stored, fresh, want.range.domain, at)
        self._store.put(
            replace(
                row,
                max_offline=min(max_offline(pool), row.max_offline),
                rails=_rails(pool).firsts(row.first),
            )
        )
        self.claims += 1
        return stored

    def _reserved(self, pool: AddressPool, want: Want) -> StickySpec | None:
        """What a block for the name of the want's pod says; None if any address will do."""
        if want.sticky is None:
            return None
        reservation = self._sticky.reservation(pool, want)
        if pool.spec.compat != "None":
            raise Unusable(
                f"AddressPool {pool.metadata.name} is shared with whereabouts: AddressReservation "
                f"{reservation} of it cannot be kept; set its spec.compat to None first"
            )
        if pool.spec.rails:
            raise Unusable(
                f"AddressPool {pool.metadata.name} has rails: AddressReservation {reservation} "
                "of it cannot be kept; reserve addresses of a pool without rails"
            )
        return StickySpec(reservation=reservation, pod=want.sticky.pod, ifname=want.sticky.ifname)

    def _of_pod(self, found: AddressBlock, pool: AddressPool, want: Want) -> AddressBlock | None:
        """The block of the pod's name as this node's; None if its row is of use already."""
        row = self._store.blocks().get(found.metadata.name)
        if row is not None and row.uid == found.metadata.uid:
            if row.is_confirmed(self.holder.boot, self._clock()):
                return None
            if row.state == "lost":
                raise Unusable(f"pods hold addresses of {row.name}, which was another node's")
        address = parse(found.spec.sticky.address)
        if not want.range.allows(address) or _is_within(address, kept_out(pool)):
            raise CNIError(
                Code.NO_FREE_ADDRESS,
                f"{want.range.where}: {text(address)} is reserved for the pod, and {want.range} or "
                f"AddressPool {pool.metadata.name} excludes it: nothing was reserved; delete "
                f"AddressReservation {found.spec.sticky.reservation}, or exclude less",
            )
        stored, row = self._sticky.take(found, pool, want)
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

    def _listed(self, pool: AddressPool) -> Sequence[AddressBlock]:
        return self._api.list(AddressBlock, {"spec.pool": pool.metadata.name}).items

    def _require_few(self, pool: AddressPool, mine: Collection[LeasedBlock]) -> None:
        most = pool.spec.max_blocks_per_node
        count = sum(block.pool == pool.metadata.name and not block.cover for block in mine)
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
        others: Sequence[AddressBlock],
    ) -> CNIError:
        """What to tell who asked. Raises CNIError at once if no lease could help."""
        if want.fixed:
            if _is_within(sought.range.first, holes):
                raise _is_kept_out(want, pool)
            return self._taken(pool, blocks, want, sought)
        if not any(list(outside(part, kept_out(pool))) for part in sought.parts):
            raise CNIError(
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
            f"{_foreign_too(pool, holes)}{self._most_free(others)}: nothing was reserved; delete "
            "pods that no longer need one, or widen the range",
        )

    def _most_free(self, others: Sequence[AddressBlock]) -> str:
        """The nodes with most free addresses, as they published it last."""
        free = Counter[str]()
        for block in others:
            if block.spec.holder.instance != self.holder.instance and block.status.free:
                free[block.spec.holder.node] += block.status.free
        listed = ", ".join(f"{node} ({count})" for node, count in free.most_common(_MOST_NAMED))
        return f", most of the free addresses by nodes {listed}" if listed else ""

    def _taken(self, pool: AddressPool, blocks: Geometry, want: Want, sought: Want) -> CNIError:
        """Why an address cannot be had: who leases it, or the block that it is in."""
        address, space = sought.range.first, pool.status.space
        cover = blocks.name(space, blocks.index(address))
        for name in dict.fromkeys((sub_block_name(space, address), cover)):
            with suppress(NotFound):
                node = self._api.get(AddressBlock, name).spec.holder.node
                if node != self.holder.node:
                    return AddressTaken(
                        f"{want.range.where}: address {text(want.range.first)} is in a block that "
                        f"node {node} has leased: nothing was reserved; ask for another address",
                        f"see AddressBlock {name}",
                    )
        return CNIError(
            Code.TRY_AGAIN,
            f"{want.range.where}: this node may not hand out {text(want.range.first)} now: its "
            f"lease of AddressBlock {cover} is not confirmed, or ends; try again",
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
            pass
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


def _rails(pool: AddressPool) -> Rails:
    """The networks of a pool. Unusable: they are none."""
    try:
        return Rails.of(pool.spec)
    except ValueError as error:
        raise Unusable(f"AddressPool {pool.metadata.name}: {error}") from None


def _is_within(address: int, holes: Collection[Interval]) -> bool:
    return any(hole.first <= address <= hole.last for hole in holes)


def _foreign_too(pool: AddressPool, holes: Sequence[Interval]) -> str:
    """How much of the pool whereabouts' objects hold."""
    held = sum(map(_size, holes)) - sum(map(_size, kept_out(pool)))
    return f", and whereabouts' pods hold {held} addresses" if held else ""


def _size(interval: Interval) -> int:
    return interval.last - interval.first + 1


def _is_kept_out(want: Want, pool: AddressPool) -> AddressTaken:
    return AddressTaken(
        f"{want.range.where}: address {text(want.range.first)} is kept out of AddressPool "
        f"{pool.metadata.name}: nothing was reserved; ask for another address",
        f"see spec.exclude of AddressPool {pool.metadata.name}, and spec.foreign of its blocks",
    )


def _pod(want: Want) -> PodInterface:
    assert want.sticky is not None
    return want.sticky


def _length(stretch: range) -> int:
    """How many blocks it has: in IPv6 more than len() can tell."""
    return max(0, stretch.stop - stretch.start)
