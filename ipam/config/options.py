"""Reads the `ipam` object of a network configuration.

The keys come from whereabouts (pkg/types/types.go) and host-local (allocator/config.go), or are our
own. Unknown keys and contradictions raise CNIError 7.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from cni.spec import limits
from cni.spec.config import NetworkConfig, convert
from cni.spec.errors import invalid_config
from cni.spec.result import DNS, Route
from ipam.addresses import Network, family, parse, parse_interface, text
from ipam.config.range_reader import RangeOptions, RangeReader, Section, address_at, section
from ipam.ranges import Range, RangeSet, domain_of

A = TypeVar("A")

TYPES = ("podfabric-ipam", "whereabouts")
Probe = Literal["", "always"]
"""Probe addresses "always", or only addresses that a lost machine may still use ("")."""
Scope = Literal["", "node", "cluster"]
"""The scope of the addresses. "" means `ipam.scope` of the node's config.yaml."""

# Accepted without effect, so that definitions for whereabouts and host-local need no edit.
WITHOUT_EFFECT = frozenset(
    (
        "configuration_path",
        "dataDir",
        "datastore",
        "etcd_ca_cert_file",
        "etcd_cert_file",
        "etcd_host",
        "etcd_key_file",
        "etcd_password",
        "etcd_username",
        "kubernetes",
        "leader_lease_duration",
        "leader_renew_deadline",
        "leader_retry_period",
        "log_file",
        "log_level",
        "name",
        "node_slice_size",
        "reconciler_cron_expression",
        "sleep_for_race",
    )
)
MOST_ADDRESSES = 64  # of one attachment
_NETWORK_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.\-]*")


class IpamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a network."""

    sets: tuple[RangeSet, ...] = ()  # an attachment gets one address of each, in this order
    static: tuple[RangeSet, ...] = ()  # then an attachment gets these addresses
    gateway: int | None = None  # the default of ranges, and of requested addresses
    routes: tuple[Route, ...] = ()
    dns: DNS = DNS()
    resolv_conf: str = ""
    network_name: str = ""
    shared: bool = True  # `enable_overlapping_ranges`
    idle: tuple[str, ...] = ()  # keys without effect
    notes: tuple[str, ...] = ()  # warnings for the operator
    requested: tuple[tuple[str, str], ...] = ()  # JSON path, address
    hops: Mapping[int, str] = {}  # next hops, which no pod gets, with texts for errors
    probe: Probe = ""
    scope: Scope = ""
    sticky: bool = False
    pools: tuple[str, ...] = ()  # of nv-ipam; rules list pools in place of the `network_name`

    def domain(self, network: Network) -> str:
        return domain_of(self.network_name, network, shared=self.shared)


_Requested = Annotated[list[str], Meta(max_length=limits.ADDRESSES)]
_OfRangeSets = Meta(max_length=limits.RANGE_SETS)


class ArgumentIPs(msgspec.Struct):
    ips: _Requested = []


class RuntimeIPs(ArgumentIPs):
    ipRanges: Annotated[list[list[Section]], _OfRangeSets] = []


class IpamKeys(RangeOptions, frozen=True, kw_only=True):
    type: str = ""
    addresses: Annotated[tuple[Section, ...], Meta(max_length=limits.ADDRESSES)] = ()
    dns: Section = msgspec.field(default_factory=dict)
    enable_overlapping_ranges: bool = True
    ipRanges: Annotated[tuple[Section, ...], _OfRangeSets] = ()
    network_name: str = ""
    ranges: Annotated[tuple[tuple[Section, ...], ...], _OfRangeSets] = ()
    resolvConf: str = ""
    probe: Probe = ""
    routes: Annotated[tuple[Section, ...], Meta(max_length=limits.ROUTES)] = ()
    scope: Scope = ""
    sticky: bool = False


class StaticAddress(msgspec.Struct, frozen=True):
    address: str
    gateway: str = ""


def read(network: NetworkConfig) -> IpamOptions:
    """The options in a network configuration. Raises CNIError 7."""
    return network.derived(_read)


def _read(network: NetworkConfig) -> IpamOptions:
    ipam, idle = _keys(network)
    runtime = _ips(network, "runtimeConfig", RuntimeIPs)
    arguments = _ips(network, "args.cni", ArgumentIPs)
    require_few(
        ("runtimeConfig.ipRanges", len(runtime.ipRanges)),
        ("ipam.range", bool(ipam.range or ipam.subnet)),
        ("ipam.ipRanges", len(ipam.ipRanges)),
        ("ipam.ranges", len(ipam.ranges)),
        ("ipam.addresses", len(ipam.addresses)),
    )
    reader = _reader(ipam)
    sets = _sets(ipam, runtime, reader)
    _check_gateway(reader.gateway, sets)
    static = tuple(
        _static(written, f"ipam.addresses[{index}]", reader)
        for index, written in enumerate(ipam.addresses)
    )
    routes = tuple(
        section(route, Route, f"ipam.routes[{index}]") for index, route in enumerate(ipam.routes)
    )
    hops = _hops(routes, (*sets, *static), reader.gateway)
    _refuse_hops(static, hops)
    return IpamOptions(
        sets=tuple(range_set.without(hops) for range_set in sets),
        static=static,
        gateway=reader.gateway,
        routes=routes,
        hops=hops,
        dns=section(ipam.dns, DNS, "ipam.dns"),
        resolv_conf=ipam.resolvConf,
        network_name=ipam.network_name,
        shared=ipam.enable_overlapping_ranges,
        probe=ipam.probe,
        scope=ipam.scope,
        sticky=ipam.sticky,
        idle=idle,
        notes=tuple(reader.notes),
        requested=(
            *_requested("runtimeConfig.ips", runtime.ips),
            *_requested("args.cni.ips", arguments.ips),
        ),
    )


def _keys(network: NetworkConfig) -> tuple[IpamKeys, tuple[str, ...]]:
    """The keys of "ipam", and the names of the keys without effect."""
    keys = network.at("ipam", Section)
    if keys is None:
        raise invalid_config(
            '"ipam" is missing: add it, such as {"type": "podfabric-ipam", "range": "10.1.0.0/16"}'
        )
    ours = {key: value for key, value in keys.items() if key not in WITHOUT_EFFECT}
    ipam = section(ours, IpamKeys, "ipam", also=WITHOUT_EFFECT)
    _check_names(ipam)
    return ipam, tuple(sorted(keys.keys() & WITHOUT_EFFECT))


def _ips(network: NetworkConfig, path: str, shape: type[A]) -> A:
    """The object at `path`. A null counts as a missing key."""
    written = network.at(path, Section) or {}
    present = {key: value for key, value in written.items() if value is not None}
    return convert(present, shape, path)


def require_few(*counts: tuple[str, int]) -> None:
    """Raise CNIError 7 if the keys together request more than MOST_ADDRESSES addresses."""
    total = sum(count for _, count in counts)
    if total > MOST_ADDRESSES:
        key = max(counts, key=lambda count: count[1])[0]
        raise invalid_config(
            f'"{key}": the configuration has {total} addresses for one attachment, but at most '
            f"{MOST_ADDRESSES} are allowed: remove {total - MOST_ADDRESSES} of them"
        )


def _check_names(ipam: IpamKeys) -> None:
    if ipam.type not in TYPES:
        served = '" or "'.join(TYPES)
        raise invalid_config(f'"ipam.type" is "{ipam.type}": set "{served}"')
    if ipam.network_name and not _NETWORK_NAME.fullmatch(ipam.network_name):
        raise invalid_config(
            f'"ipam.network_name" is "{ipam.network_name}": use only letters, digits, "-", "_" '
            'and ".", and begin with a letter or digit'
        )
    if ipam.dns and ipam.resolvConf:
        raise invalid_config(
            '"ipam.dns" and "ipam.resolvConf" both set the DNS: remove one of them'
        )


def _reader(ipam: IpamKeys) -> RangeReader:
    def domain(network: Network) -> str:
        return domain_of(ipam.network_name, network, shared=ipam.enable_overlapping_ranges)

    gateway = address_at(ipam.gateway, "ipam.gateway")
    return RangeReader(domain, gateway, use_all=bool(ipam.use_all_addresses))


def _sets(ipam: IpamKeys, runtime: RuntimeIPs, reader: RangeReader) -> tuple[RangeSet, ...]:
    """One set for each address of the result, in order. The runtime's ranges come first."""
    sets = [
        reader.set_of(ranges, f"runtimeConfig.ipRanges[{index}]")
        for index, ranges in enumerate(runtime.ipRanges)
    ]
    if ipam.range or ipam.subnet:
        own = {name: getattr(ipam, name) for name in RangeOptions.__struct_fields__}
        # The reader has the common gateway, and uses it only for ranges of the same family.
        own["gateway"] = ""
        sets.append(RangeSet((reader.read(RangeOptions(**own), "ipam"),)))
    else:
        _refuse_orphans(ipam)
    for index, written in enumerate(ipam.ipRanges):
        path = f"ipam.ipRanges[{index}]"
        sets.append(RangeSet((reader.read(section(written, RangeOptions, path), path),)))
    for index, ranges in enumerate(ipam.ranges):
        sets.append(reader.set_of(ranges, f"ipam.ranges[{index}]"))
    return tuple(sets)


