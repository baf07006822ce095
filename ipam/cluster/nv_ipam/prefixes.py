"""Which prefix of a CIDRPool each node has, where nv-ipam's controller is gone (`own`).

Prefixes are given as nv-ipam does (pkg/ipam-controller/controllers/cidrpool): nodes in alphabetical
order get their static prefix, or the lowest one that is free. They are taken away with more care.
A prefix stays with its node as long as the node's machine may live, and goes to another node only
when no machine's AddressShare has an address of it: then no pod has one.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from ipam.addresses import Interval, Network, family, parse, parse_interface, parse_interval, text
from ipam.cluster.nv_ipam.objects import (
    Invalid,
    NvCIDRPool,
    NvCIDRPoolEntry,
    StaticPrefix,
)
from ipam.cluster.nv_ipam.shares import intervals
from ipam.cluster.objects import AddressShare
from ipam.ranges import merged, outside


class Cut(NamedTuple):
    """Entries sorted by node, and the nodes for which no prefix is free."""

    entries: tuple[NvCIDRPoolEntry, ...]
    lacking: tuple[str, ...]


def cut(
    pool: NvCIDRPool,
    present: Collection[str],
    selected: Collection[str],
    shares: Iterable[AddressShare],
) -> Cut:
    """What `status.allocations` should be. Invalid, CNIError 6.

    `present` are the nodes of which there is a Node object, `selected` those that the pool is for.

    A node without a share has not joined: its entry stays, whatever the pool says now, since pods
    may have its addresses from nv-ipam's daemon.
    """
    grid = Grid.of(pool)
    by_node = defaultdict[str, list[AddressShare]](list)
    for share in shares:
        if share.spec.pool == pool.key:
            by_node[share.spec.node].append(share)
    used = {node: merged(_runs(own)) for node, own in by_node.items()}
    entries: dict[str, NvCIDRPoolEntry] = {}
    joined, moving = [], []
    for entry in pool.status.allocations or ():
        own = by_node.get(entry.node)
        if own is not None and entry.node in present:
            joined.append(entry)
        elif own is None or any(share.spec.state != "Reclaiming" for share in own):
            entries.setdefault(entry.node, entry)
    given = set(map(_network, entries.values()))
    for entry in joined:
        network = _network(entry)
        if entry.node not in selected or entry.node in entries or network in given:
            continue
        if grid.fits(entry):
            entries[entry.node] = grid.entry(entry.node, network)
            given.add(network)
        elif entry.node in grid.static:
            moving.append(entry)
    for entry in moving:  # to its static prefix, when that is free
        wanted = grid.static[entry.node]
        if not _is_free(wanted, entry.node, entries.values(), used) and grid.is_of_it(entry):
            entries[entry.node] = entry
    lacking = []
    shared = (run for own in used.values() for run in own)
    search = _Search(grid, (*_blocked(entries.values()), *shared))
    for node in sorted(set(present) & set(selected) - entries.keys()):
        found = grid.static.get(node)
        if found is not None:
            found = found if _is_free(found, node, entries.values(), used) else None
        else:
            former = grid.around(used.get(node, ()))
            mine = (each for each in former if _is_free(each, node, entries.values(), used))
            found = next((each for each in mine if grid.may_give(each)), None) or search.lowest()
        if found is None:
            lacking.append(node)
            continue
        entries[node] = grid.entry(node, found)
        search.take(found)
    ordered = tuple(entries[node] for node in sorted(entries))
    return Cut(ordered, tuple(lacking))


class Grid(NamedTuple):
    """The prefixes of a pool. `static` are those of nodes, `reserved` these and those of none."""

    whole: Network
    prefix: int
    gateway_index: int | None
    static: dict[str, Network]
    gateways: dict[str, str]
    reserved: dict[Network, str]
    excluded: tuple[Interval, ...]
    indexes: tuple[Interval, ...]

    @classmethod
    def of(cls, pool: NvCIDRPool) -> "Grid":
        """That of a pool. Invalid: nv-ipam refuses its spec, too."""
        spec, whole = pool.spec, pool.network
        if str(whole) != _canonical(spec.cidr):
            raise Invalid(f'"spec.cidr": {spec.cidr} has bits behind its prefix')
        length = spec.per_node_network_prefix
        prefix = length + (whole.prefix - whole.family_prefix)
        if not length > 0 or not whole.prefix <= prefix <= 128:
            raise Invalid(f'"spec.perNodeNetworkPrefix": {whole} has no /{length}')
        if spec.gateway_index is None and (spec.default_gateway or spec.routes):
            raise Invalid('"spec.gatewayIndex" is missing: routes need a gateway')
        static = [(each, _static(each, whole, prefix)) for each in spec.static_allocations or ()]
        named = [each.node for each, _ in static if each.node]
        reserved = {network: each.node for each, network in static}
        if len(named) > len(set(named)) or len(reserved) < len(static):
            raise Invalid('"spec.staticAllocations" names a node or a prefix twice')
        indexes = []
        for each in spec.per_node_exclusions or ():
            if not 0 <= each.start_index <= each.end_index < 1 << (128 - prefix):
                raise Invalid(
                    f'"spec.perNodeExclusions": {each.start_index} to {each.end_index} are not '
                    f"indexes of a /{length}"
                )
            indexes.append(Interval(each.start_index, each.end_index))
        grid = cls(
            whole,
            prefix,
            spec.gateway_index,
            {each.node: network for each, network in static if each.node},
            {each.node: each.gateway for each, _ in static if each.gateway},
            reserved,
            merged(_excluded(pool, whole)),
            merged(indexes),
        )
        if spec.gateway_index is not None and not grid._indexed(grid.at(whole.address)):
            raise Invalid(f'"spec.gatewayIndex": {spec.gateway_index} is outside of a /{length}')
        return grid

    @property
    def excludes_all(self) -> bool:
        """Whether the indexes that are excluded of each prefix leave no address of it."""
        return self._replace(excluded=()).is_excluded(self.at(self.whole.address))

    @property
    def size(self) -> int:
        """How many addresses a prefix has."""
        return 1 << (128 - self.prefix)

    def at(self, address: int) -> Network:
        """The prefix that has the address."""
        return Network(address - (address - self.whole.address) % self.size, self.prefix)

    def around(self, runs: Iterable[Interval]) -> Iterator[Network]:
        """The prefixes in which the runs begin, those of the pool."""
        return (self.at(run.first) for run in runs if run.first in self.whole)

    def is_of_it(self, entry: NvCIDRPoolEntry) -> bool:
        """Whether the entry is a prefix of the pool, and no other node's static one."""
        network = _network(entry)
        is_in = network.prefix == self.prefix and network.address in self.whole
        return is_in and self.reserved.get(network, entry.node) == entry.node

    def fits(self, entry: NvCIDRPoolEntry) -> bool:
        """Whether the spec gives that node this prefix, or may."""
        network, static = _network(entry), self.static.get(entry.node)
        if static is not None:
            return network == static
        return self.is_of_it(entry) and not self.is_excluded(network)

    def may_give(self, network: Network) -> bool:
        """Whether a node without a static prefix may get it."""
        return network not in self.reserved and not self.is_excluded(network)

    def is_excluded(self, network: Network) -> bool:
        """Whether the exclusions leave no address of it, the network's own included, as nv-ipam
        counts; IPv4's broadcast is not looked at."""
        last = network.last
        if family(network.address) == 4 and network.prefix < 127:
            last -= 1
        indexes = (Interval(network.address + a, network.address + b) for a, b in self.indexes)
        holes = merged((*self.excluded, *indexes))
        return not any(outside(Interval(network.address, last), holes))

    def entry(self, node: str, network: Network) -> NvCIDRPoolEntry:
        """The node's entry, with its gateway."""
        gateway = self.gateways.get(node, "") if self.static.get(node) == network else ""
        return NvCIDRPoolEntry(
            node=node, prefix=str(network), gateway=gateway or self._indexed(network)
        )

    def _indexed(self, network: Network) -> str:
        """The gateway by its index; "" without one (GetGatewayForSubnet of nv-ipam)."""
        index = self.gateway_index
        if index is None:
            return ""
        first, last = 1, self.size - (2 if family(network.address) == 4 else 1)
        if self.prefix >= 127:
            first, last = 0, self.size - 1
        return text(network.address + index) if first <= index <= last else ""


