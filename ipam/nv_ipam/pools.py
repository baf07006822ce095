"""What this node may use of nv-ipam's pools, as its agent saw it last: a file beside the store.

The agent writes the file whenever a pool changes. Every ADD reads it within the transaction that
reserves, so after a change no ADD goes by the former content.
"""

import os
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import msgspec

from base import decoding
from base.files import read, write_atomically
from cni.spec.errors import CNIError, Code
from ipam.addresses import Interval, Network, parse, parse_interface, parse_interval, text
from ipam.confirmed import is_recent
from ipam.ranges import Range, merged

FILE = "nv-ipam.json"
OWN_FILE = "nv-ipam-own.json"
"""IPPools where podfabric leases the addresses: the two must not be taken for each other."""

ROUTED = "cidrpool/"
"""What the keys of CIDRPools begin with: their entries are prefixes, which nodes do not share."""


class NodePool(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A pool, and this node's part of it.

    `network` gives the mask; `first` to `last` are the node's entry, "" if it has none. `usable`
    are the runs of it that no other node uses. `beside` are addresses outside of the entry that
    pods of this node asked for by name. `routes` go through the gateway, in the result's order.

    `older` are pools that have addresses of the entry, too: these are not usable. Before more of
    the pool is used, the shares of `overlapping` ones are read, which may be gone already.

    `share` is the uid of the AddressShare by which the others leave all of this alone. It was last
    `confirmed` at that time of CLOCK_BOOTTIME in `boot`, and new pods get addresses for
    `max_offline` seconds from then.
    """

    key: str
    network: str
    first: str = ""
    last: str = ""
    gateway: str = ""
    excluded: tuple[str, ...] = ()
    routes: tuple[str, ...] = ()
    usable: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    older: tuple[str, ...] = ()
    overlapping: tuple[str, ...] = ()
    share: str = ""
    boot: str = ""
    confirmed: float = 0.0
    max_offline: float = 0.0

    def is_confirmed(self, boot: str, now: float) -> bool:
        """Whether new pods may get addresses of it at that time of CLOCK_BOOTTIME."""
        return is_recent((self.boot, self.confirmed), self.max_offline, boot, now)

    @property
    def is_left_to_older(self) -> bool:
        """Whether older pools have all of it that no other node uses: it is full, with a share or
        without one."""
        return bool(self.older) and not (self.usable or self.beside)

    @property
    def domain(self) -> str:
        """Where its addresses are unique: a network_name has no slash."""
        return domain_of(self.key)

    @property
    def entry(self) -> Interval | None:
        """The node's own addresses, exclusions included."""
        return Interval(parse(self.first), parse(self.last)) if self.first else None

    @property
    def subnet(self) -> Network:
        """`network`."""
        return parse_interface(self.network)[1]

    def range(self) -> Range:
        """The node's part: what may be handed out without being asked for by name."""
        return _range(self)

    def only(self, address: int, *, gateway: bool = True) -> Range:
        """A range of that one address."""
        hop = parse(self.gateway) if gateway and self.gateway else None
        return Range(
            network=self.subnet,
            first=address,
            last=address,
            gateway=hop,
            domain=self.domain,
            where=self.key,
        )


class NodePools(msgspec.Struct, frozen=True, kw_only=True):
    """All pools that the node's agent saw, by key. `node` is the name of the Node.

    Without `is_named`, an older agent's shares may be there, which do not name their machine: they
    are this machine's, since this file is. `gone` are pools that are deleted, and of which a pool
    that comes may have addresses: it counts them among those that overlap it.
    """

    node: str = ""
    pools: dict[str, NodePool] = {}
    is_named: bool = False
    gone: tuple[str, ...] = ()


class PoolsFile:
    """The file `name` in the directory of the node's store."""

    _writes: ClassVar[int] = (
        0  # of this process: a new file may have an earlier one's inode and time
    )

    def __init__(self, directory: Path, name: str = FILE) -> None:
        self._path = f"{directory}/{name}"

    @property
    def path(self) -> str:
        """Where it is."""
        return self._path

    def read(self) -> NodePools | None:
        """What the agent saw last; None before it has seen anything. CNIError 5 and 112."""
        try:
            writes = PoolsFile._writes
            status = os.stat(self._path)  # noqa: PTH116 - each ADD does this
            return _decoded(self._path, writes, status.st_mtime_ns, status.st_ino, status.st_size)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise CNIError(Code.IO_FAILURE, f"cannot read {self._path}: {error.strerror}") from None

    def write(self, pools: NodePools) -> None:
        """Replace it, durably. Raises OSError."""
        try:
            write_atomically(self._path, msgspec.json.encode(pools))
        finally:
            PoolsFile._writes += 1


def domain_of(key: str) -> str:
    """The domain of a pool's addresses in the store."""
    return f"nv-ipam/{key}"


def listed(intervals: tuple[Interval, ...]) -> tuple[str, ...]:
    """Intervals as texts: "10.0.0.1-10.0.0.9"."""
    return tuple(
        text(each.first) if each.first == each.last else f"{text(each.first)}-{text(each.last)}"
        for each in intervals
    )


@lru_cache(4)
def _decoded(path: str, writes: int, mtime: int, inode: int, size: int) -> NodePools:
    try:
        return decoding.decode(read(path), NodePools)
    except msgspec.MsgspecError as error:
        raise CNIError(
            Code.STORE_DAMAGED,
            f"{path} is damaged: {error}: remove it; the agent writes it again from the API server",
        ) from None


@lru_cache(128)
def _range(pool: NodePool) -> Range:
    entry = pool.entry
    assert entry is not None
    whole = Range(
        network=pool.subnet,
        first=entry.first,
        last=entry.last,
        excluded=merged(map(parse_interval, pool.excluded)),
        gateway=parse(pool.gateway) if pool.gateway else None,
        domain=pool.domain,
        where=pool.key,
    )
    return whole.restricted(map(parse_interval, pool.usable))
