"""Which addresses of others' blocks a node may have that found no free block.

Everything here is a hint, by what nodes have published: the holder looks into its store before it
cedes, and who leases the address reads the covering block.
"""

from collections.abc import Collection, Iterator, Mapping
from itertools import islice

import msgspec

from ipam.addresses import Interval, parse, parse_interface, parse_interval
from ipam.cluster.block_store import MOST_CEDED
from ipam.cluster.controller.block_index import BlockIndex, PlacedBlock
from ipam.cluster.controller.machines import Standing
from ipam.cluster.objects import AddressBlock, AddressPool, AddressRequest

_MOST_EXAMINED = 4096  # blocks for one request


class Offers(msgspec.Struct, frozen=True):
    """`addresses` for a request; `wanted` are those that holders are to be asked for now."""

    addresses: tuple[int, ...]
    wanted: tuple[tuple[AddressBlock, tuple[int, ...]], ...] = ()
    exhausted: bool = False

    def unless_asked(self, asked: Collection[str]) -> "Offers":
        """The same without what the holders of other blocks than these were to be asked for."""
        lost = {
            address
            for block, addresses in self.wanted
            if block.metadata.name not in asked
            for address in addresses
        }
        left = tuple(address for address in self.addresses if address not in lost)
        return msgspec.structs.replace(self, addresses=left)


class Market:
    """What is on offer in one round: no address goes to two requests."""

    def __init__(self, index: BlockIndex, standings: Mapping[str, Standing]) -> None:
        self._index = index
        self._standings = standings
        self._given: set[tuple[str, int]] = set()  # by space
        self._withheld = False  # whether another request has an address that this one could use

    def offers(self, request: AddressRequest, pool: AddressPool) -> Offers:
        """What the request may have: ceded already, asked for already, and to be asked for.

        Without ceding a holder can only give back all of a block, so that must be empty. ValueError
        if the request names no addresses of the pool.
        """
        spec, space = request.spec, pool.status.space
        parts = [parse_interval(part) for part in spec.parts] or [_whole(pool)]
        if spec.address:
            parts = [Interval(parse(spec.address), parse(spec.address))]
        blocks = [
            placed
            for part in parts
            for placed in islice(self._index.within(space, part), _MOST_EXAMINED)
            if self._may_cede(placed.block, spec.instance)
        ]
        blocks = list({placed.block.metadata.name: placed for placed in blocks}.values())
        found: list[int] = []
        self._withheld = False
        cedes = pool.spec.cedes
        if cedes:
            for placed in blocks:
                found += self._take(space, self._ceded(placed, parts), spec.count - len(found))
        for placed in blocks:
            asked = _inside(map(parse, placed.block.spec.cede_wanted), parts)
            found += self._take(space, asked, spec.count - len(found))
        wanted = []
        for placed in sorted(blocks, key=_published_free, reverse=True):
            if len(found) >= spec.count:
                break
            if cedes or _is_idle(placed.block):
                more = self._take(space, _free(placed, parts), spec.count - len(found))
                if more:
                    found += more
                    wanted.append((placed.block, tuple(more)))
        return Offers(tuple(found), tuple(wanted), exhausted=not (found or self._withheld))

    def _may_cede(self, block: AddressBlock, instance: str) -> bool:
        return (
            block.spec.state == "Active"
            and not block.spec.sticky.reservation
            and block.spec.holder.instance != instance
            and self._standings.get(block.metadata.name) is Standing.WELL
        )

    def _ceded(self, placed: PlacedBlock, parts: list[Interval]) -> Iterator[int]:
        """What is ceded, and no node leases."""
        name = placed.block.metadata.name
        leased = {parse(block.spec.first) for block in self._index.sub_blocks(name)}
        ceded = (parse(each) for each in placed.block.spec.ceded)
        return _inside((address for address in ceded if address not in leased), parts)

    def _take(self, space: str, addresses: Iterator[int], most: int) -> list[int]:
        taken: list[int] = []
        for address in addresses if most > 0 else ():
            if (space, address) in self._given:
                self._withheld = True
                continue
            taken.append(address)
            if len(taken) == most:
                break
        self._given |= {(space, address) for address in taken}
        return taken


def _whole(pool: AddressPool) -> Interval:
    range_ = parse_interface(pool.spec.range)[1]
    return Interval(range_.address, range_.last)


def _inside(addresses: Iterator[int], parts: list[Interval]) -> Iterator[int]:
    return (
        address
        for address in addresses
        if any(part.first <= address <= part.last for part in parts)
    )


def _published_free(placed: PlacedBlock) -> int:
    size = placed.interval.last - placed.interval.first + 1
    return size - placed.block.status.used - len(placed.block.spec.ceded)


def _is_idle(block: AddressBlock) -> bool:
    """Whether no node uses it, as far as its holder has published."""
    return not block.status.used and not block.spec.ceded


def _free(placed: PlacedBlock, parts: list[Interval]) -> Iterator[int]:
    """What its holder has not published as held, highest first, as nodes hand out the lowest."""
    block, (first, last) = placed.block, placed.interval
    spec = block.spec
    room = MOST_CEDED - len(spec.ceded) - len(spec.cede_wanted)
    gone = {first + int(offset) for offset in block.status.holders if offset.isdecimal()}
    gone |= {parse(each) for each in (*spec.ceded, *spec.cede_wanted, *spec.foreign)}
    free = (address for address in range(last, first - 1, -1) if address not in gone)
    return islice(_inside(free, parts), max(0, room))
