"""Translates a definition of type `nv-ipam` into IpamOptions and range sets.

The `ipam` object has nv-ipam's keys (pkg/cni/types/types.go). Unknown keys are ignored, as in
nv-ipam.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from base import decoding
from base.files import read as read_file
from cni.spec import limits
from cni.spec.config import NetworkConfig, convert
from cni.spec.errors import CNIError, Code, invalid_config
from cni.spec.request import Arguments
from ipam.addresses import Interval, Network, family, parse, parse_interface, parse_interval, text
from ipam.config.options import MOST_ADDRESSES, IpamOptions, fixed_set
from ipam.ranges import Range, RangeSet, is_within, merged, outside

DOMAIN = "nv-ipam/pools"
"""The domain of all pools. No definition has this domain, because a network_name has no slash."""
LARGEST_BLOCK = 256  # addresses; only the first ones of a larger prefix are used
MOST_PREFIXES = 4096  # nodes use only this number of prefixes of a CIDRPool, the lowest

TYPE = "nv-ipam"
KINDS = ("ippool", "cidrpool")

T = TypeVar("T")


class NvIpamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a call. Only one of `requested`, `gateway` and `index` may be set."""

    pools: tuple[str, ...]  # "ippool/NAME"; a pod gets one address of each, in this order
    requested: tuple[tuple[str, int], ...] = ()  # JSON path, address
    gateway: bool = False  # requests the pool's gateway
    index: int | None = None  # requests the address at this index of the node's part


_Addresses = Annotated[tuple[str, ...], Meta(max_length=limits.ADDRESSES)]


class _PoolNames(msgspec.Struct, frozen=True):
    poolName: str = ""
    poolType: str = ""


class _PodWishes(msgspec.Struct, frozen=True):
    ips: _Addresses = ()
    poolNames: Annotated[tuple[str, ...], Meta(max_length=MOST_ADDRESSES)] = ()
    poolType: str = ""
    allocateDefaultGateway: bool = False
    allocateIPWithIndex: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None


def is_nv_ipam(network: NetworkConfig) -> bool:
    ipam = network.keys.get("ipam")
    return isinstance(ipam, dict) and ipam.get("type") == TYPE


def read_options(network: NetworkConfig, arguments: Arguments) -> NvIpamOptions:
    """The options of a call. Raises CNIError 7, or 4 for CNI_ARGS."""
    names, wishes, of_runtime = network.derived(_written)
    requested = _requested(of_runtime, wishes.ips, arguments)
    used = {
        "ips": bool(requested),
        "allocateDefaultGateway": wishes.allocateDefaultGateway,
        "allocateIPWithIndex": wishes.allocateIPWithIndex is not None,
    }
    named = [key for key, is_used in used.items() if is_used]
    if len(named) > 1:
        raise invalid_config(f'"{named[0]}" and "{named[1]}" cannot be used together: remove one')
    return NvIpamOptions(
        pools=_pools(names, wishes, network.network),
        requested=requested,
        gateway=wishes.allocateDefaultGateway,
        index=wishes.allocateIPWithIndex,
    )


def _written(network: NetworkConfig) -> tuple[_PoolNames, _PodWishes, tuple[str, ...]]:
    """The sections `ipam` and `args.cni` of a configuration, and the `runtimeConfig` addresses."""

    def part(path: str, shape: type[T]) -> T:
        section = network.at(path, dict[str, Any]) or {}
        present = {key: value for key, value in section.items() if value is not None}
        return convert(present, shape, path)

    of_runtime: tuple[str, ...] = network.at("runtimeConfig.ips", _Addresses) or ()
    return part("ipam", _PoolNames), part("args.cni", _PodWishes), of_runtime


def _pools(ipam: _PoolNames, wishes: _PodWishes, network: str) -> tuple[str, ...]:
    where, names = "args.cni.poolNames", wishes.poolNames
    if not names:
        where, names = "ipam.poolName", tuple((ipam.poolName or network).split(","))
    kind = wishes.poolType or ipam.poolType or KINDS[0]
    if kind.lower() not in KINDS:
        raise invalid_config(f'"poolType" is "{kind}": set {" or ".join(KINDS)}')
    stripped = [name.strip() for name in names]
    wrong = next((name for name in stripped if not name or "/" in name), None)
    if wrong is not None:
        raise invalid_config(
            f'"{where}" has "{wrong}", which cannot be the name of a pool: correct the name'
        )
    keys = tuple(f"{kind.lower()}/{name}" for name in stripped)
    if len(keys) > MOST_ADDRESSES:
        raise invalid_config(
            f'"{where}": one attachment may use at most {MOST_ADDRESSES} pools: remove some pools'
        )
    if len(set(keys)) < len(keys):
        raise invalid_config(f'"{where}" names a pool twice: name each pool once')
    return keys


