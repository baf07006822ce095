"""Which prefix of a CIDRPool each node has, where nv-ipam's controller is gone (`own`).

Prefixes are given as nv-ipam does (pkg/ipam-controller/controllers/cidrpool): nodes in alphabetical
order get their static prefix, or the lowest one that is free. They are taken away with more care.
A prefix stays with its node as long as the node's machine may live, and goes to another node only
when no machine's AddressShare has an address of it: then no pod has one.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from itertools import islice, takewhile
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
    staying = list(map(prefix_of, entries.values()))
    taken = _Taken(staying, used)
    for entry in joined:
        network = prefix_of(entry)
        if entry.node not in selected or entry.node in entries or network in taken.given:
            continue
        if grid.fits(entry):
            entries[entry.node] = grid.entry(entry.node, network)
            taken.given.add(network)
        elif entry.node in grid.static:
            moving.append(entry)
    for entry in moving:  # to its static prefix, when that is free
        wanted = grid.static[entry.node]
        if not taken.is_free(wanted, entry.node) and grid.is_of_it(entry):
            entries[entry.node] = entry
            taken.given.add(prefix_of(entry))
    lacking = []
    shared = (run for own in used.values() for run in own)
    search = _Search(grid, (*map(_run, staying), *shared), taken.given)
    for node in sorted(set(present) & set(selected) - entries.keys()):
        found = grid.static.get(node)
        if found is not None:
            found = found if taken.is_free(found, node) else None
        else:
            former = grid.around(used.get(node, ()))
            mine = (each for each in former if taken.is_free(each, node))
            found = next((each for each in mine if grid.may_give(each)), None) or search.lowest()
        if found is None:
            lacking.append(node)
            continue
        entries[node] = grid.entry(node, found)
        taken.given.add(found)
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
        network = prefix_of(entry)
        is_in = network.prefix == self.prefix and network.address in self.whole
        return is_in and self.reserved.get(network, entry.node) == entry.node

    def fits(self, entry: NvCIDRPoolEntry) -> bool:
        """Whether the spec gives that node this prefix, or may."""
        network, static = prefix_of(entry), self.static.get(entry.node)
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
        holes = merged((*_meeting(self.excluded, network), *indexes))
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


class _Taken:
    """What of the pool is in use. All prefixes of a pool are of one size, but for entries that are
    `staying` since an earlier spec; `given` are those that nodes keep or get now."""

    def __init__(self, staying: Iterable[Network], used: Mapping[str, Iterable[Interval]]) -> None:
        self.given = set(staying)
        runs = [(_run(network), "") for network in self.given]
        runs += [(run, node) for node, own in used.items() for run in own]
        runs.sort()
        self._firsts = [run.first for run, _ in runs]
        # How far those up to each one go, and whose that is; and how far those of all others go.
        self._reach: list[tuple[int, str, int]] = []
        farthest, whose, second = -1, "", -1
        for run, node in runs:
            if node == whose:
                farthest = max(farthest, run.last)
            elif run.last > farthest:
                farthest, whose, second = run.last, node, farthest
            else:
                second = max(second, run.last)
            self._reach.append((farthest, whose, second))

    def is_free(self, network: Network, node: str) -> bool:
        """Whether no node is given it, or an entry an address of it, and no other node's share has
        one."""
        at = bisect_right(self._firsts, network.last)
        if network in self.given or not at:
            return network not in self.given
        farthest, whose, second = self._reach[at - 1]
        return (second if whose == node else farthest) < network.address


class _Search:
    """Looks for the lowest free prefix, again and again. It never goes back, and passes over what
    is `given` by then."""

    def __init__(self, grid: Grid, blocked: Iterable[Interval], given: Set[Network]) -> None:
        self._grid = grid
        static = (Interval(each.address, each.last) for each in grid.reserved)
        self._blocked = merged((*blocked, *static))
        self._given = given
        self._next = grid.whole.address

    def lowest(self) -> Network | None:
        """The lowest one; None if there is none."""
        grid = self._grid
        if grid.excludes_all:
            return None
        while self._next <= grid.whole.last:
            network = grid.at(self._next)
            hole = next(_meeting(self._blocked, network), None)
            behind = network.last + 1
            if hole is not None:
                self._next = max(behind, grid.at(min(hole.last + 1, grid.whole.last)).address)
                if hole.last >= grid.whole.last:
                    self._next = grid.whole.last + 1
                continue
            if network in self._given or grid.is_excluded(network):
                run = next(_meeting(grid.excluded, network), None)
                last = min(run.last + 1, grid.whole.last) if run is not None else 0
                self._next = max(behind, grid.at(last).address if last else 0)
                continue
            self._next = behind
            return network
        return None


def _meeting(runs: tuple[Interval, ...], network: Network) -> Iterator[Interval]:
    """Those of the sorted runs that have an address of the network, the first of them first."""
    at = bisect_left(runs, network.address, key=lambda run: run.last)
    return takewhile(lambda run: run.first <= network.last, islice(runs, at, None))


def _run(network: Network) -> Interval:
    return Interval(network.address, network.last)


def _runs(shares: Iterable[AddressShare]) -> Iterator[Interval]:
    return (run for share in shares for run in intervals(share))


def prefix_of(entry: NvCIDRPoolEntry) -> Network:
    """The prefix of an entry. Invalid if it is none: then it is not known what to leave alone."""
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
