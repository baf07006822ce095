"""Paths of the host in the options of another IPAM plugin, which would open them as root.

host-local makes files below `dataDir` and reads `resolvConf`, whereabouts writes `log_file` and
runs what a kubeconfig names, dhcp connects to `daemonSocketPath`. A tenant writes those options,
so the paths must be below directories that the node's rules allow.
"""

from collections.abc import Collection, Iterator
from pathlib import PurePosixPath
from typing import Any

from cni.policy.allowance import Allowance
from ipam.addresses import parse, parse_interface

# Keys whose value is a path also without "/", relative to the plugin's directory. In lower case:
# Go's decoder ignores the case of keys.
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


def require_allowed(options: dict[str, Any], allowance: Allowance) -> None:
    """Raise CNIError 121 for a path in `options` that is not below an allowed directory."""
    directories = allowance.host_paths
    for where, path in _paths(options, "ipam"):
        if not _is_below(path, directories):
            raise allowance.not_settable("hostPaths", f'"{where}": "{path}"', where)


def _paths(value: object, where: str, *, named: bool = False) -> Iterator[tuple[str, str]]:
    """Every path, or address of a server, with the key that has it."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _paths(inner, f"{where}.{key}", named=key.casefold() in _KEYS)
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
