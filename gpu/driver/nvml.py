"""Queries NVML, the driver's library, for the use and the errors of GPUs.

Only `open_driver` loads NVML and nvidia-ml-py, because nvidia-ml-py takes 17 MB of memory. A call
may block for a long time if a GPU has a fault.

Sources: nvml.h; docs of NVML, "Device Queries", "Device Commands".
"""

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from gpu.driver.driver_files import library
from gpu.driver.gpu_inventory import GpuMemory

LIBRARY = "libnvidia-ml.so.1"
NOT_SUPPORTED = 3
NOT_FOUND = 6
_SUCCESS, _INSUFFICIENT_SIZE, _FUNCTION_NOT_FOUND = 0, 7, 13
_MOST_ERRORS = 256  # per call of `errors`

_loading = threading.Lock()  # nvidia-ml-py can use one library per process


class NvmlError(Exception):
    """A call of NVML failed. `code` is an nvmlReturn_t; 0 if NVML is not loaded or was closed."""

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.code = code


class Utilization(msgspec.Struct, frozen=True):
    """The use of the GPU's SMs by one process in a sampling period of the driver (1/6 to 1 s)."""

    pid: int
    at_us: int  # the end of the period, by the driver's clock
    sm: float  # 0 to 1


def open_driver(driver_root: Path = Path("/")) -> "Nvml":
    """Open NVML of the driver below `driver_root`. Raises NvmlError if NVML is missing or fails."""
    # By the name without the version, the loader would find the old library after an update.
    path = library(driver_root, LIBRARY)
    if path is None:
        raise NvmlError(
            f"no {LIBRARY} below {driver_root}: install NVIDIA's driver, or set "
            "gpuLimits.driverRoot to the driver's directory"
        )
    return Nvml(path)


