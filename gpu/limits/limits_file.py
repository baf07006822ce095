"""The file `limits` of a group. The agent writes the file, and the group's processes read it.

A writer makes the sequence number odd, changes the content, and makes the number even again. After
a writer was killed, the next writer makes the number even. Each pwrite(2) holds the inode's lock,
which orders the writes on every architecture.
"""

import os
import re
import struct
import uuid as uuids
from collections.abc import Mapping
from ctypes import sizeof
from pathlib import Path

import msgspec

from base import files
from gpu.gpu_pool import CONTEXT_RESERVE
from gpu.limits import layout

SHARES = 10_000  # the number in the file for a share of 1
KAPPA = 1 << 16  # the number in the file for a kappa of 1
BURST = 20_000_000  # ns
MOST_DEBT = 60_000_000_000  # ns

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_SEQUENCE_AT = layout.PfLimitsHeader.sequence.offset
_GPU, _PROCESS = sizeof(layout.PfGpuLimit), sizeof(layout.PfProcess)


class LimitsInvalid(Exception):
    """The file does not exist, or another version wrote it."""


class LimitsLeased(LimitsInvalid):
    """A tenant's lease delays the opening of the file."""


class GroupError(Exception):
    """Limits cannot be set."""


class Limit(msgspec.Struct, frozen=True):
    """The limit of a group on its GPU, and the parameters of its compute share."""

    uuid: str  # "GPU-…"
    memory_bytes: int  # of all processes of the group together
    compute_share: float  # of the GPU's time, in (0, 1]
    context_bytes: int = CONTEXT_RESERVE  # charged for a context until it is measured
    kappa: float = 1.0  # factor of estimated costs
    burst_ns: int = BURST
    most_debt_ns: int = MOST_DEBT
    settled_ns: int = 0  # GPU time to pay in addition to launches; negative: a refund


class Registered(msgspec.Struct, frozen=True, kw_only=True):
    """The agent's entry for the process in a slot."""

    registration: int
    host_pid: int
    start_time: int  # clock ticks since the boot
    alive: bool
    overhead_bytes: int | None = None  # `None`: not measured


