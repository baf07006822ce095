"""The agent's part of GPU limits: the groups, their sockets, and the watch, from start to close."""

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
from gpu.limit_settings import GpuLimitSettings
from gpu.limits.groups import Groups
from gpu.limits.process_registration import Registrar
from gpu.limits.refusals import Refusal, Refusals
from gpu.limits.region_tmpfs import TmpfsRooms
from gpu.limits.shims import Shims
from gpu.limits.tenants import Tenant, Tenants
from gpu.watch.compute_shares import TICK, ShareController
from gpu.watch.enforcement import Enforcement, OverUse
from gpu.watch.usage_watch import NodeSample, Watch
from host.errors import HostError
from host.sysfs.gpus import GPUs

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

LOOK = 1.0  # seconds between two looks
TRY_AGAIN = 5.0  # seconds after NVML could not be used
PATIENCE = 5.0  # seconds for the driver's first answer
NO_DRIVER = "no NVIDIA driver is loaded"

_log = logging.getLogger(__name__)


class GpuService(StepThread):
    """Limits and health of GPUs on this node.

    `groups` and `shims` can be used at once. `watch_health` looks for errors of GPUs. `prepare`
    also asks the driver for what there is. From `start` to `close` processes can register, and what
    they use is compared with their limits each second.

    Args:
        paths: the node's files; the groups are below `run`.
        listed: answers who holds which group now.
        settings: how limits are enforced.
        report: gets each over-use that counts, and what keeps processes from their GPU, for an
            event of the pod.
        limited: answers which GPUs are given in parts; all GPUs of the node if it is None.
            Processes on others are none of this part's business.
        rooms: makes the groups' regions; on file systems of their own if it is None.
        sick: gets the UUID and the fault of a GPU that becomes sick.
    """

    def __init__(
        self,
        paths: Paths,
        listed: Callable[[], Sequence[Tenant]],
        settings: GpuLimitSettings,
        report: Callable[[OverUse | Refusal], object] = lambda told: None,
        limited: Callable[[], Sequence[LimitedGPU]] | None = None,
        rooms: TmpfsRooms | None = None,
        sick: Callable[[str, str], object] = lambda uuid, fault: None,
    ) -> None:
        super().__init__("gpu-watch")
        self._health = GpuHealth(sick)
        root = paths.run / "gpu"
        self.groups = Groups(root, rooms=rooms)
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
        self._sample = NodeSample(problem="not looked at yet")
        self._problems = Problems(_log)
        self._asked = threading.Event()  # the driver, for the first time
        self._begun = threading.Event()
        self._looked = float("-inf")

    def watch_health(self) -> None:
        """Start to ask the driver."""
        super().start()

    def faults(self) -> Mapping[str, str]:
        """Why GPUs are sick, by UUID."""
        return self._health.faults

    def prepare(self) -> None:
        """Start to ask the driver, and wait for its first answer, but not for long."""
        self.watch_health()
        self._asked.wait(PATIENCE)

    def start(self) -> None:
        """Let processes register, and compare what they use. `listed` must be right by now."""
        if self._begun.is_set():
            return
        if self._thread is None:
            self.prepare()
        self._registrar.start()
        self._begun.set()

    def memory(self) -> Mapping[str, GpuMemory]:
        """The memory of each GPU that the driver has told of, by UUID. Raises HostError."""
        if not self._memory and self._problem:
            raise HostError(self._problem)
        return dict(self._memory)

    def close(self) -> None:
        """Stop. The groups and what their processes hold stay for the next agent."""
        self._registrar.close()
        super().close()  # without waiting long: the driver may hang

    @property
    def sample(self) -> NodeSample:
        """What the last look found."""
        return self._sample

    def families(self) -> "Sequence[Metric]":
        """What a scrape shows."""
        from gpu.watch import gpu_metrics

        return gpu_metrics.families(
            self._sample,
            self._enforcement.kills,
            time.monotonic(),
            time.time(),
            self._limited() if self._limited is not None else (),
        )

    def _owned(self) -> dict[str, int | None]:
        """The GPUs that are given in parts: minor numbers by UUID."""
        if self._limited is None:
            return self._present()
        return {of.uuid: of.minor for of in self._limited() if of.uuid}

    def _present(self) -> dict[str, int | None]:
        return {gpu.uuid: gpu.minor for gpu in self._gpus.read() if gpu.uuid}

    def _run(self) -> None:
        super()._run()
        self._let_go()

    def step(self) -> float:
        """Ask the driver, correct shares, and compare what is used with the limits."""
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
            else:  # what groups use meanwhile is not known
                self._shares({}, {})
            if due:
                self._look(driver)
        return TICK

    def _look(self, driver: Nvml | None) -> None:
        sample = self._watch.look(driver, self._problem)
        self._enforcement.decide(sample, driver)
        self._problems.tell("GPUs", sample.problem or None)
        self._sample = sample
        if driver is not None and not sample.gpus and sample.problem:
            self._let_go()  # another driver may be loaded by now

    def _driver(self) -> Nvml | None:
        """NVML, opened again at times while it cannot be used. None without GPUs."""
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
        """Ask for what does not change while the driver is loaded, of GPUs that are new."""
        present = self._present().keys()
        self._health.look(driver, present)
        for uuid in present - self._memory.keys():
            with suppress(NvmlError):  # the next look tells why
                self._memory[uuid] = driver.memory(uuid)

    def _let_go(self) -> None:
        if self._nvml is not None:
            with suppress(NvmlError):
                self._nvml.close()
            self._nvml, self._problem = None, "the driver does not answer"
