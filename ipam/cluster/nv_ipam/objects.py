"""nv-ipam's IPPool and CIDRPool (nv-ipam.nvidia.com/v1alpha1), and a node's part of one.

Both kinds count `perNodeExclusions` differently: an IPPool from the first address of the node's
entry, a CIDRPool from the network address of its prefix. Their schema checks little, so what is
wrong raises Invalid here.
"""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from ipam.addresses import Interval, Network, family, parse, parse_interface, text
from ipam.cluster.nv_ipam.selectors import NodeSelector
from ipam.cluster.objects import Resource
from ipam.nv_ipam.pools import NodePool, listed
from ipam.ranges import merged

API = "nv-ipam.nvidia.com/v1alpha1"


class Invalid(ValueError):
    """The pool cannot be used. The text names the key."""


class Entry(NamedTuple):
    """What the controller gave a node. The gateway is a CIDRPool's: each entry has its own."""

    node: str
    interval: Interval
    network: Network
    gateway: str = ""


class ExcludedRun(
    msgspec.Struct, frozen=True, kw_only=True, rename={"start": "startIP", "end": "endIP"}
):
    """Addresses that no node hands out."""

    start: str
    end: str


class ExcludedIndexes(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The same by index, in each node's entry."""

    start_index: int
    end_index: int


class PoolRoute(msgspec.Struct, frozen=True):
    """A route through the gateway."""

    dst: str


class NvIPPoolSpec(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """As far as it is read. nv-ipam's controller cuts the subnet into runs of `per_node_block_size`
    addresses, the first of which begins with the first address of a host."""

    subnet: str
    per_node_block_size: int = 0
    node_selector: NodeSelector | None = None
    gateway: str = ""
    exclusions: tuple[ExcludedRun, ...] | None = None
    per_node_exclusions: tuple[ExcludedIndexes, ...] | None = None
    default_gateway: bool = False
    routes: tuple[PoolRoute, ...] | None = None


class NvIPPoolEntry(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={"node": "nodeName", "start": "startIP", "end": "endIP"},
):
    """A node's run of addresses."""

    node: str
    start: str
    end: str


class NvIPPoolStatus(msgspec.Struct, frozen=True):
    allocations: tuple[NvIPPoolEntry, ...] | None = None


class NvIPPool(Resource, frozen=True, kw_only=True):
    """One subnet for all nodes, a run of it for each."""

    API = API
    KIND = "IPPool"
    PLURAL = "ippools"

    spec: NvIPPoolSpec
    status: NvIPPoolStatus = NvIPPoolStatus()

    @property
    def key(self) -> str:
        """As definitions name it."""
        return f"ippool/{self.metadata.name}"

    def entries(self, node: str = "") -> Iterator[Entry]:
        """The nodes' entries, or those of one: no other is looked at then. Invalid."""
        network = self.network
        for each in self.status.allocations or ():
            if node not in ("", each.node):
                continue
            run = _run("status.allocations", each.start, each.end)
            if run.first not in network or run.last not in network:
                raise Invalid(f'"status.allocations" of {each.node} is outside of "spec.subnet"')
            yield Entry(each.node, run, network, self.spec.gateway)

    @property
    def network(self) -> Network:
        """The whole pool's. Invalid."""
        return _network("spec.subnet", self.spec.subnet)


class StaticPrefix(msgspec.Struct, frozen=True, kw_only=True, rename={"node": "nodeName"}):
    """A prefix that is for one node; for none, if `node` is "". Without a gateway it has that of
    the pool's index."""

    prefix: str
    node: str = ""
    gateway: str = ""


class NvCIDRPoolSpec(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """`cidr` is cut into prefixes of that length. The gateway of each is its address of that index,
    from 0 at the network address."""

    cidr: str
    per_node_network_prefix: int = 0
    gateway_index: int | None = None
    static_allocations: tuple[StaticPrefix, ...] | None = None
    node_selector: NodeSelector | None = None
    exclusions: tuple[ExcludedRun, ...] | None = None
    per_node_exclusions: tuple[ExcludedIndexes, ...] | None = None
    default_gateway: bool = False
    routes: tuple[PoolRoute, ...] | None = None


class NvCIDRPoolEntry(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename={"node": "nodeName"}
):
    """A node's prefix, with the gateway of it."""

    node: str
    prefix: str
    gateway: str = ""


class NvCIDRPoolStatus(msgspec.Struct, frozen=True):
    allocations: tuple[NvCIDRPoolEntry, ...] | None = None


class NvCIDRPool(Resource, frozen=True, kw_only=True):
    """A routed prefix for each node."""

    API = API
    KIND = "CIDRPool"
    PLURAL = "cidrpools"

    spec: NvCIDRPoolSpec
    status: NvCIDRPoolStatus = NvCIDRPoolStatus()

    @property
    def key(self) -> str:
        """As definitions name it."""
        return f"cidrpool/{self.metadata.name}"

    def entries(self, node: str = "") -> Iterator[Entry]:
        """The nodes' entries, or those of one: no other is looked at then. Invalid."""
        whole = self.network
        for each in self.status.allocations or ():
            if node not in ("", each.node):
                continue
            network = _network("status.allocations", each.prefix)
            if network.address not in whole or network.last not in whole:
                raise Invalid(f'"status.allocations" of {each.node} is outside of "spec.cidr"')
            yield Entry(each.node, _hosts(network), network, each.gateway)

    @property
    def network(self) -> Network:
        """The whole pool's. Invalid."""
        return _network("spec.cidr", self.spec.cidr)


NvPool = NvIPPool | NvCIDRPool


def node_pool(pool: NvPool, node: str) -> NodePool:
    """The node's part of a pool; nothing of it is usable yet. Invalid."""
    own = next(pool.entries(node), None)
    network = own.network if own else pool.network
    gateway = own.gateway if own else getattr(pool.spec, "gateway", "")
    if gateway and _address("gateway", gateway) not in network:
        raise Invalid(f'"gateway" {gateway} is outside of {network}')
    return NodePool(
        key=pool.key,
        network=str(network),
        first=text(own.interval.first) if own else "",
        last=text(own.interval.last) if own else "",
        gateway=text(parse(gateway)) if gateway else "",
        excluded=listed(tuple(_excluded(pool, own))) if own else (),
        routes=_routes(pool, network),
    )


def entry_with(pool: NvPool, address: int) -> Entry | None:
    """The entry that has the address, whoever's it is."""
    try:
        found = (each for each in pool.entries() if _has(each.interval, address))
        return next(found, None)
    except Invalid:
        return None


def elsewhere(pool: NvPool, node: str) -> tuple[int, int]:
    """How many other nodes have an entry, and how many addresses these have."""
    try:
        others = [each.interval for each in pool.entries() if each.node != node]
    except Invalid:
        return 0, 0
    return len(others), sum(run.last - run.first + 1 for run in others)


def allotted(pool: NodePool) -> tuple[Interval, ...]:
    """The addresses that the entry gives this node. The gateway of an IPPool belongs to no node."""
    entry = pool.entry
    if entry is None:
        return ()
    if pool.key.startswith("ippool/") and pool.gateway:
        gateway = parse(pool.gateway)
        if entry.first <= gateway <= entry.last:
            halves = (Interval(entry.first, gateway - 1), Interval(gateway + 1, entry.last))
            return tuple(half for half in halves if half.first <= half.last)
    return (entry,)


def excluded_runs(pool: NvPool) -> list[Interval]:
    """What no node hands out. Invalid."""
    return [_run("spec.exclusions", each.start, each.end) for each in pool.spec.exclusions or ()]


def _excluded(pool: NvPool, own: Entry) -> tuple[Interval, ...]:
    runs = excluded_runs(pool)
    origin = own.interval.first if isinstance(pool, NvIPPool) else own.network.address
    for each in pool.spec.per_node_exclusions or ():
        runs.append(Interval(origin + each.start_index, origin + each.end_index))
    clamped = (
        Interval(max(run.first, own.interval.first), min(run.last, own.interval.last))
        for run in runs
    )
    return merged(run for run in clamped if run.first <= run.last)


def _routes(pool: NvPool, network: Network) -> tuple[str, ...]:
    """Sorted by address and mask, each once, as nv-ipam answers them."""
    found = {_network("spec.routes", each.dst) for each in pool.spec.routes or ()}
    if pool.spec.default_gateway:
        default = "0.0.0.0/0" if family(network.address) == 4 else "::/0"
        found.add(parse_interface(default)[1])
    return tuple(str(each) for each in sorted(found))


def _has(run: Interval, address: int) -> bool:
    return run.first <= address <= run.last


def _hosts(network: Network) -> Interval:
    """Which addresses of a prefix hosts have: not the network's, and in IPv4 no broadcast."""
    if network.prefix >= 127:
        return Interval(network.address, network.last)
    return Interval(network.address + 1, network.last - (family(network.address) == 4))


def _network(key: str, written: str) -> Network:
    try:
        return parse_interface(written)[1]
    except ValueError as error:
        raise Invalid(f'"{key}": {error}') from None


def _address(key: str, written: str) -> int:
    try:
        return parse(written)
    except ValueError as error:
        raise Invalid(f'"{key}": {error}') from None


def _run(key: str, first: str, last: str) -> Interval:
    run = Interval(_address(key, first), _address(key, last))
    if run.first > run.last or family(run.first) != family(run.last):
        raise Invalid(f'"{key}": {first} to {last} are not the first and last address of a run')
    return run
