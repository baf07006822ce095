"""Divides pools into blocks, and names pools and blocks.

Block 0 begins at the first address of the range. A block's name is the lock on the block's
addresses. Nodes that claim the same addresses must use the same name. So the name consists only of
the space, the first address in canonical text, and the prefix length.
"""

import hashlib
import re
from base64 import b64decode, b64encode
from collections.abc import Iterable
from functools import lru_cache

import msgspec

from ipam.addresses import Interval, Network, parse_interface, parse_interval, text
from ipam.leases.objects import AddressBlock, AddressPool, PoolSpec
from ipam.ranges import merged, never_usable, of_network

MOST_MAPPED = 65_536  # blocks of the largest pool with a free map
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_MOST_LABEL = 40  # characters of a network name; a longer name is hashed
_HASH = 10


class Geometry(msgspec.Struct, frozen=True):
    """A range divided into blocks. `block_size` is a power of two, at most the range's size."""

    range: Network
    block_size: int

    @property
    def total(self) -> int:
        return (self.range.last - self.range.address + 1) // self.block_size

    @property
    def prefix(self) -> int:
        """The prefix length of a block, at most 32 for IPv4."""
        length = 128 - (self.block_size.bit_length() - 1)
        return length - (self.range.prefix - self.range.family_prefix)

    def block(self, index: int) -> Interval:
        first = self.range.address + index * self.block_size
        return Interval(first, first + self.block_size - 1)

    def written(self, index: int) -> str:
        """`spec.range` of the block's object."""
        return f"{text(self.block(index).first)}/{self.prefix}"

    def index(self, address: int) -> int:
        return (address - self.range.address) // self.block_size

    def name(self, space: str, index: int) -> str:
        return block_name(space, self.block(index).first, self.prefix)


def of_pool(pool: AddressPool) -> Geometry | None:
    """Returns `None` if no block size is decided yet."""
    if not pool.status.block_size:
        return None
    return Geometry(parse_interface(pool.spec.range)[1], pool.status.block_size)


def interval(block: AddressBlock) -> Interval:
    """The addresses of a block. Raises ValueError if `spec.range` is not a network."""
    return _interval(block.spec.range)


@lru_cache(1 << 16)  # the controller needs all blocks in each round
def _interval(range_: str) -> Interval:
    address, network = parse_interface(range_)
    if address != network.address:
        raise ValueError(f"{range_} has host bits set: write a network address")
    return Interval(address, network.last)


def why_wrong(block: AddressBlock, pool: AddressPool) -> str:
    """The reason why a block must be ignored, or "".

    Any node may write a block. The name, space, size and range of a valid block match its pool. So
    the name of a valid block locks exactly the block's addresses. If the pool's space or block size
    is undecided, any value matches.
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
        return f"it has {size} addresses, a block of the pool has {decided.block_size}"
    if first not in range_ or last not in range_:
        return f"it is not in the pool's range {pool.spec.range}"
    return ""


@lru_cache(4096)
def _network(range_: str) -> Network:
    return parse_interface(range_)[1]


def holes_of(spec: PoolSpec, range_: Network) -> tuple[Interval, ...]:
    """The range's addresses that no pod gets. Skips unreadable entries of `spec.exclude`."""
    try:
        first, last = of_network(range_)
    except ValueError:  # a /31 or /32, for use_all_addresses only
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
    """A bitmap of the leased blocks, in base64. Block i is bit i % 8 of byte i // 8. Bit 0 is the
    lowest."""
    bits = bytearray((total + 7) // 8)
    for index in leased:
        bits[index // 8] |= 1 << index % 8
    return b64encode(bits).decode()


def read_map(written: str, total: int) -> bytes:
    """Decode a free map. Raises ValueError if the map is not for `total` blocks."""
    bits = b64decode(written, validate=True)
    if len(bits) != (total + 7) // 8:
        raise ValueError(
            f"the free map has {len(bits)} bytes, which is not the size for {total} blocks"
        )
    return bits


def is_leased(bits: bytes, index: int) -> bool:
    """Returns False for a block beyond the end of the bitmap."""
    return index // 8 < len(bits) and bool(bits[index // 8] >> index % 8 & 1)


def pool_name(network_name: str, range_: str, *, shared: bool = True) -> str:
    """The name of an AddressPool, such as "blue-10.64.0.0-16". `range_` is canonical."""
    address, _, prefix = range_.partition("/")
    body = f"{_part(address)}-{prefix}"
    name = f"{_label(network_name)}-{body}" if network_name else body
    name = name if shared else f"{name}-private"
    # A DNS-1123 subdomain begins with a letter or digit.
    return name if name[0].isalnum() else f"p{name}"


def space_name(network_name: str, range_: str, *, shared: bool = True) -> str:
    """The name of a pool's space. Each private range has a separate space."""
    label = _label(network_name) if network_name else "default"
    return label if shared else f"{label}-{_hash(range_)}"


def block_name(space: str, first: int, prefix: int) -> str:
    """The name of an AddressBlock, such as "blue.10.64.3.64-27". IPv6 has "-" instead of ":"."""
    return f"{space}.{_part(text(first))}-{prefix}"


def _part(address: str) -> str:
    part = address.replace(":", "-")
    if part.startswith("-"):
        part = f"0{part}"
    return f"{part}0" if part.endswith("-") else part


def _label(network_name: str) -> str:
    if _LABEL.fullmatch(network_name) and len(network_name) <= _MOST_LABEL:
        return network_name
    return f"n-{_hash(network_name)}"


def _hash(value: str) -> str:
    return hashlib.sha256(value.encode()).hexdigest()[:_HASH]
