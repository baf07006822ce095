"""The HCAs that sysfs last showed, and absent HCAs that are still allocated."""

import threading
from collections.abc import Iterable, Sequence

import msgspec

from base.paths import Paths
from deviceplugin.checkpoint import AllocatedHCA, Allocation
from deviceplugin.pools.pool import Pool, pools, used_netdevs
from deviceplugin.pools.pool_config import DevicePluginConfig
from host.sysfs import change_detection, discovery
from host.sysfs.discovery import HCA


class Inventory:
    """The HCAs that sysfs shows. Any thread may use it."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._lock = threading.Lock()
        self._hcas: dict[str, HCA] = {}
        self._seen: dict[str, HCA] = {}
        self._worked: set[str] = set()  # ids of HCAs that had a working port once
        self._hardware: frozenset[str] = frozenset()
        self._uverbs: frozenset[str] = frozenset()
        self._unreported = False  # `current` read sysfs since the last `look`

    def look(self) -> list[HCA]:
        """Read sysfs. Returns the present HCAs, sorted by id."""
        self._unreported = False  # first, because another thread may look in the meantime
        return self._look()

    def last(self) -> list[HCA]:
        """The HCAs of the last look, sorted by id."""
        return [self._hcas[hca_id] for hca_id in sorted(self._hcas)]

    def differs(self, *, rates: bool = False) -> bool:
        """Whether devices, port states or (with `rates`) port rates differ from the last look."""
        hcas = list(self._hcas.values())
        return (
            self._unreported
            or self._hardware != change_detection.hardware(self._paths)
            or self._uverbs != change_detection.uverbs(self._paths)
            or change_detection.has_other_ports(self._paths, hcas, rates=rates)
        )

    def current(self, ids: Iterable[str]) -> dict[str, HCA]:
        """The present HCAs with these ids, with their current device numbers."""
        requested = list(ids)
        if not all(map(self._is_as_seen, requested)):
            self._look()
            self._unreported = True  # `differs` must still report the change
        return {hca_id: self._hcas[hca_id] for hca_id in requested if hca_id in self._hcas}

    def missing(self, allocations: Iterable[Allocation]) -> list[HCA]:
        """Held HCAs that the node no longer has: the last known data, without RDMA devices."""
        held = {device.id: device for entry in allocations for device in entry.devices}
        return [self._remembered(held[hca_id]) for hca_id in sorted(held.keys() - self._hcas)]

    def pools(self, config: DevicePluginConfig, allocations: Sequence[Allocation]) -> list[Pool]:
        """The pools with the HCAs of the last look, and with absent HCAs that are still held."""
        kept: dict[str, set[str]] = {}
        for entry in allocations:
            kept.setdefault(entry.resource, set()).update(hca.id for hca in entry.devices)
        hcas = [*self.last(), *self.missing(allocations)]
        used = used_netdevs(self._paths)
        return pools(config, hcas, kept, used, worked=frozenset(self._worked))

    def _look(self) -> list[HCA]:
        # Read these before the look, so that no change is missed.
        hardware = change_detection.hardware(self._paths)
        uverbs = change_detection.uverbs(self._paths)
        hcas = discovery.hcas(self._paths)
        with self._lock:
            self._hardware, self._uverbs = hardware, uverbs
            self._hcas = {hca.id: hca for hca in hcas}
            self._seen |= self._hcas
            self._worked.update(hca.id for hca in hcas if hca.working)
        return hcas

    def _is_as_seen(self, hca_id: str) -> bool:
        if (hca := self._hcas.get(hca_id)) is None:
            return change_detection.is_absent(self._paths, hca_id)
        return change_detection.has_its_devices(self._paths, hca)

    def _remembered(self, device: AllocatedHCA) -> HCA:
        seen = self._seen.get(device.id)
        if seen is not None:
            return msgspec.structs.replace(seen, rdma=(), netdevs=(), link_types=())
        return HCA(
            id=device.id,
            address=device.address,
            rdma_names=tuple(rdma.name for rdma in device.rdma),
            software=not device.address,
        )
