"""Where the blocks of a pool lie, and the bitmap of those that are leased.

Blocks are aligned: block 0 begins at the first address of the range, each has `block_size`
addresses.
"""

from base64 import b64decode, b64encode
from collections.abc import Iterable
from functools import lru_cache

import msgspec

from ipam.addresses import Interval, Network, parse_interface, parse_interval, text
from ipam.leases.names import block_name
from ipam.leases.objects import AddressBlock, AddressPool, PoolSpec
from ipam.ranges import merged, never_usable, of_network

MOST_MAPPED = 65_536  # blocks that a free map shows; a pool with more has none


class Geometry(msgspec.Struct, frozen=True):
    """A range, cut into blocks. `block_size` is a power of two, at most the range's size."""

    range: Network
    block_size: int

    @property
    def total(self) -> int:
        """How many blocks the range has."""
        return (self.range.last - self.range.address + 1) // self.block_size

    @property
    def prefix(self) -> int:
        """The prefix length of a block, as the range's family writes it."""
        length = 128 - (self.block_size.bit_length() - 1)
        return length - (self.range.prefix - self.range.family_prefix)

    def block(self, index: int) -> Interval:
        """The addresses of a block."""
        first = self.range.address + index * self.block_size
        return Interval(first, first + self.block_size - 1)

    def written(self, index: int) -> str:
        """The range of a block, as its object has it."""
        return f"{text(self.block(index).first)}/{self.prefix}"

    def index(self, address: int) -> int:
        """The index of the block with that address of the range."""
        return (address - self.range.address) // self.block_size

    def name(self, space: str, index: int) -> str:
        """The name of the AddressBlock."""
        return block_name(space, self.block(index).first, self.prefix)


def of_pool(pool: AddressPool) -> Geometry | None:
    """The geometry that a pool's status has decided; None if nothing is decided yet."""
    if not pool.status.block_size:
        return None
    return Geometry(parse_interface(pool.spec.range)[1], pool.status.block_size)


def interval(block: AddressBlock) -> Interval:
    """The addresses of a block. ValueError if its range is none, or has bits behind its prefix."""
    return _interval(block.spec.range)


@lru_cache(1 << 16)  # the controller asks for all blocks, again and again
def _interval(range_: str) -> Interval:
    address, network = parse_interface(range_)
    if address != network.address:
        raise ValueError(f"{range_} is not a network: it has bits behind its prefix")
    return Interval(address, network.last)


def why_wrong(block: AddressBlock, pool: AddressPool) -> str:
    """Why the block decides nothing, for the controller or another node; "" if all is right.

    Any node may write a block. So one counts only if its name, space, size and place are what the
    pool that it names says: then the name is the lock on just these addresses. While the pool's
    space or size is not decided, any will do.
    """
    spec, decided = block.spec, pool.status
    try:
        first, last = interval(block)
        range_ = _network(pool.spec.range)
    except ValueError as error:
        return str(error)
    size = last - first + 1
    right = block_name(block.space, first, parse_interface(spec.range)[1].family_prefix)
    if block.metadata.name != right:
        return f"a block of these addresses is named {right}"
    if decided.space and block.space != decided.space:
        return f"the pool's space is {decided.space}"
    if decided.block_size and size != decided.block_size:
        return f"it has {size} addresses, a block has {decided.block_size}"
    if first not in range_ or last not in range_:
        return f"it is not in the pool's range {pool.spec.range}"
    return ""


@lru_cache(4096)
def _network(range_: str) -> Network:
    """The range of a pool. ValueError."""
    return parse_interface(range_)[1]


def holes_of(spec: PoolSpec, range_: Network) -> tuple[Interval, ...]:
    """What no network of the pool may hand out. An exclude that cannot be read excludes nothing."""
    try:
        first, last = of_network(range_)
    except ValueError:  # a /31 or /32: only networks with use_all_addresses have addresses there
        first, last = range_.address, range_.last
    holes = [*never_usable(range_)]
    if first > range_.address:
        holes.append(Interval(range_.address, first - 1))
    if last < range_.last:
        holes.append(Interval(last + 1, range_.last))
    for each in spec.exclude:
        try:
            excluded = parse_interval(each)
        except ValueError:
            continue
        start, end = max(excluded.first, range_.address), min(excluded.last, range_.last)
        if start <= end:
            holes.append(Interval(start, end))
    return merged(holes)


def free_map(leased: Iterable[int], total: int) -> str:
    """The bitmap of leased blocks in base64: bit i % 8 (1 << i % 8) of byte i // 8 is block i."""
    bits = bytearray((total + 7) // 8)
    for index in leased:
        bits[index // 8] |= 1 << index % 8
    return b64encode(bits).decode()


def read_map(written: str, total: int) -> bytes:
    """The bitmap of a free map. ValueError if it is none of so many blocks."""
    bits = b64decode(written, validate=True)
    if len(bits) != (total + 7) // 8:
        raise ValueError(f"a free map of {len(bits)} bytes does not belong to {total} blocks")
    return bits


def is_leased(bits: bytes, index: int) -> bool:
    """What a bitmap says of a block; of one behind its end: no."""
    return index // 8 < len(bits) and bool(bits[index // 8] >> index % 8 & 1)
