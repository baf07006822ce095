"""Rebinds a device's driver, for one device of the node at a time (`numbering`)."""

import msgspec

from base.paths import Paths
from cni.sriov import numbering
from host import pci
from host.errors import HostError


def bind(paths: Paths, address: str, driver: str) -> None:
    """Unbind the device's driver, if it has one, and bind `driver`. Raises HostError, Busy."""
    with numbering.exclusively(paths):
        function = pci.find(paths, address)
        if function is None:
            raise HostError(f"device {address} has gone from this node")
        pci.unbind(paths, function)
        pci.bind(paths, msgspec.structs.replace(function, driver=""), driver)
