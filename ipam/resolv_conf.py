"""host-local's `resolvConf`: a resolv.conf(5) file as the DNS part of a result."""

from pathlib import Path

from cni.spec.errors import invalid_config
from cni.spec.result import DNS


def read(path: str) -> DNS:
    """The file's nameservers, domain, search and options. CNIError 7 if it cannot be read."""
    try:
        lines = Path(path).read_text(errors="replace").splitlines()
    except (OSError, ValueError) as error:
        raise invalid_config(f'"ipam.resolvConf" {path!r}: {error}') from None
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
