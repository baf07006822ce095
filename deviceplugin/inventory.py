"""The adapters of the node, as last seen, and those that were seen once and are held still."""

import os
import threading
from collections.abc import Iterable

import msgspec

from deviceplugin import checkpoint
from host import adapters as sysfs
from host.adapters import Adapter, Node
from host.paths import Paths

_VERBS = "class/infiniband_verbs"
_PARTS = ("class/infiniband", _VERBS, "bus/pci/devices", "bus/auxiliary/devices")


class Inventory:
    """A picture of sysfs. Any thread may use it."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._lock = threading.Lock()
        self._found: dict[str, Adapter] = {}
        self._seen: dict[str, Adapter] = {}
        self._worked: set[str] = set()
        self._hardware: frozenset[str] = frozenset()
        self._verbs: frozenset[str] = frozenset()
        self._untold = False  # somebody looked who told nobody

    @property
    def worked(self) -> frozenset[str]:
        """The adapters that had a working port some time, since this began."""
        return frozenset(self._worked)

    def look(self) -> list[Adapter]:
        """What is there now, sorted by id."""
        found = self._look()
        self._untold = False
        return found

    def last(self) -> list[Adapter]:
        """What was there at the last look."""
        return [self._found[known] for known in sorted(self._found)]

    def differs(self, *, told: bool) -> bool:
        """Whether a look would see something else than the last one: devices, ports' states.

        A fraction of its cost. Unless the kernel `told` of some change only those ports are read
        that have no interface with a carrier, of whose end it would have told: to read a port's
        state is to ask the adapter's firmware.
        """
        if self._untold or self._hardware != self._devices(told=told):
            return True
        sys = self._paths.sys
        root = f"{sys}/class/infiniband"
        return any(
            _text(f"{root}/{rdma.name}/ports/{port.number}/state").partition(": ")[2] != port.state
            for adapter in list(self._found.values())
            for rdma in adapter.rdma
            for port in rdma.ports
            if told or not any(_text(f"{sys}/class/net/{n}/carrier") == "1" for n in port.netdevs)
        )

    def current(self, ids: Iterable[str]) -> dict[str, Adapter]:
        """The adapters of these ids that are there, with the device numbers that they have now."""
        wanted = list(ids)
        if not all(self._is_as_seen(known) for known in wanted):
            self._look()
            self._untold = True  # whoever looks next is to take in all of it
        return {known: self._found[known] for known in wanted if known in self._found}

    def missing(self, held: Iterable[checkpoint.Device]) -> list[Adapter]:
        """Adapters that are handed out and not there, as they were, without RDMA devices."""
        gone = {device.id: device for device in held if device.id not in self._found}
        return [self._remembered(gone[known]) for known in sorted(gone)]

    def _look(self) -> list[Adapter]:
        hardware = self._devices(told=True)  # before, so that none is missed
        found = sysfs.adapters(self._paths)
        with self._lock:
            self._hardware = hardware
            self._found = {adapter.id: adapter for adapter in found}
            self._seen |= self._found
            self._worked.update(adapter.id for adapter in found if adapter.working)
        return found

    def _devices(self, *, told: bool) -> frozenset[str]:
        """Names that come and go with the hardware, its drivers and its interfaces."""
        sys = self._paths.sys
        names = {f"{part}/{name}" for part in _PARTS for name in _names(f"{sys}/{part}")}
        interfaces = _names(f"{sys}/class/net")
        names.update(name for name in interfaces if _is_hardware(f"{sys}/class/net/{name}"))
        if told:
            self._verbs = frozenset(
                f"{name} {_text(f'{sys}/{_VERBS}/{name}/ibdev')}"
                for name in _names(f"{sys}/{_VERBS}")
            )
        return frozenset(names) | self._verbs

    def _is_as_seen(self, known: str) -> bool:
        """Whether an adapter's devices still have the names and numbers that they had.

        All of them are handed out anew when a driver is loaded, also to one another.
        """
        adapter = self._found.get(known)
        sys = self._paths.sys
        if adapter is None:
            places = ("bus/pci/devices", "bus/auxiliary/devices", "class/infiniband")
            return not any(os.path.lexists(f"{sys}/{place}/{known}") for place in places)
        if not adapter.rdma:  # its RDMA devices may be back from a pod
            return not any(os.path.lexists(f"{sys}/class/infiniband/{n}") for n in adapter.verbs)
        for rdma in adapter.rdma:
            place = _target(f"{sys}/class/infiniband/{rdma.name}")
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


def _is_hardware(netdev: str) -> bool:
    return "/virtual/" not in _target(netdev)


def _target(link: str) -> str:
    try:
        return os.readlink(link)  # noqa: PTH115
    except OSError:
        return ""
