"""The `ipam` object of a network configuration: whereabouts' options, ours, and host-local's.

`read` answers typed values or CNIError 7 that names the JSON path: unknown keys, values that do
not parse and settings that contradict each other are errors, never ignored. The shapes are
whereabouts' pkg/types/types.go and host-local's allocator/config.go.
"""

import re
from typing import Annotated

import msgspec
from msgspec import Meta

from cni.spec import limits
from cni.spec.config import decode
from cni.spec.errors import invalid_config
from cni.spec.result import DNS, Route
from ipam.addresses import Network, family, parse, parse_interface, text
from ipam.messages import LEVELS
from ipam.range_options import RangeOptions, RangeReader, Section, section
from ipam.ranges import Range, RangeSet, domain_of

TYPES = ("podfabric-ipam", "whereabouts")

# Options of whereabouts that tune its Kubernetes or etcd storage, and host-local's directory:
# accepted so that a definition needs no edit, without effect on the store of one node.
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
        "name",
        "node_slice_size",
        "reconciler_cron_expression",
        "sleep_for_race",
    )
)
MOST_ADDRESSES = 64  # of one attachment
_NETWORK_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.\-]*")


class IpamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a network asks for.

    `sets` yield one address each, in the result's order; `static` are the addresses that stand
    in the configuration, behind them. `gateway` is the common one, for requested addresses
    where there are no ranges. `requested` are those that the configuration carries, as (JSON
    path, text). `idle` are keys without effect here, `notes` are for the operator.
    """

    sets: tuple[RangeSet, ...] = ()
    static: tuple[RangeSet, ...] = ()
    gateway: int | None = None
    routes: tuple[Route, ...] = ()
    dns: DNS = DNS()
    resolv_conf: str = ""
    network_name: str = ""
    shared: bool = True
    log_file: str = ""
    log_level: str = "warning"
    idle: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    requested: tuple[tuple[str, str], ...] = ()

    def domain(self, network: Network) -> str:
        """Where an address of `network` is unique: the name alone, or with the range added."""
        return domain_of(self.network_name, network, shared=self.shared)


_Requested = Annotated[list[str], Meta(max_length=limits.ADDRESSES)]
_OfRangeSets = Meta(max_length=limits.RANGE_SETS)


class _Runtime(msgspec.Struct):
    ips: _Requested | None = None
    ipRanges: Annotated[list[list[Section]], _OfRangeSets] | None = None


class _Cni(msgspec.Struct):
    ips: _Requested | None = None


class _Args(msgspec.Struct):
    cni: _Cni | None = None


class _NetworkConfiguration(msgspec.Struct):
    ipam: Section | None = None
    runtimeConfig: _Runtime | None = None
    args: _Args | None = None


class _IpamSection(RangeOptions, frozen=True, kw_only=True):
    type: str = ""
    addresses: Annotated[tuple[Section, ...], Meta(max_length=limits.ADDRESSES)] = ()
    dns: Section = msgspec.field(default_factory=dict)
    enable_overlapping_ranges: bool = True
    ipRanges: Annotated[tuple[Section, ...], _OfRangeSets] = ()
    log_file: str = ""
    log_level: str = "warning"
    network_name: str = ""
    ranges: Annotated[tuple[tuple[Section, ...], ...], _OfRangeSets] = ()
    resolvConf: str = ""
    routes: Annotated[tuple[Section, ...], Meta(max_length=limits.ROUTES)] = ()


class _Static(msgspec.Struct, frozen=True):
    address: str
    gateway: str = ""


def read(config: bytes) -> IpamOptions:
    """The options in a network configuration. CNIError 7 that names what is wrong with them."""
    network = decode(config, _NetworkConfiguration)
    if network.ipam is None:
        raise invalid_config("IPAM config missing 'ipam' key")
    idle = sorted(key for key in network.ipam if key in WITHOUT_EFFECT)
    given = {key: value for key, value in network.ipam.items() if key not in WITHOUT_EFFECT}
    ipam = section(given, _IpamSection, "ipam", also=WITHOUT_EFFECT)
    _check_names(ipam)
    runtime = network.runtimeConfig or _Runtime()
    require_few(
        ("runtimeConfig.ipRanges", len(runtime.ipRanges or ())),
        ("ipam.range", bool(ipam.range or ipam.subnet)),
        ("ipam.ipRanges", len(ipam.ipRanges)),
        ("ipam.ranges", len(ipam.ranges)),
        ("ipam.addresses", len(ipam.addresses)),
    )
    reader = _reader(ipam)
    sets = _sets(ipam, runtime, reader)
    _check_gateway(reader.gateway, sets)
    static = tuple(_static(ipam, index) for index in range(len(ipam.addresses)))
    _refuse_gateways(static, sets, reader.gateway)
    return IpamOptions(
        sets=sets,
        static=static,
        gateway=reader.gateway,
        routes=tuple(
            section(route, Route, f"ipam.routes[{index}]")
            for index, route in enumerate(ipam.routes)
        ),
        dns=section(ipam.dns, DNS, "ipam.dns"),
        resolv_conf=ipam.resolvConf,
        network_name=ipam.network_name,
        shared=ipam.enable_overlapping_ranges,
        log_file=ipam.log_file,
        log_level=ipam.log_level.lower() or "warning",
        idle=tuple(idle),
        notes=tuple(reader.notes),
        requested=_requested(runtime, network.args),
    )


def require_few(*counts: tuple[str, int]) -> None:
    """CNIError 7 where the addresses that these keys ask for are too many for one attachment."""
    total = sum(count for _, count in counts)
    if total > MOST_ADDRESSES:
        key = max(counts, key=lambda one: one[1])[0]
        raise invalid_config(
            f'"{key}": one attachment has at most {MOST_ADDRESSES} addresses, and {total} are '
            "asked for: remove some"
        )


def logging_of(config: bytes) -> tuple[str, str]:
    """log_file and log_level, as far as they can be read: DEL works with a broken `ipam` too."""
    try:
        ipam = msgspec.json.decode(config, type=_NetworkConfiguration).ipam or {}
    except msgspec.MsgspecError:
        return "", "warning"
    file, level = ipam.get("log_file"), ipam.get("log_level")
    return (
        file if isinstance(file, str) else "",
        level.lower() if isinstance(level, str) and level.lower() in LEVELS else "warning",
    )


def _check_names(ipam: _IpamSection) -> None:
    if ipam.type not in TYPES:
        served = '" and "'.join(TYPES)
        raise invalid_config(f'"ipam.type" is "{ipam.type}": this plugin serves "{served}"')
    if (ipam.log_level.lower() or LEVELS[0]) not in LEVELS:
        raise invalid_config(
            f'"ipam.log_level" is "{ipam.log_level}": valid levels are {", ".join(LEVELS)}'
        )
    if ipam.network_name and not _NETWORK_NAME.fullmatch(ipam.network_name):
        raise invalid_config(
            f'"ipam.network_name" is "{ipam.network_name}": use letters, digits, "-", "_" and '
            '"." and begin with a letter or digit'
        )
    if ipam.dns and ipam.resolvConf:
        raise invalid_config('"ipam.dns" and "ipam.resolvConf" both say the DNS: leave one out')


def _reader(ipam: _IpamSection) -> RangeReader:
    gateway = None
    if ipam.gateway:
        try:
            gateway = parse(ipam.gateway)
        except ValueError as error:
            raise invalid_config(f'"ipam.gateway": {error}') from None

    def domain(network: Network) -> str:
        return domain_of(ipam.network_name, network, shared=ipam.enable_overlapping_ranges)

    return RangeReader(domain, gateway, use_all=bool(ipam.use_all_addresses))


def _sets(ipam: _IpamSection, runtime: _Runtime, reader: RangeReader) -> tuple[RangeSet, ...]:
    """One set for each address of the result, in its order; what the runtime adds comes first."""
    sets = [
        reader.set_of(ranges, f"runtimeConfig.ipRanges[{index}]")
        for index, ranges in enumerate(runtime.ipRanges or ())
    ]
    if ipam.range or ipam.subnet:
        own = {name: getattr(ipam, name) for name in RangeOptions.__struct_fields__}
        # The common gateway is known to the reader, which minds its family.
        own["gateway"] = ""
        sets.append(RangeSet((reader.read(RangeOptions(**own), "ipam"),)))
    else:
        _refuse_orphans(ipam)
    for index, one in enumerate(ipam.ipRanges):
        path = f"ipam.ipRanges[{index}]"
        sets.append(RangeSet((reader.read(section(one, RangeOptions, path), path),)))
    for index, ranges in enumerate(ipam.ranges):
        sets.append(reader.set_of(ranges, f"ipam.ranges[{index}]"))
    return tuple(sets)


def _refuse_orphans(ipam: _IpamSection) -> None:
    for key in ("range_start", "range_end", "rangeStart", "rangeEnd", "exclude"):
        if getattr(ipam, key):
            raise invalid_config(
                f'"ipam.{key}" belongs to "ipam.range", which is not there: add the range, or '
                f"put {key} into the entry of ipam.ipRanges or ipam.ranges that it is for"
            )


def _check_gateway(gateway: int | None, sets: tuple[RangeSet, ...]) -> None:
    if gateway is None or not sets or any(one.family == family(gateway) for one in sets):
        return
    raise invalid_config(
        f'"ipam.gateway" is an IPv{family(gateway)} address and no range is: remove it, or set '
        '"gateway" in the entry of ipam.ipRanges that it is for'
    )


def _refuse_gateways(
    static: tuple[RangeSet, ...], sets: tuple[RangeSet, ...], gateway: int | None
) -> None:
    gateways = {range_.gateway for one in sets for range_ in one.ranges} | {gateway}
    for one in static:
        if one.ranges[0].first in gateways:
            address = text(one.ranges[0].first)
            raise invalid_config(f'"{one.ranges[0].where}.address": {address} is the gateway')


def _static(ipam: _IpamSection, index: int) -> RangeSet:
    path = f"ipam.addresses[{index}]"
    one = section(ipam.addresses[index], _Static, path)
    try:
        address, network = parse_interface(one.address)
    except ValueError as error:
        raise invalid_config(f'"{path}.address": {error}') from None
    gateway = None
    if one.gateway:
        try:
            gateway = parse(one.gateway)
        except ValueError as error:
            raise invalid_config(f'"{path}.gateway": {error}') from None
        if family(gateway) != family(address):
            raise invalid_config(f'"{path}.gateway" is of another family than its address')
        if gateway == address:
            raise invalid_config(f'"{path}.gateway" is the address itself')
    domain = domain_of(ipam.network_name, network, shared=ipam.enable_overlapping_ranges)
    return fixed_set(address, network, domain=domain, gateway=gateway, where=path)


def fixed_set(
    address: int, network: Network, *, domain: str, gateway: int | None, where: str
) -> RangeSet:
    """A set that yields this one address, written with the prefix of `network`."""
    range_ = Range(
        network=network, first=address, last=address, gateway=gateway, domain=domain, where=where
    )
    return RangeSet((range_,), fixed=True)


def _requested(runtime: _Runtime, args: _Args | None) -> tuple[tuple[str, str], ...]:
    cni = (args.cni if args else None) or _Cni()
    return tuple(
        (f"{path}[{index}]", one)
        for path, ips in (("runtimeConfig.ips", runtime.ips), ("args.cni.ips", cni.ips))
        for index, one in enumerate(ips or ())
    )
