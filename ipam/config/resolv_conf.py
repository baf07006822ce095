"""Reads the resolv.conf(5) file that host-local's key `resolvConf` names."""

from collections.abc import Sequence

from base import confined
from base.confined import UnsafeFile
from cni.spec.errors import invalid_config
from cni.spec.result import DNS

MOST_BYTES = 64 << 10


def read(path: str, directories: Sequence[str]) -> DNS:
    """Empty if the file is outside `directories`. Raises CNIError 7 if reading fails."""
    if not confined.is_below(directories, path):
        return DNS()
    try:
        lines = confined.read(directories, path, MOST_BYTES).decode(errors="replace").splitlines()
    except (UnsafeFile, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise invalid_config(f'"ipam.resolvConf": cannot read {path!r}: {reason}') from None
    nameservers: list[str] = []
    search: list[str] = []
    options: list[str] = []
    domain = ""
    for line in lines:
        key, *values = line.split() or [""]
        if key.startswith(("#", ";")) or not values:
            continue
        if key == "nameserver":
            nameservers.append(values[0])
        elif key == "domain":
            domain = values[0]
        elif key == "search":
            search += values
        elif key == "options":
            options += values
    return DNS(tuple(nameservers), domain, tuple(search), tuple(options))
