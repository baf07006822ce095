"""Checks a pod's IPAM plugin and its addresses against the rules for the pod."""

from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any

from cni.spec.result import Result
from ipam.addresses import Interval, parse_interface
from ipam.config.options import IpamOptions
from ipam.config.range_reader import network_of
from ipam.ranges import RangeSet, written
from policy.allowance import Allowance
from policy.value_lists import Span

# The value of these keys is a path even without a "/". The keys are in lower case, because Go's
# decoder ignores the case.
_PATH_KEYS = frozenset(
    (
        "configuration_path",
        "daemonsocketpath",
        "datadir",
        "etcd_ca_cert_file",
        "etcd_cert_file",
        "etcd_key_file",
        "kubeconfig",
        "log_file",
        "resolvconf",
    )
)


def of_type(allowance: Allowance, ipam_type: str) -> Allowance:
    """The rules that allow this IPAM type. Raises NotAllowed if no rule allows the type."""
    return allowance.using("ipamTypes", ipam_type, "ipam.type", ipam_type)


def of_configuration(
    allowance: Allowance, options: IpamOptions, sets: Sequence[RangeSet]
) -> Allowance:
    """The rules that allow these options and the addresses of these sets.

    Raises NotAllowed.
    """
    if options.scope:
        allowance.require_option("scope", options.scope, "ipam.scope", options.scope)
    key = "ipam.poolName" if options.pools else "ipam.network_name"
    for name in options.pools or filter(None, (options.network_name,)):
        allowance = allowance.using("networkNames", name, key, name)
    for range_set in sets:
        for range_ in range_set.ranges:
            allowance = allowance.within(range_.parts, range_.where, _spelled)
    return allowance.using("addressesPerAttachment", len(sets), "ipam", f"{len(sets)} addresses")


def of_answer(allowance: Allowance, ipam_type: str, result: Result) -> None:
    """Raise NotAllowed if the rules do not allow the addresses that another plugin returned."""
    for ip in result.ips:
        address, _ = parse_interface(ip.address)
        allowance = allowance.within(((address, address),), f"ipam ({ipam_type})", _spelled)
    count = len(result.ips)
    allowance.using("addressesPerAttachment", count, "ipam", f"{count} addresses")


def of_paths(options: dict[str, Any], allowance: Allowance) -> None:
    """Raise CNIError 121 if an option of another IPAM plugin is a path outside the allowed
    directories. A tenant writes the options, and the plugin opens the path as root."""
    for where, path in _paths(options, "ipam"):
        pure = PurePosixPath(path)
        if ".." in pure.parts or not any(map(pure.is_relative_to, allowance.host_paths)):
            raise allowance.not_settable("hostPaths", f'"{where}": "{path}"', where)


def _paths(value: object, where: str, *, named: bool = False) -> Iterator[tuple[str, str]]:
    """Yield the JSON path and the text of every file path and URL in the options."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _paths(inner, f"{where}.{key}", named=key.casefold() in _PATH_KEYS)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _paths(inner, f"{where}[{index}]", named=named)
    elif isinstance(value, str) and value and (named or _is_path(value)):
        yield where, value


def _is_path(text: str) -> bool:
    """Whether a text has a "/" and is not a network or a range ("10.0.0.1-10.0.0.9/24")."""
    try:
        network_of(text)
    except ValueError:
        return "/" in text
    return False


def _spelled(span: Span) -> str:
    return written((Interval(*span),))[0]
