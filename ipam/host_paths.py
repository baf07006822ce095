"""Paths of the host in the options of an IPAM plugin of others, which would open them as root.

host-local makes files below `dataDir` and reads `resolvConf`, whereabouts writes `log_file` and
runs what a kubeconfig names, dhcp connects to `daemonSocketPath`. A tenant writes those options,
so a path needs a directory that the node's rules allow.
"""

from collections.abc import Collection, Iterator
from pathlib import PurePosixPath
from typing import Any

from cni.policy import rules
from ipam.addresses import parse, parse_interface

# Keys whose value is a path though it may have no "/": it begins in the plugin's directory then.
# Go's decoder does not tell upper and lower case of keys apart.
_KEYS = frozenset(
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


def require_allowed(options: dict[str, Any], directories: Collection[str]) -> None:
    """Raise CNIError 121 for a path in `options` that is in none of the directories."""
    for place, value in _paths(options, "ipam"):
        if not _is_below(value, directories):
            raise rules.not_allowed(f'"{place}": "{value}"', "ipam_directories")


def _paths(value: object, place: str, *, named: bool = False) -> Iterator[tuple[str, str]]:
    """Every path, or address of a server, with its place in the configuration."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _paths(inner, f"{place}.{key}", named=key.casefold() in _KEYS)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _paths(inner, f"{place}[{index}]", named=named)
    elif isinstance(value, str) and value and (named or _is_path(value)):
        yield place, value


def _is_path(text: str) -> bool:
    """A text with "/" that is no network and no range of addresses ("10.0.0.1-10.0.0.9/24")."""
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
    place = PurePosixPath(path)
    return ".." not in place.parts and any(place.is_relative_to(one) for one in directories)
