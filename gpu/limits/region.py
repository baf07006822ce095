"""The file `region`, where the processes of a group report their use of the GPU.

The tenant can write anything to the file. False numbers have no effect on other groups. The agent
uses pread(2), because a mapping would cause SIGBUS if the tenant truncated the file.
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
_FIELDS = struct.Struct("<I28xQ8xQ8x")  # of struct pf_slot: state, registration, data_bytes


class RegionInvalid(Exception):
    """The file is missing, or the tenant has damaged it."""


class RegionUse(msgspec.Struct, frozen=True, kw_only=True):
    """The use of the GPU as the group reports it. Points in time are ns of CLOCK_MONOTONIC."""

    used_bytes: int
    peak_bytes: int
    denied: int
    tat: int  # the group has paid until this point, which may be in the future
    backlogged_at: int  # 0: never
    longest_ns: int
    longest_at: int
    launches: int
    throttled: int
    wait_ns: int
    last_launch: int  # 0: never
    launched_ns: int  # estimated GPU time of all launches that paid
    finished_ns: int
    paid_ns: int
    paid_finished_ns: int
    lock_recoveries: int
    stale_slots: int
    refused_slots: int


class SlotUse(msgspec.Struct, frozen=True, kw_only=True):
    registration: int
    data_bytes: int


class Region:
    """An open file `region`. The file `limits` has the same `allocation`. Raises RegionInvalid."""

    def __init__(self, path: Path | str, allocation: bytes) -> None:
        self._path = path
        try:
            # O_NONBLOCK: the tenant may hold a lease of its file (fcntl(2), F_SETLEASE).
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
        os.close(self._descriptor)

    def use(self) -> RegionUse:
        """The last three fields were read when the file was opened."""
        gpu = layout.PfGpu.from_buffer_copy(self._read(layout.USE_AT, _GPU))
        now, use = time.monotonic_ns(), {}
        for name in RegionUse.__struct_fields__:
            most = _most(name)
            value = getattr(gpu if hasattr(gpu, name) else self._header, name)
            use[name] = min(value, now if most is None else most)
        return RegionUse(**use)

    def slots(self, indices: Iterable[int]) -> dict[int, SlotUse]:
        slots = {}
        for index in indices:
            content = self._read(layout.SLOT_AT + index * _SLOT, _SLOT)
            state, registration, data = _FIELDS.unpack(content)
            if state == layout.SLOT_USED:
                slots[index] = SlotUse(registration=registration, data_bytes=min(data, MOST_BYTES))
        return slots

    def _checked(self, allocation: bytes) -> layout.PfRegionHeader:
        size = os.fstat(self._descriptor).st_size
        if size != layout.REGION_SIZE:
            raise RegionInvalid(f"{self._path}: has {size} bytes instead of {layout.REGION_SIZE}")
        content = self._read(0, layout.USE_AT)
        header = layout.PfRegionHeader.from_buffer_copy(content)
        expected = (layout.REGION_MAGIC, layout.VERSION, layout.REGION_SIZE, MUTEX_KIND)
        kind = int.from_bytes(bytes(header.mutex[MUTEX_KIND_AT : MUTEX_KIND_AT + 4]), "little")
        if (header.magic, header.version, header.size, kind) != expected:
            raise RegionInvalid(
                f"{self._path}: a process of the container overwrote the header of this file"
            )
        if bytes(header.allocation) != allocation:
            raise RegionInvalid(
                f'{self._path}: this file and the file "limits" have different allocation ids'
            )
        return header

    def _read(self, offset: int, size: int) -> bytes:
        try:
            content = os.pread(self._descriptor, size, offset)
        except OSError as error:
            raise RegionInvalid(f"{self._path}: {error.strerror}") from None
        if len(content) != size:
            raise RegionInvalid(f"{self._path}: a process of the container truncated this file")
        return content


def content_of(allocation: bytes) -> bytes:
    """The content of a new file, with an unlocked mutex."""
    header = layout.PfRegionHeader()
    header.magic, header.version = layout.REGION_MAGIC, layout.VERSION
    header.size = layout.REGION_SIZE
    header.allocation[:] = allocation
    header.mutex[MUTEX_KIND_AT] = MUTEX_KIND
    return bytes(header).ljust(layout.REGION_SIZE, b"\0")


def _most(name: str) -> int | None:
    """The largest possible value of a field; `None` stands for the present time."""
    if name.endswith("_at") or name == "last_launch":
        return None
    if name.endswith("_bytes"):
        return MOST_BYTES
    return MOST_NS if name.endswith("_ns") or name == "tat" else MOST_COUNT
