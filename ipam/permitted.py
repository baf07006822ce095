"""What the rules for a pod say of its addresses: before anything is reserved."""

from collections.abc import Iterable, Sequence

from cni.policy.allowance import Allowance
from cni.policy.values import Span
from cni.spec.result import Result
from ipam.addresses import parse_interface, text
from ipam.options import IpamOptions
from ipam.ranges import RangeSet

TYPE, NETWORK_NAME, POOL_NAME = "ipam.type", "ipam.network_name", "ipam.poolName"


def of_type(allowance: Allowance, ipam_type: str) -> Allowance:
    """The allowance of an attachment with an IPAM plugin of this type. NotAllowed."""
    return allowance.using("ipamTypes", ipam_type, TYPE, ipam_type)


def of_configuration(
    allowance: Allowance, options: IpamOptions, sets: Sequence[RangeSet]
) -> Allowance:
    """The allowance with what a configuration asks for, `sets` of it for this pod. NotAllowed."""
    if options.scope:
        allowance.require_option("scope", options.scope, "ipam.scope", options.scope)
    if options.pools:
        return of_sets(allowance, options.pools, sets, POOL_NAME)
    return of_sets(allowance, (options.network_name,), sets)


def of_sets(
    allowance: Allowance, names: Iterable[str], sets: Sequence[RangeSet], key: str = NETWORK_NAME
) -> Allowance:
    """The allowance of an attachment to networks of these names, with an address of each set.

    `key` of the configuration has the names. NotAllowed for the first that is not allowed.
    """
    for name in filter(None, names):
        allowance = allowance.using("networkNames", name, key, name)
    for range_set in sets:
        for range_ in range_set.ranges:
            allowance = allowance.within(range_.parts, range_.where, _interval)
    return allowance.using("addressesPerAttachment", len(sets), "ipam", f"{len(sets)} addresses")


def of_address(allowance: Allowance, address: int, key: str) -> Allowance:
    """The allowance of an attachment with this address, which `key` asks for. NotAllowed."""
    return allowance.within(((address, address),), key, _interval)


def of_answer(allowance: Allowance, ipam_type: str, result: Result) -> None:
    """Raise NotAllowed for an address that another IPAM plugin gave and no rule left has."""
    for ip in result.ips:
        address, _ = parse_interface(ip.address)
        allowance = of_address(allowance, address, f"ipam ({ipam_type})")
    count = len(result.ips)
    allowance.using("addressesPerAttachment", count, "ipam", f"{count} addresses")


def _interval(interval: Span) -> str:
    """As a person reads it: "10.0.0.1", "10.0.0.1-10.0.0.9"."""
    first, last = interval
    return text(first) if first == last else f"{text(first)}-{text(last)}"
