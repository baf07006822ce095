"""The adapters of the node, as last seen, and those that were seen once and are held still."""

import os
import threading
from collections.abc import Iterable

import msgspec

from deviceplugin import checkpoint
from host import adapters as sysfs
from host.adapters import Adapter, Node
from host.paths import Paths


class Inventory:
    """A picture of sysfs. Any thread may use it."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._lock = threading.Lock()
        self._found: dict[str, Adapter] = {}
        self._seen: dict[str, Adapter] = {}
        self._worked: set[str] = set()
        self._names: frozenset[str] = frozenset()

    @property
    def worked(self) -> frozenset[str]:
        """The adapters that had a working port some time, since this began."""
        return frozenset(self._worked)

    def look(self) -> list[Adapter]:
        """What is there now, sorted by id."""
        names = _names(f"{self._paths.sys}/class/infiniband")  # before, so that none is missed
        found = sysfs.adapters(self._paths)
        with self._lock:
            self._names = names
            self._found = {adapter.id: adapter for adapter in found}
            self._seen |= self._found
            self._worked.update(adapter.id for adapter in found if adapter.working)
        return found

    def differs(self) -> bool:
        """Whether RDMA devices came or went, or a port's state is another than last seen.

        A fraction of the cost of a look: a port without an interface changes without an event.
        """
        devices = [rdma for adapter in self._found.values() for rdma in adapter.rdma]
        root = f"{self._paths.sys}/class/infiniband"
        if _names(root) != self._names:
            return True
        return any(
            _text(f"{root}/{rdma.name}/ports/{port.number}/state").partition(": ")[2] != port.state
            or _text(f"{root}/{rdma.name}/ports/{port.number}/rate") != port.rate
            for rdma in devices
            for port in rdma.ports
        )

    def current(self, ids: Iterable[str]) -> dict[str, Adapter]:
        """The adapters of these ids that are there, with the device numbers that they have now."""
        wanted = list(ids)
        cached = [self._found.get(known) for known in wanted]
        if not all(adapter is not None and self._is_as_seen(adapter) for adapter in cached):
            self.look()
        return {known: self._found[known] for known in wanted if known in self._found}

    def missing(self, held: Iterable[checkpoint.Device]) -> list[Adapter]:
        """Adapters that are handed out and not there, as they were, without RDMA devices."""
        gone = {device.id: device for device in held if device.id not in self._found}
        return [self._remembered(gone[known]) for known in sorted(gone)]

    def _is_as_seen(self, adapter: Adapter) -> bool:
        """Whether the names and numbers of its devices are still its own.

        All of them are handed out anew when a driver is loaded, also to one another.
        """
        for rdma in adapter.rdma:
            place = _target(f"{self._paths.sys}/class/infiniband/{rdma.name}")
            # ".../0000:3b:00.0/infiniband/mlx5_0"
            if adapter.address and place.split("/")[-3:-2] != [adapter.address]:
                return False
            if rdma.uverbs is None or not self._belongs("infiniband_verbs", rdma.uverbs, rdma.name):
                return False
            for node in (node for port in rdma.ports for node in (port.umad, port.issm)):
                if node is not None and not self._belongs("infiniband_mad", node, rdma.name):
                    return False
        return True

    def _belongs(self, of: str, node: Node, rdma: str) -> bool:
        directory = f"{self._paths.sys}/class/{of}/{node.name}"
        return (
            _text(f"{directory}/dev") == f"{node.major}:{node.minor}"
            and _text(f"{directory}/ibdev") == rdma
        )

    def _remembered(self, device: checkpoint.Device) -> Adapter:
        seen = self._seen.get(device.id)
        if seen is not None:
            return msgspec.structs.replace(seen, rdma=(), netdevs=(), link_types=())
        return Adapter(
            id=device.id,
            address=device.address,
            vendor="",
            device="",
            driver="",
            pf="",
            pf_netdevs=(),
            index=None,
            aux_type="",
            numa=None,
            acpi_index="",
            netdevs=(),
            link_types=(),
            rdma=(),
            verbs=tuple(rdma.name for rdma in device.rdma),
            iommu_group="",
            software=not device.address,
            num_vfs=0,
        )


# Every Allocate looks at these, and a Path costs more than the look.


def _text(path: str) -> str:
    try:
        with open(path) as file:  # noqa: PTH123
            return file.read().strip()
    except OSError:
        return ""


def _names(directory: str) -> frozenset[str]:
    try:
        return frozenset(os.listdir(directory))  # noqa: PTH208
    except OSError:
        return frozenset()


def _target(link: str) -> str:
    try:
        return os.readlink(link)  # noqa: PTH115
    except OSError:
        return ""
