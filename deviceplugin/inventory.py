"""The HCAs of the node, as last seen, and those that were seen once and are held still."""

import threading
from collections.abc import Iterable

import msgspec

from base.paths import Paths
from deviceplugin import checkpoint
from host import change_detection
from host import discovery as sysfs
from host.discovery import HCA


class Inventory:
    """A picture of sysfs. Any thread may use it."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._lock = threading.Lock()
        self._found: dict[str, HCA] = {}
        self._seen: dict[str, HCA] = {}
        self._worked: set[str] = set()
        self._hardware: frozenset[str] = frozenset()
        self._uverbs: frozenset[str] = frozenset()
        self._untold = False  # somebody looked who told nobody

    @property
    def worked(self) -> frozenset[str]:
        """The HCAs that had a working port some time, since this began."""
        return frozenset(self._worked)

    def look(self) -> list[HCA]:
        """What is there now, sorted by id."""
        self._untold = False  # before, for somebody else may look meanwhile
        return self._look()

    def last(self) -> list[HCA]:
        """What was there at the last look."""
        return [self._found[known] for known in sorted(self._found)]

    def differs(self, *, told: bool, ports: bool = False) -> bool:
        """Whether a look would see something else than the last one: devices, ports' states.

        A fraction of its cost. Unless the kernel `told` of some change only those ports are read
        that have no interface with a carrier, of whose end it would have told: to read a port's
        state is to ask the HCA's firmware. With `ports` the state and the rate of every one:
        a subnet manager that sets a port back, or a lane that fails, leaves the carrier as it is.
        """
        found = list(self._found.values())
        return (
            self._untold
            or self._hardware != change_detection.hardware(self._paths)
            or (told and self._uverbs != change_detection.uverbs(self._paths))
            or change_detection.has_other_states(self._paths, found, every=told or ports)
            or (ports and change_detection.has_other_rates(self._paths, found))
        )

    def current(self, ids: Iterable[str], *, mad: bool = True) -> dict[str, HCA]:
        """The HCAs of these ids that are there, with the device numbers that they have now.

        Without `mad` those of umad and issm devices may be older.
        """
        wanted = list(ids)
        if not all(self._is_as_seen(known, mad=mad) for known in wanted):
            self._look()
            self._untold = True  # whoever looks next is to take in all of it
        return {known: self._found[known] for known in wanted if known in self._found}

    def missing(self, held: Iterable[checkpoint.AllocatedHCA]) -> list[HCA]:
        """Adapters that are handed out and not there, as they were, without RDMA devices."""
        gone = {device.id: device for device in held if device.id not in self._found}
        return [self._remembered(gone[known]) for known in sorted(gone)]

    def _look(self) -> list[HCA]:
        # Before, so that no change is missed.
        hardware, uverbs = (
            change_detection.hardware(self._paths),
            change_detection.uverbs(self._paths),
        )
        found = sysfs.hcas(self._paths)
        with self._lock:
            self._hardware, self._uverbs = hardware, uverbs
            self._found = {hca.id: hca for hca in found}
            self._seen |= self._found
            self._worked.update(hca.id for hca in found if hca.working)
        return found

    def _is_as_seen(self, known: str, *, mad: bool) -> bool:
        hca = self._found.get(known)
        if hca is None:
            return change_detection.is_absent(self._paths, known)
        return change_detection.has_its_devices(self._paths, hca, mad=mad)

    def _remembered(self, device: checkpoint.AllocatedHCA) -> HCA:
        seen = self._seen.get(device.id)
        if seen is not None:
            return msgspec.structs.replace(seen, rdma=(), netdevs=(), link_types=())
        return HCA(
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
            rdma_names=tuple(rdma.name for rdma in device.rdma),
            iommu_group="",
            software=not device.address,
            num_vfs=0,
        )
