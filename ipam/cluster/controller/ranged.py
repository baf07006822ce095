"""A pool with its range and space, and what the plans of all pools have in common."""

import msgspec

from ipam.addresses import Interval, Network
from ipam.cluster.controller.pool_conditions import is_ready
from ipam.cluster.objects import AddressPool

LEAST_NODES = 8
LARGEST_AUTOMATIC = 128


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a pool's status shall say. `block_size` 0: nothing was decided yet.

    `reason` and `message` are those of the condition Ready.
    """

    space: str = ""
    block_size: int = 0
    ready: bool = True
    reason: str = "Decided"
    message: str = ""


class Ranged(msgspec.Struct, frozen=True):
    """A pool and its range; `space` is the one that it has or gets."""

    pool: AddressPool
    range: Network
    space: str

    @property
    def name(self) -> str:
        return self.pool.metadata.name

    @property
    def interval(self) -> Interval:
        return Interval(self.range.address, self.range.last)

    @property
    def decided(self) -> int:
        """The block size that the status says."""
        return self.pool.status.block_size


def automatic_size(range_: Network, nodes: int) -> int:
    """The largest power of two of which each node can have four blocks; at least 1."""
    capacity = range_.last - range_.address + 1
    share = max(1, capacity // (4 * max(nodes, LEAST_NODES)))
    return min(LARGEST_AUTOMATIC, 1 << (share.bit_length() - 1))


def age(pool: AddressPool) -> tuple[str, str]:
    return pool.metadata.creation_timestamp, pool.metadata.name


def rank(each: Ranged) -> tuple[bool, bool, tuple[str, str]]:
    return not (each.decided and is_ready(each.pool)), not each.decided, age(each.pool)


def length(interval: Interval) -> int:
    return interval.last - interval.first + 1


def sized(each: Ranged, size: int, *, later: bool = False) -> Plan:
    """The pool with blocks of that size; `later`: another one that it names may take effect
    later."""
    written = each.pool.spec.block_size
    if size > length(each.interval):
        return refused(f"{each.pool.spec.range} is smaller than a block of {size} addresses")
    if written in (0, size):
        return Plan(space=each.space, block_size=size)
    if later or each.decided == size:
        message = f"spec.blockSize {written} takes effect when the pool has no block"
        return Plan(space=each.space, block_size=size, reason="BlockSizeLater", message=message)
    return refused(
        f"it overlaps a pool with blocks of {size} addresses: set spec.blockSize to {size}"
    )


def refused(why: str, reason: str = "BlockSizeDiffers") -> Plan:
    """Nothing is decided: so the pools that the pool overlaps need not wait for it."""
    return Plan(ready=False, reason=reason, message=why)


def paused(each: Ranged, reason: str, what: str) -> Plan:
    """The pool as it was decided, without claims until the change is made."""
    return Plan(
        space=each.pool.status.space,
        block_size=each.decided,
        ready=False,
        reason=reason,
        message=f"nodes may claim again in a few minutes, when {what}",
    )
