"""The allocations of this node: in memory, and in the checkpoint on disk.

The plugin answers an Allocate after the checkpoint with the allocation is on disk. So neither a
kill nor a power cut loses an answered allocation.

The kubelet never reports the end of an allocation, so `reconcile` compares the ledger with the
kubelet's records. An allocation that only the ledger has is dropped once it is older than `YOUNG`.
An allocation that only the kubelet has is adopted.
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

YOUNG = 120.0  # seconds in which the kubelet's records may not have an allocation yet
YOUNG_GPU = 15.0  # the same for GPUs; until then no other container gets the part

Given = tuple[AllocatedHCA, ...] | AllocatedGPU
"""What one device id gives a container: HCAs, or a part of a GPU."""


class _LedgerEntry(NamedTuple):
    allocation: Allocation
    encoded: checkpoint.EncodedAllocation
    made: float  # time.monotonic(), because the time of day may be set after a boot


class Ledger:
    """The allocations of this node. Any thread may use it.

    Readers take no lock: `_entries` is replaced, never changed. `__init__` raises
    CheckpointUnreadable if the checkpoint cannot be read at the moment; the caller tries again.
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
        """Record the HCA ids that each pool offers. Raises OSError; `settle` then tries again."""
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
        """How many allocations each HCA has, over all resources.

        Allocations in `free` do not count.
        """
        return Counter(
            device.id
            for allocation in self.allocations()
            if allocation.key not in free
            for device in allocation.devices
        )

    def record(self, resource: str, given: Mapping[str, Given]) -> None:
        """Record an Allocate on disk, by device id. Raises OSError."""
        with self._lock:
            self._add(self._allocations(resource, given))

    def bind(self, gpus: Mapping[AllocationKey, AllocatedGPU]) -> None:
        """Replace the GPU parts of allocations on disk, in one write.

        Keys without an allocation are left out. Raises OSError.
        """
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

        An existing allocation is replaced only if `replaceable` has the same object. If not, an
        Allocate has recorded a newer allocation since the caller read the ledger.
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
        """Drop allocations that the kubelet does not have. Returns their keys.

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
        """Write the file. Memory is updated only after the write has succeeded."""
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
    """Seconds since the allocation; 0 if its time is in the future, because the clock was set.

    The age is infinite if the allocation has no valid time or is of another boot.
    """
    try:
        seconds = (now - datetime.fromisoformat(allocation.time)).total_seconds()
    except (ValueError, TypeError):
        return math.inf
    return max(seconds, 0.0) if allocation.boot_id == boot_id else math.inf