def _refuse_orphans(ipam: IpamKeys) -> None:
    for key in ("range_start", "range_end", "rangeStart", "rangeEnd", "exclude"):
        if getattr(ipam, key):
            raise invalid_config(
                f'"ipam.{key}" needs "ipam.range", which is missing: add "ipam.range", or move '
                f'"{key}" into an entry of "ipam.ipRanges" or "ipam.ranges"'
            )


def _check_gateway(gateway: int | None, sets: tuple[RangeSet, ...]) -> None:
    if (
        gateway is None
        or not sets
        or any(range_set.family == family(gateway) for range_set in sets)
    ):
        return
    raise invalid_config(
        f'"ipam.gateway" is an IPv{family(gateway)} address, but no range has IPv{family(gateway)} '
        "addresses: write a gateway of the same family as the ranges, or remove the key"
    )


def _hops(routes: Sequence[Route], sets: Sequence[RangeSet], gateway: int | None) -> dict[int, str]:
    """The next hops of a configuration, each with a text for errors."""
    of_routes = {
        parse(route.gw): f'the next hop of "ipam.routes[{index}]"'
        for index, route in enumerate(routes)
        if route.gw
    }
    gateways = {range_.gateway for range_set in sets for range_ in range_set.ranges} | {gateway}
    return of_routes | {hop: "the gateway" for hop in gateways if hop is not None}


def _refuse_hops(static: Iterable[RangeSet], hops: Mapping[int, str]) -> None:
    for fixed in static:
        range_ = fixed.ranges[0]
        if range_.first in hops:
            raise invalid_config(
                f'"{range_.where}.address": {text(range_.first)} is {hops[range_.first]}: write '
                "another address"
            )


def _static(written: Section, path: str, reader: RangeReader) -> RangeSet:
    static = section(written, StaticAddress, path)
    try:
        address, network = parse_interface(static.address)
    except ValueError as error:
        raise invalid_config(f'"{path}.address": {error}') from None
    gateway = address_at(static.gateway, f"{path}.gateway")
    if gateway is not None and family(gateway) != family(address):
        raise invalid_config(
            f'"{path}.gateway" and "{path}.address" mix IPv4 and IPv6: use one family'
        )
    if gateway == address:
        raise invalid_config(
            f'"{path}.gateway" and "{path}.address" are the same address: correct one of them'
        )
    return fixed_set(address, network, domain=reader.domain(network), gateway=gateway, where=path)


def fixed_set(
    address: int, network: Network, *, domain: str, gateway: int | None, where: str
) -> RangeSet:
    """A set of this address alone. The result shows the address with the prefix of `network`."""
    range_ = Range(
        network=network, first=address, last=address, gateway=gateway, domain=domain, where=where
    )
    return RangeSet((range_,), fixed=True)


def _requested(path: str, ips: Iterable[str]) -> list[tuple[str, str]]:
    return [(f"{path}[{index}]", address) for index, address in enumerate(ips)]
