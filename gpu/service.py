"""The agent's part of GPU limits: the groups, their sockets, and the watch, from start to close."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from base.paths import Paths
from gpu import nvml, processes
from gpu.enforcement import Action, Enforcement, OverUse
from gpu.groups import CONTEXT_RESERVE, Groups
from gpu.nvml import Nvml, NvmlError
from gpu.registration import Registrar
from gpu.samples import NodeSample
from gpu.share_controller import ShareController
from gpu.shares import TICK
from gpu.tenants import Tenant, Tenants
from gpu.watch import Watch
from host.gpus import GPUs

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

LOOK = 1.0  # seconds between two looks
TRY_AGAIN = 5.0  # seconds after NVML could not be used
NO_DRIVER = "no NVIDIA driver is loaded"

_log = logging.getLogger(__name__)


class GpuLimitSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How limits of GPUs are enforced on this node."""

    driver_root: Path = Path("/")
    on_overuse: Action = "report"
    kill_unaccounted: bool = False
    context_reserve: int = CONTEXT_RESERVE  # bytes
    alnair_metrics: bool = False  # Alnair's names of metrics, beside ours


class GpuService:
    """Limits of GPUs on this node.

    `groups` can be used at once. From `start` to `close` their processes can register, and what
    they use is compared with their limits each second.

    Args:
        paths: the node's files; the groups are below `run`.
        listed: answers who holds which group now.
        settings: how limits are enforced.
        report: gets each over-use that counts, for an event of the pod.
        elastic: whether a group, by name, may also use the GPU time that others leave.
    """

    def __init__(
        self,
        paths: Paths,
        listed: Callable[[], Sequence[Tenant]],
        settings: GpuLimitSettings,
        report: Callable[[OverUse], object] = lambda overuse: None,
        elastic: Callable[[str], bool] = lambda group: False,
    ) -> None:
        root = paths.run / "gpu"
        self.groups = Groups(root, context_reserve=settings.context_reserve)
        self._gpus = GPUs(paths)
        self._settings = settings
        self._shares = ShareController(self.groups, elastic)
        tenants = Tenants(listed, root)
        self._registrar = Registrar(self.groups, tenants)
        self._watch = Watch(self.groups, tenants, self._registrar.living, self._owned)
        self._enforcement = Enforcement(
            self.groups,
            self._watch.attribution.group_of,
            report,
            action=settings.on_overuse,
            kill_unaccounted=settings.kill_unaccounted,
        )
        self._nvml: Nvml | None = None
        self._problem = NO_DRIVER
        self._tried = float("-inf")
        self._failure = ""
        self._sample = NodeSample(problem="not looked at yet")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-watch", daemon=True)

    def start(self) -> None:
        """Start the threads and return."""
        if not processes.sees_the_host():
            _log.error(
                "GPUs: this agent does not see the host's processes, and registers none: run it in "
                "the host's pid namespace (hostPID)"
            )
        self._registrar.start()
        self._thread.start()

    def close(self) -> None:
        """Stop. The groups and what their processes hold stay for the next agent."""
        self._ended.set()
        self._registrar.close()
        if self._thread.ident is not None:
            self._thread.join(2 * LOOK)  # not for long: the driver may hang

    @property
    def sample(self) -> NodeSample:
        """What the last look found."""
        return self._sample

    def families(self) -> "Sequence[Metric]":
        """What a scrape shows."""
        from gpu import alnair_metrics, metrics

        sample = self._sample
        shown = metrics.families(sample, self._enforcement.kills, time.monotonic(), time.time())
        return (
            (*shown, *alnair_metrics.families(sample)) if self._settings.alnair_metrics else shown
        )

    def _owned(self) -> dict[str, int | None]:
        return {gpu.uuid: gpu.minor for gpu in self._gpus.read() if gpu.uuid}

    def _run(self) -> None:
        looked = float("-inf")
        while not self._ended.wait(TICK):
            try:
                driver = self._driver()
                if driver is not None:
                    self._shares(self._watch.tick(driver), self._watch.measured)
                if time.monotonic() - looked >= LOOK - TICK / 2:
                    looked = time.monotonic()
                    self._look(driver)
            except Exception as error:  # noqa: BLE001 - the agent must go on serving processes
                text = f"{type(error).__name__}: {error}"
                if text != self._failure:
                    _log.exception("GPUs: cannot compare their use with limits (tried again)")
                self._failure = text
        self._let_go()

    def _look(self, driver: Nvml | None) -> None:
        sample = self._watch.look(driver, self._problem)
        self._enforcement.decide(sample, driver)
        if sample.problem and sample.problem != self._sample.problem:
            _log.warning("GPUs: %s", sample.problem)
        self._sample = sample
        if driver is not None and not sample.gpus and sample.problem:
            self._let_go()  # another driver may be loaded by now

    def _driver(self) -> Nvml | None:
        """NVML, opened again at times while it cannot be used. None without GPUs."""
        if self._nvml is None and time.monotonic() - self._tried >= TRY_AGAIN:
            if not self._owned():
                self._problem = NO_DRIVER
                return None
            self._tried = time.monotonic()
            try:
                self._nvml = nvml.open_driver(self._settings.driver_root)
                self._problem = ""
                self._watch.new_driver()
            except NvmlError as error:
                self._problem = str(error)
        return self._nvml

    def _let_go(self) -> None:
        if self._nvml is not None:
            with suppress(NvmlError):
                self._nvml.close()
            self._nvml, self._problem = None, "the driver does not answer"
