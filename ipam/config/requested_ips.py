"""Puts the addresses that a pod requests into the range sets of its network.

A runtime passes requested addresses in `runtimeConfig.ips` (capability "ips"), in `args.cni.ips`,
or as `IP` in CNI_ARGS. An address that Multus passes in two of these ways counts as one request.
"""

from collections.abc import Mapping

import msgspec

from cni.spec.errors import CNIError, Code, invalid_config
from cni.spec.request import Arguments
from ipam.addresses import Network, family, parse, parse_interface, text
from ipam.config.options import IpamOptions, fixed_set, require_few
from ipam.ranges import Range, RangeSet


class _RequestedAddress(msgspec.Struct, frozen=True):
    where: str
    address: int
    network: Network | None


def final_sets(options: IpamOptions, arguments: Arguments) -> tuple[RangeSet, ...]:
    """The range sets for this pod, then the static addresses. Raises CNIError 7 or 4.

    A requested address replaces the set that contains the address.
    """
    requests, gateways = _requests(options, arguments), _gateways(arguments)
    for request in requests:
        if request.address in options.hops:
            raise _is_hop(request, options.hops[request.address])
    beside = 0 if options.sets else len(options.static)
    where = requests[-1].where if requests else ""
    require_few((where, len(requests)), ("ipam.addresses", beside))
    if not options.sets:
        own = tuple(_own_set(request, options, gateways) for request in requests)
        return own + options.static
    sets = list(options.sets)
    for request in requests:
        index, range_ = _range_of(request, options, sets)
        gateway = gateways.get(family(request.address), range_.gateway)
        fixed = msgspec.structs.replace(
            range_,
            first=request.address,
            last=request.address,
            gateway=gateway,
            where=request.where,
        )
        if gateway == request.address:
            raise _is_hop(request)
        sets[index] = RangeSet((fixed,), fixed=True)
    return (*sets, *options.static)


def _requests(options: IpamOptions, arguments: Arguments) -> list[_RequestedAddress]:
    written = list(options.requested)
    if arguments.ip:
        written += [("CNI_ARGS IP", address.strip()) for address in arguments.ip.split(",")]
    requests: dict[int, _RequestedAddress] = {}
    for where, address in written:
        try:
            if "/" in address:
                request = _RequestedAddress(where, *parse_interface(address))
            else:
                request = _RequestedAddress(where, parse(address), None)
        except ValueError as error:
            code = Code.INVALID_ENVIRONMENT if "CNI_ARGS" in where else Code.INVALID_CONFIG
            raise CNIError(code, f'"{where}": {error}') from None
        earlier = requests.get(request.address)
        if earlier is None or earlier.network is None:
            requests[request.address] = request
    return list(requests.values())


def _gateways(arguments: Arguments) -> dict[int, int]:
    gateways = {}
    for address in arguments.gateway.split(","):
        if address:
            try:
                gateway = parse(address.strip())
            except ValueError as error:
                raise CNIError(Code.INVALID_ENVIRONMENT, f"CNI_ARGS GATEWAY: {error}") from None
            gateways[family(gateway)] = gateway
    return gateways


def _own_set(
    request: _RequestedAddress, options: IpamOptions, gateways: Mapping[int, int]
) -> RangeSet:
    if request.network is None:
        raise invalid_config(
            f'"{request.where}": {text(request.address)} needs a prefix length, as in '
            f'{text(request.address)}/24, because the network has no "range"'
        )
    common = options.gateway
    if common is not None and family(common) != family(request.address):
        common = None
    gateway = gateways.get(family(request.address), common)
    if gateway == request.address:
        raise _is_hop(request)
    return fixed_set(
        request.address,
        request.network,
        domain=options.domain(request.network),
        gateway=gateway,
        where=request.where,
    )


def _range_of(
    request: _RequestedAddress, options: IpamOptions, sets: list[RangeSet]
) -> tuple[int, Range]:
    """The range with the requested address, and the index of the set. Raises CNIError 7."""
    address = request.address
    occupied = ""
    refusal = ""
    for index, range_set in enumerate(options.sets):
        for range_ in range_set.ranges:
            if not range_.first <= address <= range_.last:
                continue
            if sets[index].fixed:
                occupied = occupied or text(sets[index].ranges[0].first)
            elif not range_.allows(address):
                refusal = refusal or _exclusion(address, range_)
            else:
                return index, range_
    if refusal:
        raise invalid_config(
            f'"{request.where}": {text(address)} is excluded by {refusal}: request another address'
        )
    if occupied:
        raise invalid_config(
            f'"{request.where}": {text(address)} and {occupied} are in one range set, but a '
            "pod gets only one address of a range set: request one of them"
        )
    listed = ", ".join(str(range_) for range_set in options.sets for range_ in range_set.ranges)
    raise invalid_config(
        f'"{request.where}": {text(address)} is in no range of the network: request an address in '
        f"{listed}"
    )


def _exclusion(address: int, range_: Range) -> str:
    for hole in range_.excluded:
        if hole.first <= address <= hole.last:
            return (
                f"{range_.where.rpartition('.')[0]}.exclude ({text(hole.first)}-{text(hole.last)})"
            )
    return range_.where


def _is_hop(request: _RequestedAddress, hop: str = "the gateway") -> CNIError:
    return invalid_config(f'"{request.where}": {text(request.address)} is {hop}: request another')
