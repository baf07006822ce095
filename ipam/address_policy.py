"""What the rules for a pod say of its addresses."""

from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any

from cni.spec.result import Result
from ipam.addresses import Interval, parse_interface
from ipam.config.options import IpamOptions
from ipam.config.range_reader import network_of
from ipam.ranges import RangeSet, written
from ipam.store.address_choice import AddressChoice
from ipam.store.reservations import Owner
from ipam.store.tables import Tables
from policy.allowance import Allowance, NotAllowed
from policy.value_lists import Span

# Keys whose value is a path also without "/", relative to the plugin's directory. In lower case:
# Go's decoder ignores the case of keys.
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
    """The allowance of an attachment with an IPAM plugin of this type. NotAllowed."""
    return allowance.using("ipamTypes", ipam_type, "ipam.type", ipam_type)


def of_configuration(
    allowance: Allowance, options: IpamOptions, sets: Sequence[RangeSet]
) -> Allowance:
    """The allowance with what a configuration asks for, `sets` of it for this pod: an address of
    each. NotAllowed for the first thing that is not allowed."""
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
    """Raise NotAllowed for an address that another IPAM plugin gave and no rule left has."""
    for ip in result.ips:
        address, _ = parse_interface(ip.address)
        allowance = allowance.within(((address, address),), f"ipam ({ipam_type})", _spelled)
    count = len(result.ips)
    allowance.using("addressesPerAttachment", count, "ipam", f"{count} addresses")


def of_paths(options: dict[str, Any], allowance: Allowance) -> None:
    """Raise CNIError 121 for a path in the options of another IPAM plugin that is not below an
    allowed directory. A tenant writes them, and the plugin would open the path as root: host-local
    makes files below `dataDir`, whereabouts writes `log_file` and runs what a kubeconfig names."""
    for where, path in _paths(options, "ipam"):
        pure = PurePosixPath(path)
        if ".." in pure.parts or not any(map(pure.is_relative_to, allowance.host_paths)):
            raise allowance.not_settable("hostPaths", f'"{where}": "{path}"', where)


def _paths(value: object, where: str, *, named: bool = False) -> Iterator[tuple[str, str]]:
    """Every path, or address of a server, with the key that has it."""
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


def of_quota(tables: Tables, owner: Owner, choices: Sequence[AddressChoice], boot: str) -> None:
    """Raise NotAllowed if the owner's pod or namespace would have too many with these.

    What a former sandbox of the pod held, and these replace, does not count twice.
    """
    quota, pod = owner.quota, owner.pod
    if quota is None or not pod.name:
        return
    replaced = sum(each.replaced is not None and each.replaced.boot == boot for each in choices)
    of_namespace = tables.count_of_namespace(pod.namespace, boot)
    of_pod = sum(each.boot == boot for each in tables.of_whole_pod(pod))
    for key, most, held, who in (
        ("addressesPerNamespace", quota.of_namespace, of_namespace, "the pods of this namespace"),
        ("addressesPerPod", quota.of_pod, of_pod, "the interfaces of this pod"),
    ):
        total = held - replaced + len(choices)
        if most is not None and total > most:
            raise NotAllowed(
                f'"{key}": {who} have {held - replaced} addresses on this node, this attachment '
                f"asks for {len(choices)}, and the rules ({', '.join(quota.rules[:8])}) allow "
                f"{most}: have fewer networks or pods, or ask the administrator",
                key,
                str(total),
                quota.rules,
            )


def _spelled(span: Span) -> str:
    return written((Interval(*span),))[0]
