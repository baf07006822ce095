"""The files `limits` and `region` of a group, and the messages of its socket: gpu/shim/layout.h.

The header says what each field means and who writes it. A test compares every offset with it.
"""

from ctypes import LittleEndianStructure, c_int64, c_uint8, c_uint32, c_uint64, sizeof

VERSION = 1
SLOTS = 256
LIMITS_MAGIC = 0x7374696D694C6650
REGION_MAGIC = 0x6E6F696765526650
NO_LIMIT = NOT_MEASURED = 2**64 - 1
MUTEX_KIND, MUTEX_KIND_AT = 0x90, 16

PROCESS_NONE, PROCESS_ALIVE, PROCESS_DEAD = range(3)
SLOT_FREE, SLOT_USED = range(2)
STATUS_OK, STATUS_VERSION, STATUS_STRANGER, STATUS_SLOT, STATUS_BUSY = range(5)


class PfGpuLimit(LittleEndianStructure):
    """struct pf_gpu_limit."""

    _fields_ = [
        ("uuid", c_uint8 * 16),
        ("memory_bytes", c_uint64),
        ("context_bytes", c_uint64),
        ("burst_ns", c_uint64),
        ("most_debt_ns", c_uint64),
        ("share", c_uint32),
        ("kappa", c_uint32),
        ("settled_ns", c_int64),
    ]


class PfProcess(LittleEndianStructure):
    """struct pf_process."""

    _fields_ = [
        ("registration", c_uint64),
        ("start_time", c_uint64),
        ("host_pid", c_uint32),
        ("state", c_uint32),
        ("overhead_bytes", c_uint64),
    ]


class PfLimitsHeader(LittleEndianStructure):
    """struct pf_limits before `gpu`."""

    _fields_ = [
        ("magic", c_uint64),
        ("version", c_uint32),
        ("size", c_uint32),
        ("sequence", c_uint64),
        ("allocation", c_uint8 * 16),
    ]


class PfLimits(LittleEndianStructure):
    """struct pf_limits."""

    _fields_ = [
        ("header", PfLimitsHeader),
        ("gpu", PfGpuLimit),
        ("process", PfProcess * SLOTS),
    ]


class PfGpu(LittleEndianStructure):
    """struct pf_gpu."""

    _fields_ = [
        ("used_bytes", c_uint64),
        ("peak_bytes", c_uint64),
        ("denied", c_uint64),
        ("external_imports", c_uint64),
        ("reserved", c_uint64 * 5),
        ("tat", c_uint64),
        ("backlogged_at", c_uint64),
        ("longest_ns", c_uint64),
        ("longest_at", c_uint64),
        ("settled_ns", c_int64),
        ("launched_ns", c_uint64),
        ("paid_ns", c_uint64),
        ("launches", c_uint64),
        ("throttled", c_uint64),
        ("wait_ns", c_uint64),
        ("last_launch", c_uint64),
        ("finished_ns", c_uint64),
        ("paid_finished_ns", c_uint64),
        ("reserved_counters", c_uint64 * 2),
    ]


class PfSlot(LittleEndianStructure):
    """struct pf_slot."""

    _fields_ = [
        ("state", c_uint32),
        ("pid", c_uint32),
        ("pid_namespace", c_uint64),
        ("start_time", c_uint64),
        ("image", c_uint64),
        ("registration", c_uint64),
        ("instance", c_uint64),
        ("data_bytes", c_uint64),
        ("context_bytes", c_uint64),
    ]


class PfRegionHeader(LittleEndianStructure):
    """struct pf_region before `gpu`."""

    _fields_ = [
        ("magic", c_uint64),
        ("version", c_uint32),
        ("size", c_uint32),
        ("allocation", c_uint8 * 16),
        ("reserved", c_uint8 * 32),
        ("mutex", c_uint8 * 64),
        ("applied", c_uint64),
        ("lock_recoveries", c_uint64),
        ("stale_slots", c_uint64),
        ("refused_slots", c_uint64),
        ("reserved_counters", c_uint64 * 4),
    ]


class PfRegion(LittleEndianStructure):
    """struct pf_region."""

    _fields_ = [
        ("header", PfRegionHeader),
        ("gpu", PfGpu),
        ("slot", PfSlot * SLOTS),
    ]


class PfRequest(LittleEndianStructure):
    """struct pf_request."""

    _fields_ = [("version", c_uint32), ("slot", c_uint32)]


class PfAnswer(LittleEndianStructure):
    """struct pf_answer."""

    _fields_ = [("status", c_uint32), ("host_pid", c_uint32), ("registration", c_uint64)]


LIMITS_SIZE, REGION_SIZE = sizeof(PfLimits), sizeof(PfRegion)
GPU_AT, PROCESS_AT = PfLimits.gpu.offset, PfLimits.process.offset
USE_AT, SLOT_AT = PfRegion.gpu.offset, PfRegion.slot.offset
