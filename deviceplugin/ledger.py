"""The allocations of this node, in memory and in the checkpoint on disk.

An allocation is on disk before the kubelet gets the answer. So neither a kill nor a power cut loses
an answered allocation.

The kubelet never reports the end of an allocation, so `reconcile` compares the ledger with the
kubelet's records. Allocations that the kubelet lacks are dropped after `YOUNG` seconds. Allocations
that only the kubelet has are recorded as adopted.
"""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType
from typing import NamedTuple

from msgspec.structs import replace

from base.paths import Paths
from base.types import DeviceId
from deviceplugin import checkpoint
from deviceplugin.checkpoint import AllocatedGPU, AllocatedHCA, Allocation, AllocationKey

YOUNG = 120.0  # seconds until the kubelet's records certainly have a new allocation
YOUNG_GPU = 15.0  # the same for parts of GPUs

Given = tuple[AllocatedHCA, ...] | AllocatedGPU
"""The devices of one device id: HCAs, or a part of a GPU."""


class _LedgerEntry(NamedTuple):
    allocation: Allocation
    encoded: checkpoint.EncodedAllocation
    made: float  # time.monotonic(), because the time of day may be set after a boot


class Ledger:
    """The allocations of this node. Any thread may use it. Raises CheckpointUnreadable.

    Readers take no lock, because `_entries` is replaced and never changed.
    """

    def __init__(self, paths: Paths, boot_id: str, warn: Callable[[str], object]) -> None:
        self._paths = paths
        self.boot_id = boot_id  # of the current boot
        self._offered: dict[str, tuple[str, ...]] = {}  # the HCA ids of each pool, by resource
        self._written: dict[str, tuple[str, ...]] = {}  # the HCA ids that the file has
        self.allocating = threading.Lock()  # from the check of an HCA's holders to the record
        self._lock = threading.Lock()  # held by the writer
        self._has_file = False  # this process wrote the file
        self._failed = False  # the last write failed
        try:
            checkpoint.recover(paths)
            allocations = checkpoint.read(paths).allocations
        except checkpoint.CheckpointUnreadable:
            raise  # replacing an intact file would lose allocations
        except checkpoint.CheckpointDamaged as damage:
            warn(f"{damage} (keeping a copy, and using the kubelet's records)")
            _keep_aside(paths)
            allocations = ()
            self._failed = True  # `serve` replaces the file; until then readers see the damage
        now, today = time.monotonic(), datetime.now(UTC)
        self._entries: dict[AllocationKey, _LedgerEntry] = {
            allocation.key: _LedgerEntry(
                allocation, checkpoint.encode(allocation), now - age(allocation, boot_id, today)
            )
            for allocation in allocations
        }

    def serve(self, offered: Mapping[str, Sequence[str]]) -> None:
        """Record the HCA ids that each pool offers. After an OSError, `settle` tries again."""
        with self._lock:
            self._offered = {resource: tuple(hcas) for resource, hcas in sorted(offered.items())}
            if self._failed or self._offered != self._written:
                self._replace(self._entries)

    def allocations(self) -> list[Allocation]:
        """All allocations, in the order in which their ids were first allocated."""
        return [entry.allocation for entry in self._entries.values()]

    def keys(self) -> frozenset[AllocationKey]:
        return frozenset(self._entries)

    def held(self, resource: str) -> dict[str, Allocation]:
        return {
            allocation.id: allocation
            for allocation in self.allocations()
            if allocation.resource == resource
        }

    def loads(self, free: Collection[AllocationKey] = ()) -> Counter[str]:
        """The number of allocations of each HCA. Allocations in `free` do not count."""
        return Counter(
            device.id
            for allocation in self.allocations()
            if allocation.key not in free
            for device in allocation.devices
        )

    def record(self, resource: str, given: Mapping[str, Given]) -> None:
        """Record an Allocate on disk. `given` has the devices by device id. Raises OSError."""
        with self._lock:
            self._add(self._allocations(resource, given))

    def bind(self, gpus: Mapping[AllocationKey, AllocatedGPU]) -> None:
        """Replace the GPUs of existing allocations on disk, in one write. Raises OSError."""
        with self._lock:
            changed = {
                key: _LedgerEntry(
                    new := replace(entry.allocation, gpu=gpu), checkpoint.encode(new), entry.made
                )
                for key, gpu in gpus.items()
                if (entry := self._entries.get(key)) and entry.allocation.gpu != gpu
            }
            if changed:
                self._replace(self._entries | changed)

    def adopt(
        self,
        resource: str,
        given: Mapping[str, Given],
        replaceable: Mapping[str, Allocation] = MappingProxyType({}),
    ) -> None:
        """Record allocations that only the kubelet has, by device id. Raises OSError.

        Also replaces allocations in `replaceable`, unless an Allocate was faster.
        """
        with self._lock:
            self._add(
                allocation
                for allocation in self._allocations(resource, given, adopted=True)
                if allocation.key not in self._entries
                or replaceable.get(allocation.id) is self._entries[allocation.key].allocation
            )

    def drop_unknown(
        self, in_kubelet: Collection[AllocationKey], age: float = YOUNG
    ) -> list[AllocationKey]:
        """Drop allocations that the kubelet does not have. Returns the dropped keys.

        Keeps allocations younger than `age` seconds, and parts of GPUs younger than YOUNG_GPU.
        """
        now = time.monotonic()
        with self._lock:
            dropped = [
                key
                for key, entry in self._entries.items()
                if key not in in_kubelet
                and now - entry.made > (min(age, YOUNG_GPU) if entry.allocation.gpu else age)
            ]
            if dropped:
                self._replace(
                    {key: entry for key, entry in self._entries.items() if key not in dropped}
                )
        return dropped

    def settle(self) -> None:
        """Write the file again if the last write failed or the file is gone. Raises OSError."""
        with self._lock:
            removed = self._has_file and not self._paths.checkpoint.exists()
            if self._failed or removed:
                self._replace(self._entries)

    def _allocations(
        self, resource: str, given: Mapping[str, Given], *, adopted: bool = False
    ) -> Iterator[Allocation]:
        now = timestamp()
        for device_id, of in given.items():
            yield Allocation(
                resource=resource,
                id=DeviceId(device_id),
                devices=() if isinstance(of, AllocatedGPU) else of,
                time=now,
                boot_id=self.boot_id,
                adopted=adopted,
                gpu=of if isinstance(of, AllocatedGPU) else None,
            )

    def _add(self, allocations: Iterable[Allocation]) -> None:
        made = time.monotonic()
        new = {
            allocation.key: _LedgerEntry(allocation, checkpoint.encode(allocation), made)
            for allocation in allocations
        }
        if new:
            self._replace(self._entries | new)

    def _replace(self, entries: dict[AllocationKey, _LedgerEntry]) -> None:
        """Write the file, then replace `_entries`. Raises OSError."""
        self._failed = True
        encoded = [entry.encoded for entry in entries.values()]
        checkpoint.write(self._paths, encoded, self._offered)
        self._entries, self._written = entries, self._offered
        self._has_file, self._failed = True, False


def timestamp() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _keep_aside(paths: Paths) -> None:
    """Keep a copy of the damaged file. The file stays, so that readers see the damage."""
    aside = paths.checkpoint.with_suffix(".damaged")
    aside.unlink(missing_ok=True)
    aside.hardlink_to(paths.checkpoint)


def age(allocation: Allocation, boot_id: str, now: datetime) -> float:
    """Seconds since the allocation, at least 0; infinite after a reboot or for an invalid time."""
    try:
        seconds = (now - datetime.fromisoformat(allocation.time)).total_seconds()
    except (ValueError, TypeError):
        return math.inf
    return max(seconds, 0.0) if allocation.boot_id == boot_id else math.inf
