"""Finds GPUs that need a reset, with NVML. docs/use/gpus.md lists the faults.

The driver reports an Xid only once. So the fault of an Xid lasts until a sign of a reset: an error
counter went down, the driver no longer requests a reset, or the GPU or the driver was absent.

Sources: nvml.h; NVIDIA's "Xid Errors"; the Xids that NVIDIA's k8s-device-plugin skips.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from gpu.driver.nvml import Nvml, NvmlError

OF_APPLICATIONS = frozenset((13, 31, 43, 45, 68, 109))
"""Xids that a faulty program causes on a healthy GPU."""

REMEDY = "drain the node and reset the GPU (nvidia-smi --gpu-reset)"
_LOST, _RESET_REQUIRED = 15, 16  # nvmlReturn_t

_log = logging.getLogger(__name__)


class GpuHealth:
    """The faults of GPUs, by UUID. One thread calls `look`. Any thread may read `faults`.

    Calls `report` with the UUID and the fault when a GPU becomes unhealthy.
    """

    def __init__(self, report: Callable[[str, str], object] = lambda uuid, fault: None) -> None:
        self.faults: Mapping[str, str] = {}
        self._report = report
        self._driver: Nvml | None = None
        self._watched: set[str] = set()  # GPUs registered for events
        self._by_events: dict[str, str] = {}  # faults that events reported, by UUID
        self._counts: dict[str, tuple[int, int]] = {}  # errors and recovery action at the last look

    def look(self, driver: Nvml, present: Iterable[str]) -> None:
        """Update `faults` for the GPUs in `present`."""
        uuids = set(present)
        if driver is not self._driver:  # the first driver, or a new one
            self._driver, self._watched, self._by_events = driver, set(), {}
        self._watched &= uuids
        self._by_events = {uuid: xid for uuid, xid in self._by_events.items() if uuid in uuids}
        for uuid in uuids - self._watched:
            with suppress(NvmlError):  # not supported, or the next `look` tries again
                driver.watch_errors(uuid)
                self._watched.add(uuid)
        self._take_events(driver)
        found = {uuid: self._fault(driver, uuid) for uuid in uuids}
        self._take({uuid: fault for uuid, fault in found.items() if fault is not None})

    def _take_events(self, driver: Nvml) -> None:
        for uuid, xid in driver.errors():
            if xid is None:
                self._by_events[uuid] = "uncorrectable memory error"
            elif xid in OF_APPLICATIONS:
                _log.info("GPU %s: Xid %d: a program caused it; the GPU is healthy", uuid, xid)
            else:
                self._by_events[uuid] = f"critical error Xid {xid}"

    def _fault(self, driver: Nvml, uuid: str) -> str | None:
        try:
            errors, action = driver.uncorrected_errors(uuid), driver.recovery_action(uuid)
        except NvmlError as error:
            if error.code not in (_LOST, _RESET_REQUIRED):
                return self.faults.get(uuid)  # unknown now: the last known fault stays
            return f"the driver has lost the GPU ({error}): {REMEDY}"
        errors_before, action_before = self._counts.get(uuid, (0, 0))
        self._counts[uuid] = errors, action
        if errors < errors_before or (action_before and not action):
            self._by_events.pop(uuid, None)  # the GPU was reset
        fault = self._by_events.get(uuid)
        if errors:
            fault = f"{errors} uncorrectable memory errors"
        elif fault is None and action:
            fault = "the driver asks for a reset"
        return None if fault is None else f"{fault}: {REMEDY}"

    def _take(self, faults: Mapping[str, str]) -> None:
        before, self.faults = self.faults, faults
        for uuid, fault in faults.items():
            if uuid not in before:
                _log.warning("GPU %s is unhealthy: %s", uuid, fault)
                self._report(uuid, fault)
        for uuid in before.keys() - faults.keys():
            _log.info("GPU %s is healthy again", uuid)
