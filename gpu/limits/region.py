"""The file `region` of a group: what its processes say they use. They can write anything there.

So it is only read, with pread(2): a mapping would end in SIGBUS if the tenant made the file
shorter. Numbers are clamped to what they can be, and decide nothing about another group.
"""

import os
import struct
import time
from collections.abc import Iterable
from ctypes import sizeof
from pathlib import Path

import msgspec

from gpu.limits import layout
from gpu.limits.layout import MUTEX_KIND, MUTEX_KIND_AT

MOST_BYTES = 1 << 50  # more than any GPU has
MOST_COUNT = 1 << 62
MOST_NS = 1 << 62
_GPU, _SLOT = sizeof(layout.PfGpu), sizeof(layout.PfSlot)
_FIELDS = struct.Struct("<I28xQ8xQQ")  # of struct pf_slot: state, registration, data, context


class RegionInvalid(Exception):
    """The tenant has damaged its file. The text names the file and says what is wrong."""


class RegionUse(msgspec.Struct, frozen=True, kw_only=True):
    """What a group says of its GPU. Bytes, counts, ns; times by CLOCK_MONOTONIC, not in the future.

    `tat`, which is in the future while launches wait, is at most 2^62.
    """

    used_bytes: int
    peak_bytes: int
    denied: int
    tat: int
    backlogged_at: int  # 0: never
    longest_ns: int
    longest_at: int
    launches: int
    throttled: int
    wait_ns: int
    last_launch: int  # 0: never
    launched_ns: int  # GPU time of all launches that paid, as estimated
    finished_ns: int
    paid_ns: int
    paid_finished_ns: int
    lock_recoveries: int
    stale_slots: int
    refused_slots: int


class SlotUse(msgspec.Struct, frozen=True, kw_only=True):
    """What one process says it has allocated; bytes."""

    registration: int
    data_bytes: int
    context_bytes: int


class Region:
    """An open `region`. Every method raises RegionInvalid.

    Args:
        path: the file.
        allocation: 16 bytes, from `limits`.
    """

    def __init__(self, path: Path | str, allocation: bytes) -> None:
        self._path = path
        try:
            # Without waiting: the tenant may hold a lease of its file (fcntl(2), F_SETLEASE).
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
            self._descriptor = os.open(path, flags)
        except OSError as error:
            raise RegionInvalid(f"{path}: {error.strerror}") from None
        try:
            self._header = self._checked(allocation)
        except BaseException:
            os.close(self._descriptor)
            raise

    def __enter__(self) -> "Region":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def use(self) -> RegionUse:
        """What the group says of its GPU. Counts of slots are as of the opening."""
        gpu = layout.PfGpu.from_buffer_copy(self._read(layout.USE_AT, _GPU))
        now, use = time.monotonic_ns(), {}
        for name in RegionUse.__struct_fields__:
            most = _most(name)
            said = getattr(gpu if hasattr(gpu, name) else self._header, name)
            use[name] = min(said, now if most is None else most)
        return RegionUse(**use)

    def slots(self, wanted: Iterable[int]) -> dict[int, SlotUse]:
        """The slots of these indices that a process uses."""
        slots = {}
        for index in wanted:
            content = self._read(layout.SLOT_AT + index * _SLOT, _SLOT)
            state, registration, *used = _FIELDS.unpack(content)
            if state == layout.SLOT_USED:
                data, context = (min(number, MOST_BYTES) for number in used)
                slots[index] = SlotUse(
                    registration=registration, data_bytes=data, context_bytes=context
                )
        return slots

    def _checked(self, allocation: bytes) -> layout.PfRegionHeader:
        size = os.fstat(self._descriptor).st_size
        if size != layout.REGION_SIZE:
            raise RegionInvalid(f"{self._path}: has {size} bytes and not {layout.REGION_SIZE}")
        content = self._read(0, layout.USE_AT)
        header = layout.PfRegionHeader.from_buffer_copy(content)
        wanted = (layout.REGION_MAGIC, layout.VERSION, layout.REGION_SIZE, MUTEX_KIND)
        kind = int.from_bytes(bytes(header.mutex[MUTEX_KIND_AT : MUTEX_KIND_AT + 4]), "little")
        if (header.magic, header.version, header.size, kind) != wanted:
            raise RegionInvalid(f"{self._path}: its header was overwritten")
        if bytes(header.allocation) != allocation:
            raise RegionInvalid(f"{self._path}: belongs to another allocation than its limits")
        return header

    def _read(self, offset: int, size: int) -> bytes:
        try:
            content = os.pread(self._descriptor, size, offset)
        except OSError as error:
            raise RegionInvalid(f"{self._path}: {error.strerror}") from None
        if len(content) != size:
            raise RegionInvalid(f"{self._path}: was made shorter")
        return content


def content_of(allocation: bytes) -> bytes:
    """A new file's content: nothing is used, and the mutex is open."""
    header = layout.PfRegionHeader()
    header.magic, header.version = layout.REGION_MAGIC, layout.VERSION
    header.size = layout.REGION_SIZE
    header.allocation[:] = allocation
    header.mutex[MUTEX_KIND_AT] = MUTEX_KIND
    return bytes(header).ljust(layout.REGION_SIZE, b"\0")


def _most(name: str) -> int | None:
    """The most that a field can be; None: the time of now."""
    if name.endswith("_at") or name == "last_launch":
        return None
    if name.endswith("_bytes"):
        return MOST_BYTES
    return MOST_NS if name.endswith("_ns") or name == "tat" else MOST_COUNT
