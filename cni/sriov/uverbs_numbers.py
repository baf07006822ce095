"""Keeps the numbers of uverbs devices: containers have them since their pod was admitted.

The kernel gives the lowest free number to a device that is bound, created, or moved to another
namespace, over all RDMA devices of the node. Two at the same time could swap their numbers, so one
call at a time does this.
"""

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import msgspec

from base import locks
from base.paths import Paths
from cni.spec.errors import CNIError, Code
from host.errors import HostError
from host.sysfs import pci

_own = threading.local()  # `held`: this thread has the lock


@contextmanager
def exclusively(paths: Paths) -> Iterator[None]:
    """Let no other call make the kernel number devices in the block. Blocks may be nested."""
    if getattr(_own, "held", False):
        yield
        return
    with locks.locked(paths.locks / "uverbs", "numbering RDMA devices"):
        _own.held = True
        try:
            yield
        finally:
            _own.held = False


@contextmanager
def kept(paths: Paths, names: Collection[str]) -> Iterator[None]:
    """As `exclusively`, if there are RDMA devices with these names.

    Raises CNIError 100 if one has another number after the block.
    """
    if not names:
        yield
        return
    with exclusively(paths):
        before = pci.uverbs_numbers(paths)
        yield
        after = pci.uverbs_numbers(paths)
    for name in names:
        old, new = before.get(name), after.get(name)
        if old is not None and new is not None and old != new:
            raise CNIError(
                Code.KERNEL,
                f"RDMA device {name} was {old[0]} ({old[1]}:{old[2]}), which the pod has, and is "
                f"{new[0]} ({new[1]}:{new[2]}) in the pod: the kernel has given it the lowest free "
                "number: delete the pod, so that it gets a new device",
            )


def bind(paths: Paths, address: str, driver: str) -> None:
    """Unbind the device's driver, if it has one, and bind `driver`. Raises HostError, Busy."""
    with exclusively(paths):
        function = pci.find(paths, address)
        if function is None:
            raise HostError(f"device {address} has gone from this node")
        pci.unbind(paths, function)
        pci.bind(paths, msgspec.structs.replace(function, driver=""), driver)