class _Search:
    """Looks for the lowest free prefix, again and again. It never goes back."""

    def __init__(self, grid: Grid, blocked: Iterable[Interval]) -> None:
        self._grid = grid
        static = (Interval(each.address, each.last) for each in grid.reserved)
        self._blocked = merged((*blocked, *static))
        self._given: set[Network] = set()
        self._next = grid.whole.address

    def take(self, network: Network) -> None:
        """It is given away."""
        self._given.add(network)

    def lowest(self) -> Network | None:
        """The lowest one; None if there is none."""
        grid = self._grid
        if grid.excludes_all:
            return None
        while self._next <= grid.whole.last:
            network = grid.at(self._next)
            hole = _first_after(self._blocked, network)
            behind = network.last + 1
            if hole is not None:
                self._next = max(behind, grid.at(min(hole.last + 1, grid.whole.last)).address)
                if hole.last >= grid.whole.last:
                    self._next = grid.whole.last + 1
                continue
            if network in self._given or grid.is_excluded(network):
                run = _first_after(grid.excluded, network)
                last = min(run.last + 1, grid.whole.last) if run is not None else 0
                self._next = max(behind, grid.at(last).address if last else 0)
                continue
            self._next = behind
            return network
        return None


def _first_after(runs: tuple[Interval, ...], network: Network) -> Interval | None:
    """The first of the sorted runs that has an address of the network."""
    at = bisect_left(runs, network.address, key=lambda run: run.last)
    found = runs[at] if at < len(runs) else None
    return found if found is not None and found.first <= network.last else None


