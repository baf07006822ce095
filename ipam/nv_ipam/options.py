"""Reads the `ipam` object of a definition of type `nv-ipam`.

The keys are nv-ipam's (pkg/cni/types/types.go). Unknown keys pass, as in nv-ipam. Keys of its
daemon and its log (`daemonSocket`, `logFile`, ...) have no effect.
"""

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from cni.spec import limits
from cni.spec.config import NetworkConfig, convert
from cni.spec.errors import CNIError, Code, invalid_config
from cni.spec.request import Arguments
from ipam.addresses import parse
from ipam.config.options import MOST_ADDRESSES

TYPE = "nv-ipam"
KINDS = ("ippool", "cidrpool")

T = TypeVar("T")


class NvIpamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a call.

    `pools` are keys ("ippool/NAME"), one address each, in the order of the result. At most one of
    the other options is set: `requested` addresses as (JSON path, address), `gateway` for the
    pool's gateway as the pod's address, `index` for the address of that index in the node's part.
    """

    pools: tuple[str, ...]
    requested: tuple[tuple[str, int], ...] = ()
    gateway: bool = False
    index: int | None = None


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
    """Whether the network's IPAM plugin is nv-ipam."""
    ipam = network.keys.get("ipam")
    return isinstance(ipam, dict) and ipam.get("type") == TYPE


def read(network: NetworkConfig, arguments: Arguments) -> NvIpamOptions:
    """The options of a call. Raises CNIError 7, or 4 for CNI_ARGS, that names the key."""
    names, wishes, of_runtime = network.derived(_written)
    requested = _requested(of_runtime, wishes.ips, arguments)
    used = {
        "ips": bool(requested),
        "allocateDefaultGateway": wishes.allocateDefaultGateway,
        "allocateIPWithIndex": wishes.allocateIPWithIndex is not None,
    }
    named = [key for key, is_used in used.items() if is_used]
    if len(named) > 1:
        raise invalid_config(f'"{named[0]}" and "{named[1]}" exclude each other: leave one out')
    return NvIpamOptions(
        pools=_pools(names, wishes, network.network),
        requested=requested,
        gateway=wishes.allocateDefaultGateway,
        index=wishes.allocateIPWithIndex,
    )


def _written(network: NetworkConfig) -> tuple[_PoolNames, _PodWishes, tuple[str, ...]]:
    """The parts that are the same for all pods of a definition. The last has the addresses in
    `runtimeConfig`."""

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
        raise invalid_config(
            f'"poolType" is "{kind}": the kinds of pools are {" and ".join(KINDS)}'
        )
    stripped = [name.strip() for name in names]
    wrong = next((name for name in stripped if not name or "/" in name), None)
    if wrong is not None:
        raise invalid_config(f'"{where}" has "{wrong}", which cannot be the name of a pool')
    keys = tuple(f"{kind.lower()}/{name}" for name in stripped)
    if len(keys) > MOST_ADDRESSES:
        raise invalid_config(
            f'"{where}": one attachment has at most {MOST_ADDRESSES} addresses: remove some pools'
        )
    if len(set(keys)) < len(keys):
        raise invalid_config(f'"{where}" names a pool twice: name each once')
    return keys


def _requested(
    of_runtime: Sequence[str], of_pod: Sequence[str], arguments: Arguments
) -> tuple[tuple[str, int], ...]:
    """The first of the three ways that is used; a prefix length is not looked at, as there."""
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
