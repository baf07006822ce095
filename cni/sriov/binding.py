"""Binding a device's driver anew, one device of the node at a time.

uverbs numbers are handed out over all HCAs: two bindings at once would swap theirs.
"""

import msgspec

from base import locks
from base.paths import Paths
from host import pci
from host.errors import HostError


def bind(paths: Paths, address: str, driver: str) -> None:
    """Take the device's driver off, whichever it has, and bind it to `driver`."""
    with locks.locked(paths.locks / "binding", "the binding of a driver"):
        function = pci.find(paths, address)
        if function is None:
            raise HostError(f"device {address} has gone from this node")
        pci.unbind(paths, function)
        pci.bind(paths, msgspec.structs.replace(function, driver=""), driver)