class LimitsFile:
    """An open file `limits`. Raises LimitsInvalid, and methods also raise OSError.

    The caller ensures that there is one writer at a time. While the file is open for writing, no
    tenant can take a lease of the file (fcntl(2), F_SETLEASE). With `waits`, the constructor waits
    for the end of a lease: at most /proc/sys/fs/lease-break-time, by default 45 seconds.
    """

    def __init__(self, path: Path | str, *, waits: bool = False) -> None:
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (0 if waits else os.O_NONBLOCK)
        try:
            self._descriptor = os.open(path, flags)
        except BlockingIOError:
            raise LimitsLeased(
                f"{path}: a process of the container holds a lease (F_SETLEASE) of this file: "
                "try again, because the lease ends soon"
            ) from None
        except OSError as error:
            raise LimitsInvalid(f"{path}: {error.strerror}") from None
        try:
            status = os.fstat(self._descriptor)
            self._place = status.st_dev, status.st_ino
            if status.st_size != layout.LIMITS_SIZE:
                text = f"has {status.st_size} bytes, but this version writes {layout.LIMITS_SIZE}"
                raise LimitsInvalid(f"{path}: {text}: delete the pod")
            header = self.header()
            expected = (layout.LIMITS_MAGIC, layout.VERSION, layout.LIMITS_SIZE)
            if (header.magic, header.version, header.size) != expected:
                raise LimitsInvalid(
                    f"{path}: another version of podfabric wrote this file: delete the pod"
                )
        except BaseException:
            os.close(self._descriptor)
            raise

    def __enter__(self) -> "LimitsFile":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._descriptor)

    def is_at(self, path: str) -> bool:
        """Whether the path still leads to this file, and the file has its full size."""
        try:
            status = os.stat(path)  # noqa: PTH116 - a Path costs more
        except OSError:
            return False
        whole = status.st_size == layout.LIMITS_SIZE
        return whole and (status.st_dev, status.st_ino) == self._place

    def header(self) -> layout.PfLimitsHeader:
        """The file's content is stable while the sequence number is even and unchanged."""
        return layout.PfLimitsHeader.from_buffer_copy(self._read(0, layout.GPU_AT))

    def limit(self) -> Limit:
        gpu = layout.PfGpuLimit.from_buffer_copy(self._read(layout.GPU_AT, _GPU))
        return Limit(
            f"GPU-{uuids.UUID(bytes=bytes(gpu.uuid))}",
            gpu.memory_bytes,
            gpu.share / SHARES,
            context_bytes=gpu.context_bytes,
            kappa=gpu.kappa / KAPPA,
            burst_ns=gpu.burst_ns,
            most_debt_ns=gpu.most_debt_ns,
            settled_ns=gpu.settled_ns,
        )

    def processes(self) -> dict[int, Registered]:
        """The entries by slot. Leaves out slots that never had a process."""
        content = self._read(layout.PROCESS_AT, layout.SLOTS * _PROCESS)
        registrations = memoryview(content).cast("Q")[:: _PROCESS // 8]  # each entry's first field
        return {
            slot: self._registered(content, slot * _PROCESS)
            for slot, registration in enumerate(registrations.tolist())
            if registration
        }

    def process(self, slot: int) -> Registered | None:
        """The entry of one slot; `None` if the slot never had a process."""
        content = self._read(layout.PROCESS_AT + slot * _PROCESS, _PROCESS)
        registered = self._registered(content, 0)
        return registered if registered.registration else None

    def write(
        self, limit: Limit | None = None, processes: Mapping[int, Registered] | None = None
    ) -> None:
        """Write the limit and the entries of slots in one change, unless nothing changes."""
        changes = [(layout.GPU_AT, _gpu(limit))] if limit is not None else []
        for slot, process in (processes or {}).items():
            changes.append((layout.PROCESS_AT + slot * _PROCESS, _process(process)))
        (sequence,) = struct.unpack("<Q", self._read(_SEQUENCE_AT, 8))
        is_whole = sequence % 2 == 0
        if is_whole and all(self._read(at, len(content)) == content for at, content in changes):
            return  # a write would make all processes read the file again
        odd = sequence | 1  # already odd if a writer was killed
        files.write_at(self._descriptor, struct.pack("<Q", odd), _SEQUENCE_AT)
        for offset, content in changes:
            files.write_at(self._descriptor, content, offset)
        # An error skips this write: readers then keep their copy of the last complete content.
        even = (odd + 1) % 2**64 or 2
        files.write_at(self._descriptor, struct.pack("<Q", even), _SEQUENCE_AT)

    def _registered(self, content: bytes, offset: int) -> Registered:
        registration, start_time, host_pid, state, overhead = _ENTRY.unpack_from(content, offset)
        return Registered(
            registration=registration,
            host_pid=host_pid,
            start_time=start_time,
            alive=state == layout.PROCESS_ALIVE,
            overhead_bytes=None if overhead == layout.NOT_MEASURED else overhead,
        )

    def _read(self, offset: int, size: int) -> bytes:
        content = os.pread(self._descriptor, size, offset)
        if len(content) != size:
            raise LimitsInvalid('the file "limits" of the group was truncated while it was open')
        return content


_ENTRY = struct.Struct("<QQIIQ")  # struct pf_process; faster than ctypes


def content_of(limit: Limit, allocation: bytes) -> bytes:
    """The content of a new file. The file `region` has the same 16 bytes `allocation`."""
    header = layout.PfLimitsHeader()
    header.magic, header.version = layout.LIMITS_MAGIC, layout.VERSION
    header.size, header.sequence = layout.LIMITS_SIZE, 2
    header.allocation[:] = allocation
    return (bytes(header) + _gpu(limit)).ljust(layout.LIMITS_SIZE, b"\0")


def _gpu(limit: Limit) -> bytes:
    entry = layout.PfGpuLimit()
    entry.uuid[:] = bytes_of(limit.uuid)
    entry.memory_bytes, entry.context_bytes = limit.memory_bytes, limit.context_bytes
    entry.burst_ns, entry.most_debt_ns = limit.burst_ns, limit.most_debt_ns
    entry.share = min(SHARES, max(1, round(limit.compute_share * SHARES)))
    entry.settled_ns = min(2**63 - 1, max(-(2**63), limit.settled_ns))
    entry.kappa = min(2**32 - 1, max(1, round(limit.kappa * KAPPA)))
    return bytes(entry)


def _process(process: Registered) -> bytes:
    state = layout.PROCESS_ALIVE if process.alive else layout.PROCESS_DEAD
    overhead = layout.NOT_MEASURED
    if process.overhead_bytes is not None:
        overhead = min(process.overhead_bytes, layout.NOT_MEASURED - 1)
    numbers = process.registration, process.start_time, process.host_pid
    return _ENTRY.pack(*numbers, state, overhead)


def bytes_of(uuid: str) -> bytes:
    """The 16 bytes of a UUID "GPU-…", as cuDeviceGetUuid returns them. Raises GroupError."""
    kind, _, number = uuid.partition("-")
    try:
        if kind != "GPU":
            raise ValueError
        return uuids.UUID(number).bytes
    except ValueError:
        raise GroupError(f"{uuid!r}: expected the UUID of a GPU, such as GPU-…") from None


def check_name(group: str) -> None:
    """Raise GroupError if a group cannot have this name."""
    if not _NAME.fullmatch(group):
        raise GroupError(
            f"group {group!r}: the name is invalid: use a letter or digit, then up to 199 letters, "
            "digits, dots, dashes or underscores"
        )


def check_limit(group: str, limit: Limit) -> None:
    """Raise GroupError if a group cannot have this limit."""
    check_name(group)
    bytes_of(limit.uuid)
    if limit.memory_bytes <= CONTEXT_RESERVE:
        raise GroupError(
            f"group {group}: {limit.uuid}: {limit.memory_bytes} bytes of memory are too few for a "
            f"CUDA context: set more than {CONTEXT_RESERVE} bytes"
        )
    if not 0 < limit.compute_share <= 1:
        raise GroupError(
            f"group {group}: {limit.uuid}: the compute share {limit.compute_share:g} must be "
            "above 0 and at most 1"
        )
