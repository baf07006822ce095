"""Binary layouts: the files `limits` and `region`, and the messages of a group's socket.

Each class PfX is struct pf_x of gpu/shim/layout.h, which explains the fields.
"""

from ctypes import LittleEndianStructure, c_int64, c_uint8, c_uint32, c_uint64, sizeof

VERSION = 1
SLOTS = 256
LIMITS_MAGIC = 0x7374696D694C6650
REGION_MAGIC = 0x6E6F696765526650
NOT_MEASURED = 2**64 - 1
MUTEX_KIND, MUTEX_KIND_AT = 0x90, 16

PROCESS_NONE, PROCESS_ALIVE, PROCESS_DEAD = range(3)
SLOT_FREE, SLOT_USED = range(2)
STATUS_OK, STATUS_VERSION, STATUS_STRANGER, STATUS_SLOT, STATUS_BUSY = range(5)


def _u32(*names: str) -> list[tuple[str, type[c_uint32]]]:
    return [(name, c_uint32) for name in names]


def _u64(*names: str) -> list[tuple[str, type[c_uint64]]]:
    return [(name, c_uint64) for name in names]


class PfGpuLimit(LittleEndianStructure):
    _fields_ = [
        ("uuid", c_uint8 * 16),
        *_u64("memory_bytes", "context_bytes", "burst_ns", "most_debt_ns"),
        *_u32("share", "kappa"),
        ("settled_ns", c_int64),
    ]


class PfProcess(LittleEndianStructure):
    _fields_ = [
        *_u64("registration", "start_time"),
        *_u32("host_pid", "state"),
        ("overhead_bytes", c_uint64),
    ]


class PfLimitsHeader(LittleEndianStructure):
    """The fields of struct pf_limits before `gpu`."""

    _fields_ = [
        ("magic", c_uint64),
        *_u32("version", "size"),
        ("sequence", c_uint64),
        ("allocation", c_uint8 * 16),
    ]


class PfLimits(LittleEndianStructure):
    _fields_ = [
        ("header", PfLimitsHeader),
        ("gpu", PfGpuLimit),
        ("process", PfProcess * SLOTS),
    ]


class PfGpu(LittleEndianStructure):
    _fields_ = [
        *_u64("used_bytes", "peak_bytes", "denied"),
        ("reserved", c_uint64 * 6),
        *_u64("tat", "backlogged_at", "longest_ns", "longest_at"),
        ("settled_ns", c_int64),
        *_u64("launched_ns", "paid_ns", "launches", "throttled", "wait_ns", "last_launch"),
        *_u64("finished_ns", "paid_finished_ns"),
        ("reserved_counters", c_uint64 * 2),
    ]


class PfSlot(LittleEndianStructure):
    _fields_ = [
        *_u32("state", "pid"),
        *_u64("pid_namespace", "start_time", "image", "registration", "instance"),
        *_u64("data_bytes", "context_bytes"),
    ]


class PfRegionHeader(LittleEndianStructure):
    """The fields of struct pf_region before `gpu`."""

    _fields_ = [
        ("magic", c_uint64),
        *_u32("version", "size"),
        ("allocation", c_uint8 * 16),
        ("reserved", c_uint8 * 32),
        ("mutex", c_uint8 * 64),
        *_u64("applied", "lock_recoveries", "stale_slots", "refused_slots"),
        ("reserved_counters", c_uint64 * 4),
    ]


class PfRegion(LittleEndianStructure):
    _fields_ = [
        ("header", PfRegionHeader),
        ("gpu", PfGpu),
        ("slot", PfSlot * SLOTS),
    ]


class PfRequest(LittleEndianStructure):
    _fields_ = [("version", c_uint32), ("slot", c_uint32)]


class PfAnswer(LittleEndianStructure):
    _fields_ = [("status", c_uint32), ("host_pid", c_uint32), ("registration", c_uint64)]


LIMITS_SIZE, REGION_SIZE = sizeof(PfLimits), sizeof(PfRegion)
GPU_AT, PROCESS_AT = PfLimits.gpu.offset, PfLimits.process.offset
USE_AT, SLOT_AT = PfRegion.gpu.offset, PfRegion.slot.offset