def _requested(
    of_runtime: Sequence[str], of_pod: Sequence[str], arguments: Arguments
) -> tuple[tuple[str, int], ...]:
    """Reads the first place that has addresses. Ignores prefix lengths, as nv-ipam does."""
    where, ips, code = "runtimeConfig.ips", of_runtime, Code.INVALID_CONFIG
    if not ips:
        where, ips = "args.cni.ips", of_pod
    if not ips and arguments.ip:
        where, code = "CNI_ARGS IP", Code.INVALID_ENVIRONMENT
        ips = [ip.strip() for ip in arguments.ip.split(",")]
    found = []
    for ip in ips:
        try:
            found.append((where, parse(ip.partition("/")[0])))
        except ValueError as error:
            raise CNIError(code, f'"{where}": {error}') from None
    return tuple(dict.fromkeys(found))


class NodePool(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The node's part of a pool."""

    network: str  # of the whole pool
    key: str = ""
    usable: bool = True  # if not, pods get no address of the pool
    gateway: str = ""  # of an IPPool, or of `own`
    excluded: tuple[str, ...] = ()  # runs of addresses, such as "10.0.0.1-10.0.0.9"
    others: tuple[str, ...] = ()  # runs of addresses that other nodes have
    routes: tuple[str, ...] = ()
    prefix: int = 0  # of a CIDRPool: the length of each node's prefix, of 128 bits
    index: int | None = None  # of the gateway in each prefix
    own: str = ""  # the node's prefix; "": not decided yet

    @property
    def subnet(self) -> Network:
        return parse_interface(self.network)[1]

    def prefix_at(self, address: int) -> Network:
        """The network that a result shows for the address."""
        bits = 128 - self.prefix
        return Network(address >> bits << bits, self.prefix) if self.prefix else self.subnet

    def gateway_of(self, network: Network) -> int | None:
        if self.gateway:
            return parse(self.gateway)
        return None if self.index is None else network.address + self.index


class NodePools(msgspec.Struct, frozen=True, kw_only=True):
    """All pools of a node."""

    pools: dict[str, NodePool] = {}  # by key
    store: str = ""  # the id of the store with the imported reservations
    why: str = ""  # the reason why no pod gets an address now


def pools_file(directory: Path) -> str:
    return f"{directory}/nv-ipam.json"


def read_pools(directory: Path) -> NodePools | None:
    """`None` if the agent has read no pools yet. Raises CNIError 5 or 112."""
    path = pools_file(directory)
    try:
        return _decoded(path, read_file(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CNIError(
            Code.IO_FAILURE, f"cannot read {path}: {error.strerror}: see that root can read it"
        ) from None


@lru_cache(4)
def _decoded(path: str, content: bytes) -> NodePools:
    try:
        return decoding.decode(content, NodePools)
    except msgspec.MsgspecError as error:
        raise CNIError(
            Code.STORE_DAMAGED,
            f"{path} is damaged: {error}: remove this file; the agent then writes a new file",
        ) from None


class PoolRange(Range, frozen=True, kw_only=True):
    """Addresses of a pool. A result shows the address with the network of `NodePool.prefix_at`."""

    pool: NodePool
    is_gateway: bool = False

    def restricted(self, intervals: Iterable[Interval]) -> Range:
        """Like Range.restricted, and then limited to the network of the first address."""
        parts = merged(part for interval in intervals for part in self.within(interval))
        network = self.pool.prefix_at(parts[0].first if parts else self.first)
        whole = Range(
            network=network,
            first=network.address,
            last=network.last,
            gateway=None if self.is_gateway else self.pool.gateway_of(network),
            routes=self.pool.routes,
            domain=DOMAIN,
            where=self.where,
        )
        return whole.restricted(parts)


def translate(
    config: NetworkConfig, arguments: Arguments, known: NodePools | None
) -> tuple[IpamOptions, tuple[RangeSet, ...]]:
    """The options and the range sets of a call.

    Raises CNIError 7 for a request that the pools cannot satisfy, 4 for wrong CNI_ARGS, 11 if the
    pools are not ready, and 111 for an address of another node.
    """
    why = "this node has not read nv-ipam's pools yet" if known is None else known.why
    if known is None or why:
        raise CNIError(
            Code.TRY_AGAIN,
            f"nv-ipam's pools cannot be used yet ({why}): nothing was reserved; read the agent's "
            'log, and check that "ipam.nv_ipam" is true in config.yaml, or in the chart\'s values',
        )
    asked = read_options(config, arguments)
    pools = [_pool(key, known) for key in asked.pools]
    sets = tuple(_set(pool, asked) for pool in pools)
    given = {each.ranges[0].first for each in sets if each.fixed}
    for where, address in asked.requested:
        if address not in given:
            raise invalid_config(
                f'"{where}": {text(address)} is in no pool of the network, or shares its pool with '
                "another requested address: request at most one address of each of its pools"
            )
    plain = tuple(RangeSet((range_of(pool),)) for pool in pools)
    return IpamOptions(sets=plain, network_name=DOMAIN, pools=asked.pools), sets


def declared(config: NetworkConfig, arguments: Arguments) -> tuple[IpamOptions, Sequence[RangeSet]]:
    """The names of pools and the requested addresses. Reads no pool. Raises CNIError 7 or 4."""
    asked = read_options(config, arguments)
    sets = tuple(
        fixed_set(each, Network(each, 128), domain=DOMAIN, gateway=None, where=where)
        for where, each in asked.requested
    )
    return IpamOptions(network_name=DOMAIN, pools=asked.pools), sets


def _pool(key: str, known: NodePools) -> NodePool:
    pool = known.pools.get(key)
    if pool is None or not pool.usable:
        raise CNIError(
            Code.TRY_AGAIN,
            f"{key} has no addresses for this node: nothing was reserved; check that nv-ipam "
            "has this pool, and that the pool is valid and selects this node (the agent's log "
            "has the reason)",
        )
    return pool


def _set(pool: NodePool, asked: NvIpamOptions) -> RangeSet:
    if asked.index is not None and not pool.prefix:
        raise invalid_config(
            f'"args.cni.allocateIPWithIndex" does not work with {pool.key}, because a node may '
            'lease several blocks of an IPPool: request an address in "args.cni.ips" instead'
        )
    for where, address in asked.requested:
        if address in pool.subnet:
            return RangeSet((_requested_range(pool, where, address),), fixed=True)
    found = range_of(pool, is_gateway=asked.gateway, at=asked.index)
    if not found.parts and (asked.gateway or asked.index is not None):
        key = "allocateDefaultGateway" if asked.gateway else "allocateIPWithIndex"
        raise invalid_config(
            f'"args.cni.{key}": {pool.key} has no address for this key: remove the key'
        )
    return RangeSet((found,), fixed=asked.gateway and not pool.prefix)


def _requested_range(pool: NodePool, where: str, address: int) -> Range:
    network = pool.prefix_at(address)
    if address == pool.gateway_of(network):
        raise invalid_config(
            f'"{where}": {text(address)} is the gateway of {pool.key}: request another address'
        )
    if not is_within(address, (_hosts_of(pool, network),)):
        raise invalid_config(
            f'"{where}": {text(address)} of {network} ({pool.key}) is never given to pods: request '
            "another address"
        )
    if is_within(address, map(parse_interval, pool.others)):
        raise CNIError(
            Code.ADDRESS_TAKEN,
            f"status.allocations of {pool.key} gives {text(address)} to another node: "
            "nothing was reserved; request another address",
        )
    return _range(pool, (Interval(address, address),), where=where)


@lru_cache(128)
def range_of(pool: NodePool, *, is_gateway: bool = False, at: int | None = None) -> Range:
    """The addresses for pods, or the gateways, or the address at index `at` of each prefix."""
    holes = merged(map(parse_interval, (*pool.excluded, *pool.others)))
    usable = list[Interval]()
    for network in prefixes_of(pool):
        hosts, gateway = _hosts_of(pool, network), pool.gateway_of(network)
        hop = () if gateway is None else (Interval(gateway, gateway),)
        if is_gateway:
            usable += hop
        elif at is not None:
            chosen = Interval(hosts.first + at, hosts.first + at)
            usable += (chosen,) if chosen.last <= hosts.last and chosen not in hop else ()
        else:
            usable += (part for run in outside(hosts, holes) for part in outside(run, hop))
    return _range(pool, tuple(usable), is_gateway=is_gateway)


def _range(
    pool: NodePool, usable: Sequence[Interval], *, is_gateway: bool = False, where: str = ""
) -> Range:
    network = pool.subnet
    first, last = usable[0] if len(usable) == 1 else (network.address, network.last)
    return PoolRange(
        network=network,
        first=first,
        last=last,
        excluded=tuple(outside(Interval(first, last), merged(usable))),
        domain=DOMAIN,
        where=where or pool.key,
        pool=pool,
        is_gateway=is_gateway,
    )


def prefixes_of(pool: NodePool) -> Iterator[Network]:
    """An IPPool's subnet, or the node's prefix of a CIDRPool.

    If the node has no prefix yet, the lowest free prefixes.
    """
    whole = pool.subnet
    if pool.own or not pool.prefix:
        return iter((parse_interface(pool.own)[1] if pool.own else whole,))
    others = merged(map(parse_interval, pool.others))
    free = (
        Network(address, pool.prefix)
        for run in outside(Interval(whole.address, whole.last), others)
        for address in range(run.first, run.last + 1, 1 << (128 - pool.prefix))
    )
    return islice(free, MOST_PREFIXES)


def hosts_of(network: Network) -> Interval:
    """All addresses of a network except the first, and in IPv4 except the broadcast address."""
    if network.prefix >= 127:
        return Interval(network.address, network.last)
    return Interval(network.address + 1, network.last - (family(network.address) == 4))


def _hosts_of(pool: NodePool, network: Network) -> Interval:
    """The addresses that pods get: in a large prefix, only the first addresses."""
    first, last = hosts_of(network)
    return Interval(first, min(last, network.address + LARGEST_BLOCK - 1) if pool.prefix else last)
