"""The adapters of the node, as last seen, and those that were seen once and are held still."""

import threading
from collections.abc import Iterable

import msgspec

from deviceplugin import checkpoint
from host import adapters as sysfs
from host import glance
from host.adapters import Adapter
from host.paths import Paths


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
        self._untold = False  # before, for somebody else may look meanwhile
        return self._look()

    def last(self) -> list[Adapter]:
        """What was there at the last look."""
        return [self._found[known] for known in sorted(self._found)]

    def differs(self, *, told: bool, ports: bool = False) -> bool:
        """Whether a look would see something else than the last one: devices, ports' states.

        A fraction of its cost. Unless the kernel `told` of some change only those ports are read
        that have no interface with a carrier, of whose end it would have told: to read a port's
        state is to ask the adapter's firmware. With `ports` the state and the rate of every one:
        a subnet manager that sets a port back, or a lane that fails, leaves the carrier as it is.
        """
        found = list(self._found.values())
        return (
            self._untold
            or self._hardware != glance.hardware(self._paths)
            or (told and self._verbs != glance.verbs(self._paths))
            or glance.has_other_states(self._paths, found, every=told or ports)
            or (ports and glance.has_other_rates(self._paths, found))
        )

    def current(self, ids: Iterable[str], *, mad: bool = True) -> dict[str, Adapter]:
        """The adapters of these ids that are there, with the device numbers that they have now.

        Without `mad` those of umad and issm devices may be older.
        """
        wanted = list(ids)
        if not all(self._is_as_seen(known, mad=mad) for known in wanted):
            self._look()
            self._untold = True  # whoever looks next is to take in all of it
        return {known: self._found[known] for known in wanted if known in self._found}

    def missing(self, held: Iterable[checkpoint.Device]) -> list[Adapter]:
        """Adapters that are handed out and not there, as they were, without RDMA devices."""
        gone = {device.id: device for device in held if device.id not in self._found}
        return [self._remembered(gone[known]) for known in sorted(gone)]

    def _look(self) -> list[Adapter]:
        # Before, so that no change is missed.
        hardware, verbs = glance.hardware(self._paths), glance.verbs(self._paths)
        found = sysfs.adapters(self._paths)
        with self._lock:
            self._hardware, self._verbs = hardware, verbs
            self._found = {adapter.id: adapter for adapter in found}
            self._seen |= self._found
            self._worked.update(adapter.id for adapter in found if adapter.working)
        return found

    def _is_as_seen(self, known: str, *, mad: bool) -> bool:
        adapter = self._found.get(known)
        if adapter is None:
            return glance.is_absent(self._paths, known)
        return glance.has_its_devices(self._paths, adapter, mad=mad)

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