class Nvml:
    """NVML of one driver. A process can use only its newest `Nvml`. Methods raise NvmlError."""

    def __init__(self, library: Path) -> None:
        import pynvml

        self._nvml: Any = pynvml
        with _loading:
            try:
                pynvml.nvmlLib = ctypes.CDLL(str(library))
            except OSError as error:
                raise NvmlError(f"cannot load {library}: {error}") from None
            pynvml._nvmlGetFunctionPointer_cache.clear()  # has functions of the previous library
            self._call(pynvml.nvmlInitWithFlags, 0)
        self._handles: dict[str, object] = {}
        self._events: object = None  # the event set of `errors`
        self._closed = False

    def __enter__(self) -> "Nvml":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close NVML. Later calls in any thread raise NvmlError."""
        self._closed = True  # the handles are invalid in the next driver's library
        with _loading:
            self._call(self._nvml.nvmlShutdown)

    def driver_version(self) -> str:
        """The version, such as "580.65.06"."""
        return str(self._call(self._nvml.nvmlSystemGetDriverVersion))

    def uuids(self) -> list[str]:
        """The UUIDs of the GPUs in the order of their PCI addresses. Leaves out unreadable GPUs."""
        uuids = []
        for index in range(int(self._call(self._nvml.nvmlDeviceGetCount))):
            try:
                handle = self._call(self._nvml.nvmlDeviceGetHandleByIndex, index)
                uuid = str(self._call(self._nvml.nvmlDeviceGetUUID, handle))
            except NvmlError:  # the GPU has fallen off the bus
                continue
            self._handles[uuid] = handle
            uuids.append(uuid)
        return uuids

    def memory(self, uuid: str) -> GpuMemory:
        """The GPU's memory; `total` includes `reserved`."""
        memory = self._of(uuid, self._nvml.nvmlDeviceGetMemoryInfo, self._nvml.nvmlMemory_v2)
        return GpuMemory(total=memory.total, reserved=memory.reserved)

    def processes(self, uuid: str) -> dict[int, int]:
        """Bytes that each process uses on the GPU, by pid in this pid namespace; 0: unknown.

        A process may be in several lists of the driver. Each list has the total of the process.
        """
        used: dict[int, int] = {}
        for kind in ("Compute", "Graphics", "MPSCompute"):
            listed = getattr(self._nvml, f"nvmlDeviceGet{kind}RunningProcesses_v3")  # since 510
            for process in self._known(uuid, listed) or ():
                pid = int(process.pid)
                used[pid] = max(used.get(pid, 0), int(process.usedGpuMemory or 0))
        return used

    def utilization(self, uuid: str, since_us: int) -> list[Utilization]:
        """Samples that are newer than `since_us` of the driver's clock (0: all)."""
        for attempt in range(3):  # a sample may arrive after the size was queried
            try:
                samples = self._of(uuid, self._nvml.nvmlDeviceGetProcessUtilization, since_us)
            except NvmlError as error:
                if error.code in (_SUCCESS, NOT_FOUND):  # no samples
                    return []
                if error.code != _INSUFFICIENT_SIZE or attempt == 2:
                    raise
            else:
                return [
                    Utilization(sample.pid, sample.timeStamp, min(sample.smUtil, 100) / 100)
                    for sample in samples
                    if sample.pid and sample.timeStamp > since_us
                ]
        return []

    def watch_errors(self, uuid: str) -> None:
        """Include this GPU in `errors` from now on."""
        if self._events is None:
            self._events = self._call(self._nvml.nvmlEventSetCreate)
        types = self._nvml.nvmlEventTypeXidCriticalError | self._nvml.nvmlEventTypeDoubleBitEccError
        self._of(uuid, self._nvml.nvmlDeviceRegisterEvents, types, self._events)

    def errors(self) -> list[tuple[str, int | None]]:
        """New errors of the watched GPUs: UUID and Xid (`None` for an uncorrectable ECC error)."""
        found: list[tuple[str, int | None]] = []
        while self._events is not None and not self._closed and len(found) < _MOST_ERRORS:
            try:
                event = self._call(self._nvml.nvmlEventSetWait_v2, self._events, 0)
                uuid = str(self._call(self._nvml.nvmlDeviceGetUUID, event.device))
            except NvmlError:  # no more events, or a GPU that has fallen off the bus
                break
            is_xid = event.eventType == self._nvml.nvmlEventTypeXidCriticalError
            found.append((uuid, int(event.eventData) if is_xid else None))
        return found

    def uncorrected_errors(self, uuid: str) -> int:
        """Uncorrected memory errors since the last reset; 0 if the GPU does not count these."""
        uncorrected = self._nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        count = self._nvml.nvmlDeviceGetTotalEccErrors
        return int(self._known(uuid, count, uncorrected, self._nvml.NVML_VOLATILE_ECC) or 0)

    def recovery_action(self, uuid: str) -> int:
        """The recovery action that the driver requests; 0 if no request is known."""
        field = self._nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
        fields = self._known(uuid, self._nvml.nvmlDeviceGetFieldValues, [field])
        return int(fields[0].value.uiVal) if fields and fields[0].nvmlReturn == _SUCCESS else 0

    def _known(self, uuid: str, function: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401
        """The function's result; `None` if the driver or the GPU does not support the function."""
        try:
            return self._of(uuid, function, *arguments)
        except NvmlError as error:
            if error.code in (NOT_SUPPORTED, _FUNCTION_NOT_FOUND):
                return None
            raise

    def _of(self, uuid: str, function: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401
        if self._closed:
            raise NvmlError("NVML was closed")
        handle = self._handles.get(uuid)
        if handle is None:
            handle = self._handles[uuid] = self._call(self._nvml.nvmlDeviceGetHandleByUUID, uuid)
        return self._call(function, handle, *arguments)

    def _call(self, function: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401
        try:
            return function(*arguments)
        except self._nvml.NVMLError as error:
            name = function.__name__
            raise NvmlError(f"{name}: {error}", error.value) from None
