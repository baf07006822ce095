"""The `ipam` object of a definition of type `nv-ipam`, and the node's nv-ipam.conf.

The keys are nv-ipam's (pkg/cni/types/types.go); ones that it does not know pass, as there. Keys of
its daemon and its log (`daemonSocket`, `logFile`, ...) have no effect.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from base import decoding
from cni.spec import limits
from cni.spec.config import NetworkConfig, convert
from cni.spec.errors import CNIError, Code, invalid_config
from cni.spec.request import Arguments
from ipam.addresses import parse
from ipam.options import MOST_ADDRESSES

TYPE = "nv-ipam"
KINDS = ("ippool", "cidrpool")

_Section = dict[str, Any]
_FEATURES = ("ips", "allocateDefaultGateway", "allocateIPWithIndex")


class NvIpamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a pod gets addresses of.

    `pools` are keys ("ippool/NAME"), one address each, in the order of the result. At most one of
    the others is set: `requested` addresses as (JSON path, address), `gateway` for the pool's
    gateway as the pod's own address, `index` for the address of that index in the node's part.
    """

    pools: tuple[str, ...]
    requested: tuple[tuple[str, int], ...] = ()
    gateway: bool = False
    index: int | None = None


class NodeDefaults(msgspec.Struct, frozen=True):
    """What nv-ipam.conf of this node says for definitions that do not say it."""

    poolName: str = ""
    poolType: str = ""
    forcePoolName: bool = False


class _PoolNames(msgspec.Struct, frozen=True):
    poolName: str = ""
    poolType: str = ""
    forcePoolName: bool | None = None


class _PodWishes(msgspec.Struct, frozen=True):
    ips: Annotated[tuple[str, ...], Meta(max_length=limits.ADDRESSES)] = ()
    poolNames: Annotated[tuple[str, ...], Meta(max_length=MOST_ADDRESSES)] = ()
    poolType: str = ""
    allocateDefaultGateway: bool = False
    allocateIPWithIndex: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None


class _RuntimeWishes(msgspec.Struct, frozen=True):
    ips: Annotated[tuple[str, ...], Meta(max_length=limits.ADDRESSES)] = ()


class _WrittenOptions(msgspec.Struct, frozen=True):
    """A definition's part: the same for all its pods."""

    ipam: _PoolNames
    arguments: _PodWishes
    runtime: _RuntimeWishes
    network: str


def is_nv_ipam(network: NetworkConfig) -> bool:
    """Whether the network's IPAM plugin is nv-ipam. Every call asks this."""
    ipam = network.keys.get("ipam")
    return isinstance(ipam, dict) and ipam.get("type") == TYPE


def read(network: NetworkConfig, arguments: Arguments, defaults: NodeDefaults) -> NvIpamOptions:
    """The options of a call. CNIError 7, or 4 for CNI_ARGS, that names the key."""
    written = network.derived(_written)
    requested = _requested(written, arguments)
    _require_one(written.arguments, requested)
    return NvIpamOptions(
        pools=_pools(written, defaults),
        requested=requested,
        gateway=written.arguments.allocateDefaultGateway,
        index=written.arguments.allocateIPWithIndex,
    )


def node_defaults(path: Path) -> NodeDefaults:
    """What that nv-ipam.conf says; nothing without the file. CNIError 5 and 6."""
    try:
        return convert(_present(decoding.decode(path.read_bytes(), _Section)), NodeDefaults)
    except (FileNotFoundError, NotADirectoryError):
        return NodeDefaults()
    except OSError as error:
        raise CNIError(Code.IO_FAILURE, f"cannot read {path}: {error.strerror}") from None
    except (msgspec.MsgspecError, CNIError) as error:
        raise CNIError(Code.DECODING_FAILURE, f"{path}: {error}: mend or remove it") from None


def _written(network: NetworkConfig) -> _WrittenOptions:
    def part(path: str) -> _Section:
        return _present(network.at(path, _Section) or {})

    return _WrittenOptions(
        ipam=convert(part("ipam"), _PoolNames, "ipam"),
        arguments=convert(part("args.cni"), _PodWishes, "args.cni"),
        runtime=convert(part("runtimeConfig"), _RuntimeWishes, "runtimeConfig"),
        network=network.network,
    )


def _present(section: _Section) -> _Section:
    """An object without its nulls, which count as missing keys."""
    return {key: value for key, value in section.items() if value is not None}


def _pools(written: _WrittenOptions, defaults: NodeDefaults) -> tuple[str, ...]:
    where = "args.cni.poolNames"
    names: Sequence[str] = written.arguments.poolNames
    if not names:
        where = "ipam.poolName"
        name = written.ipam.poolName or defaults.poolName
        forced = written.ipam.forcePoolName
        if not name and not (defaults.forcePoolName if forced is None else forced):
            name = written.network
        if not name:
            raise invalid_config(
                f'"{where}" is missing, and "forcePoolName" is set: name the pool, or several with '
                "commas between them"
            )
        names = name.split(",")
    kind = written.arguments.poolType or written.ipam.poolType or defaults.poolType or KINDS[0]
    if kind.lower() not in KINDS:
        raise invalid_config(
            f'"poolType" is "{kind}": the kinds of pools are {" and ".join(KINDS)}'
        )
    keys = tuple(_key(name.strip(), kind.lower(), where) for name in names)
    if len(keys) > MOST_ADDRESSES:
        raise invalid_config(
            f'"{where}": one attachment has at most {MOST_ADDRESSES} addresses: remove some pools'
        )
    if len(set(keys)) < len(keys):
        raise invalid_config(f'"{where}" names a pool twice: name each once')
    return keys


def _key(name: str, kind: str, where: str) -> str:
    """`name` may say its kind itself: "cidrpool/NAME"."""
    own, slash, rest = name.partition("/")
    if slash and own.lower() in KINDS:
        kind, name = own.lower(), rest
    if not name or "/" in name:
        raise invalid_config(f'"{where}" has "{name}", which cannot be the name of a pool')
    return f"{kind}/{name}"


def _requested(written: _WrittenOptions, arguments: Arguments) -> tuple[tuple[str, int], ...]:
    """The first of the three ways that is used; a prefix length is not looked at, as there."""
    where, ips, code = "runtimeConfig.ips", written.runtime.ips, Code.INVALID_CONFIG
    if not ips:
        where, ips = "args.cni.ips", written.arguments.ips
    if not ips and arguments.ip:
        where, code = "CNI_ARGS IP", Code.INVALID_ENVIRONMENT
        ips = tuple(ip.strip() for ip in arguments.ip.split(","))
    found = []
    for ip in ips:
        try:
            found.append((where, parse(ip.partition("/")[0])))
        except ValueError as error:
            raise CNIError(code, f'"{where}": {error}') from None
    return tuple(dict.fromkeys(found))


def _require_one(arguments: _PodWishes, requested: Sequence[object]) -> None:
    used = (
        bool(requested),
        arguments.allocateDefaultGateway,
        arguments.allocateIPWithIndex is not None,
    )
    named = [key for key, is_used in zip(_FEATURES, used, strict=True) if is_used]
    if len(named) > 1:
        raise invalid_config(f'"{named[0]}" and "{named[1]}" exclude each other: leave one out')