def _is_free(
    network: Network,
    node: str,
    entries: Iterable[NvCIDRPoolEntry],
    used: dict[str, tuple[Interval, ...]],
) -> bool:
    """Whether no entry has an address of it, and no other node's share."""
    mine = Interval(network.address, network.last)
    others = [run for other, runs in used.items() if other != node for run in runs]
    return not any(_touch(mine, run) for run in (*_blocked(entries), *others))


def _blocked(entries: Iterable[NvCIDRPoolEntry]) -> Iterator[Interval]:
    return (Interval(each.address, each.last) for each in map(_network, entries))


def _touch(one: Interval, other: Interval) -> bool:
    return one.first <= other.last and other.first <= one.last


def _runs(shares: Iterable[AddressShare]) -> Iterator[Interval]:
    return (run for share in shares for run in intervals(share))


def _network(entry: NvCIDRPoolEntry) -> Network:
    """Invalid if it is none: then it is not known what to leave alone."""
    try:
        return parse_interface(entry.prefix)[1]
    except ValueError as error:
        raise Invalid(f'"status.allocations" of {entry.node}: {error}') from None


def _static(each: StaticPrefix, whole: Network, prefix: int) -> Network:
    where = '"spec.staticAllocations"'
    try:
        address, network = parse_interface(each.prefix)
        gateway = parse(each.gateway) if each.gateway else network.address
    except ValueError as error:
        raise Invalid(f"{where}: {error}") from None
    if address != network.address or network.prefix != prefix or address not in whole:
        raise Invalid(f"{where}: {each.prefix} is none of the prefixes of {whole}")
    if gateway not in network:
        raise Invalid(f"{where}: the gateway {each.gateway} is outside of {each.prefix}")
    return network


def _excluded(pool: NvCIDRPool, whole: Network) -> Iterator[Interval]:
    for each in pool.spec.exclusions or ():
        try:
            run = parse_interval(f"{each.start}-{each.end}")
        except ValueError as error:
            raise Invalid(f'"spec.exclusions": {error}') from None
        if run.first not in whole or run.last not in whole:
            raise Invalid(f'"spec.exclusions": {each.start} to {each.end} are not all in {whole}')
        yield run


def _canonical(written: str) -> str:
    address, network = parse_interface(written)
    return f"{text(address)}/{network.family_prefix}"
