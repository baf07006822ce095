"""The blocks of a pool: aligned runs of equal size, by their index, and the pool's map of them."""

import base64
from collections.abc import Iterable
from typing import NamedTuple

from ipam.addresses import Interval, Network, parse_interface
from ipam.cluster.names import block_name

MOST_MAPPED = 65_536  # blocks; a larger pool has no map


class Grid(NamedTuple):
    """A pool's range, cut into blocks of `size` addresses. Block 0 is the lowest."""

    network: Network
    size: int

    @classmethod
    def of(cls, range_: str, size: int) -> "Grid":
        """`range_` is a pool's CIDR; a block is at most as large as that. ValueError."""
        network = parse_interface(range_)[1]
        if size < 1 or size & (size - 1):
            raise ValueError(f"{size} addresses are no size of a block: it is a power of two")
        return cls(network, min(size, network.last - network.address + 1))

    @property
    def total(self) -> int:
        """How many blocks there are."""
        return (self.network.last - self.network.address + 1) // self.size

    @property
    def prefix(self) -> int:
        """A block's prefix length, as its address family writes it."""
        length = 128 - (self.size.bit_length() - 1)
        return Network(self.network.address, length).family_prefix

    def index_of(self, address: int) -> int:
        """The block that has an address of the range."""
        return (address - self.network.address) // self.size

    def block(self, index: int) -> Interval:
        """The addresses of a block."""
        first = self.network.address + index * self.size
        return Interval(first, first + self.size - 1)

    def name(self, space: str, index: int) -> str:
        """The name of the block's AddressBlock."""
        return block_name(space, self.block(index).first, self.prefix)

    def indexes(self, interval: Interval) -> range:
        """The blocks that have an address of `interval`."""
        first = max(interval.first, self.network.address)
        last = min(interval.last, self.network.last)
        if first > last:
            return range(0)
        return range(self.index_of(first), self.index_of(last) + 1)


def encoded_map(leased: Iterable[int], total: int) -> str:
    """`status.freeMap` of a pool: bit 0 of the first byte is block 0, a set bit is a leased block.

    "" if there are too many blocks.
    """
    if total > MOST_MAPPED:
        return ""
    bits = bytearray((total + 7) // 8)
    for index in leased:
        bits[index // 8] |= 1 << index % 8
    return base64.b64encode(bits).decode()


def decoded_map(free_map: str) -> bytes:
    """The bitmap in `status.freeMap`; it is a hint, so what cannot be read is empty."""
    try:
        return base64.b64decode(free_map, validate=True)
    except ValueError:
        return b""


def is_leased(bits: bytes, index: int) -> bool:
    """Whether the map says that the block is leased; a block behind its end is not."""
    return index // 8 < len(bits) and bool(bits[index // 8] >> index % 8 & 1)
