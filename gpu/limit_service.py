"""The agent's thread for GPU limits and the health of GPUs."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from base.loop import StepThread
from base.paths import Paths
from base.problems import Problems
from gpu.driver import nvml
from gpu.driver.gpu_health import GpuHealth
from gpu.driver.gpu_inventory import GpuMemory, LimitedGPU
from gpu.driver.nvml import Nvml, NvmlError
from gpu.gpu_pool import GpuLimitSettings
from gpu.limits.groups import Groups
from gpu.limits.process_registration import Refusal, Refusals, Registrar
from gpu.limits.region_tmpfs import RegionTmpfs
from gpu.limits.shims import Shims
from gpu.limits.tenants import Tenant, Tenants
from gpu.watch.compute_shares import TICK, ShareController
from gpu.watch.enforcement import Enforcement, OverUse
from gpu.watch.usage_watch import NodeSample, Watch
from host.errors import HostError
from host.sysfs.gpus import GPUs

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

LOOK = 1.0  # seconds between two comparisons of use with limits
TRY_AGAIN = 5.0  # seconds before NVML is opened again after an error
PATIENCE = 5.0  # seconds that `prepare` waits for the driver
NO_DRIVER = "no NVIDIA driver is loaded"

_log = logging.getLogger(__name__)


class GpuService(StepThread):
    """Limits and health of the node's GPUs. `groups` and `shims` can be used before `start`.

    Args:
        listed: returns the current tenants.
        report: is called for each over-use and each refused process.
        limited: returns the GPUs that pools offer as shares. `None`: all GPUs of the node.
        sick: is called with the UUID and the fault of a GPU that becomes unhealthy.
    """

    def __init__(
        self,
        paths: Paths,
        listed: Callable[[], Sequence[Tenant]],
        settings: GpuLimitSettings,
        report: Callable[[OverUse | Refusal], object] = lambda event: None,
        limited: Callable[[], Sequence[LimitedGPU]] | None = None,
        regions: RegionTmpfs | None = None,
        sick: Callable[[str, str], object] = lambda uuid, fault: None,
    ) -> None:
        super().__init__("gpu-watch")
        self._health = GpuHealth(sick)
        root = paths.run / "gpu"
        self.groups = Groups(root, regions=regions)
        self._gpus = GPUs(paths)
        self._driver_root = paths.host / settings.driver_root.relative_to("/")
        self._limited = limited
        self.shims = Shims(paths, settings, self.groups.obstacle)
        self._memory: dict[str, GpuMemory] = {}  # by UUID
        self._shares = ShareController(self.groups)
        tenants = Tenants(listed, root)
        self._registrar = Registrar(self.groups, tenants, Refusals(report))
        self._watch = Watch(self.groups, tenants, self._registrar.living, self._owned)
        self._enforcement = Enforcement(
            self._watch.attribution.group_of, report, action=settings.on_overuse
        )
        self._nvml: Nvml | None = None
        self._problem = NO_DRIVER
        self._tried = float("-inf")
        self.sample = NodeSample(problem="the agent has not queried the GPUs yet")
        self._problems = Problems(_log)
        self._asked = threading.Event()  # set after the first query of the driver
        self._begun = threading.Event()  # set by `start`
        self._looked = float("-inf")

    def watch_health(self) -> None:
        super().start()

    def faults(self) -> Mapping[str, str]:
        return self._health.faults

    def prepare(self) -> None:
        """Query the driver, and wait up to `PATIENCE` seconds for the first answer."""
        self.watch_health()
        self._asked.wait(PATIENCE)

    def start(self) -> None:
        """Enforce limits. From now on, `listed` must return all tenants."""
        if self._begun.is_set():
            return
        if self._thread is None:
            self.prepare()
        self._registrar.start()
        self._begun.set()

    def memory(self) -> Mapping[str, GpuMemory]:
        """The memory of GPUs, by UUID.

        Raises HostError if no memory size is known yet and the driver cannot be used now.
        """
        if not self._memory and self._problem:
            raise HostError(self._problem)
        return dict(self._memory)

    def close(self) -> None:
        """The files of the groups stay for the next agent."""
        self._registrar.close()
        super().close()  # waits only a short time, because the driver may hang

    def families(self) -> "Sequence[Metric]":
        from gpu.watch import gpu_metrics

        return gpu_metrics.families(
            self.sample,
            self._enforcement.kills,
            time.monotonic(),
            time.time(),
            self._limited() if self._limited is not None else (),
        )

    def _owned(self) -> dict[str, int | None]:
        """The minor numbers of GPUs that pools offer as shares, by UUID."""
        if self._limited is None:
            return self._present()
        return {gpu.uuid: gpu.minor for gpu in self._limited() if gpu.uuid}

    def _present(self) -> dict[str, int | None]:
        return {gpu.uuid: gpu.minor for gpu in self._gpus.read() if gpu.uuid}

    def _run(self) -> None:
        super()._run()
        self._close_driver()

    def step(self) -> float:
        try:
            driver = self._driver()
            due = time.monotonic() - self._looked >= LOOK - TICK / 2
            if due:
                self._looked = time.monotonic()
            if driver is not None and due:
                self._learn(driver)
        finally:
            self._asked.set()
        if self._begun.is_set():
            if driver is not None:
                self._shares(self._watch.tick(driver), self._watch.measured)
            else:  # the use of the groups is unknown
                self._shares({}, {})
            if due:
                self._look(driver)
        return TICK

    def _look(self, driver: Nvml | None) -> None:
        self.sample = self._watch.look(driver, self._problem)
        sample = self.sample
        self._enforcement.decide(sample, driver)
        self._problems.tell("GPUs", sample.problem or None)
        if driver is not None and not sample.gpus and sample.problem:
            self._close_driver()  # by now another driver may be loaded

    def _driver(self) -> Nvml | None:
        """The open NVML; `None` if there is no GPU or NVML cannot be used."""
        if self._nvml is None and time.monotonic() - self._tried >= TRY_AGAIN:
            if not self._present():
                self._problem = NO_DRIVER
                return None
            self._tried = time.monotonic()
            try:
                self._nvml = nvml.open_driver(self._driver_root)
                self._problem = ""
                self._watch.new_driver()
                self._memory.clear()
            except NvmlError as error:
                self._problem = str(error)
        return self._nvml

    def _learn(self, driver: Nvml) -> None:
        present = self._present().keys()
        self._health.look(driver, present)
        for uuid in present - self._memory.keys():
            with suppress(NvmlError):  # the next `_look` reports the error
                self._memory[uuid] = driver.memory(uuid)

    def _close_driver(self) -> None:
        if self._nvml is not None:
            with suppress(NvmlError):
                self._nvml.close()
            self._nvml, self._problem = None, "the driver does not answer"
