"""What the rules for a pod say of its addresses."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any

from cni.policy.allowance import Allowance, NotAllowed
from cni.policy.values import Span
from cni.spec.result import Result
from ipam.addresses import Interval, parse, parse_interface
from ipam.allocation import AddressChoice
from ipam.options import IpamOptions
from ipam.ranges import RangeSet, written
from ipam.store import Owner
from ipam.tables import Tables

TYPE, NETWORK_NAME, POOL_NAME = "ipam.type", "ipam.network_name", "ipam.poolName"
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
            allowance = allowance.within(range_.parts, range_.where, _spelled)
    return allowance.using("addressesPerAttachment", len(sets), "ipam", f"{len(sets)} addresses")


def of_address(allowance: Allowance, address: int, key: str) -> Allowance:
    """The allowance of an attachment with this address, which `key` asks for. NotAllowed."""
    return allowance.within(((address, address),), key, _spelled)


def of_answer(allowance: Allowance, ipam_type: str, result: Result) -> None:
    """Raise NotAllowed for an address that another IPAM plugin gave and no rule left has."""
    for ip in result.ips:
        address, _ = parse_interface(ip.address)
        allowance = of_address(allowance, address, f"ipam ({ipam_type})")
    count = len(result.ips)
    allowance.using("addressesPerAttachment", count, "ipam", f"{count} addresses")


def of_paths(options: dict[str, Any], allowance: Allowance) -> None:
    """Raise CNIError 121 for a path in the options of another IPAM plugin that is not below an
    allowed directory. A tenant writes them, and the plugin would open the path as root: host-local
    makes files below `dataDir`, whereabouts writes `log_file` and runs what a kubeconfig names."""
    directories = allowance.host_paths
    for where, path in _paths(options, "ipam"):
        if not _is_below(path, directories):
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
    if "/" not in text:
        return False
    first, dash, last = text.rpartition("-")
    try:
        parse_interface(last.strip())
        if dash:
            parse(first.strip())
    except ValueError:
        return True
    return False


def _is_below(path: str, directories: Collection[str]) -> bool:
    pure = PurePosixPath(path)
    return ".." not in pure.parts and any(map(pure.is_relative_to, directories))


def of_quota(tables: Tables, owner: Owner, choices: Sequence[AddressChoice], boot: str) -> None:
    """Raise NotAllowed if the owner's pod or namespace would have too many with these.

    What a former sandbox of the pod held, and these replace, does not count twice.
    """
    quota, pod = owner.quota, owner.pod
    if quota is None or not pod.name:
        return
    replaced = sum(each.replaced is not None and each.replaced.boot == boot for each in choices)

    def require(key: str, most: int, of: int, who: str) -> None:
        held, more = of - replaced, len(choices)
        if held + more > most:
            titles = ", ".join(quota.rules[:8])
            raise NotAllowed(
                f'"{key}": {who} {held} addresses on this node, this attachment asks for {more}, '
                f"and the rules ({titles}) allow {most}: have fewer networks or pods, or ask the "
                "administrator",
                key,
                str(held + more),
                quota.rules,
            )

    if quota.of_namespace is not None:
        require(
            "addressesPerNamespace",
            quota.of_namespace,
            tables.count_of_namespace(pod.namespace, boot),
            "the pods of this namespace have",
        )
    if quota.of_pod is not None:
        require(
            "addressesPerPod",
            quota.of_pod,
            sum(each.boot == boot for each in tables.of_whole_pod(pod)),
            "this pod has",
        )


def _spelled(span: Span) -> str:
    return written((Interval(*span),))[0]
