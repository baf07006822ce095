"""A node with a stand-in for the driver, on which the agent serves GPU limits, and its scrapes."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from base.pod import Pod
from gpu.driver.gpu_inventory import LimitedGPU
from gpu.gpu_pool import Action, GpuLimitSettings
from gpu.limit_service import GpuService
from gpu.limits.limits_file import Limit
from gpu.limits.process_registration import Refusal
from gpu.limits.tenants import Tenant
from gpu.watch.enforcement import OverUse
from tests.host.gpu.driver_root import installed, paths_with
from tests.host.gpu.pods import MadeContainer, made_container
from tests.standin.driver import Driver, Out
from tests.standin.gpus import GIB, MIB, Behaviour, Node, gpus
from tests.unit.gpu.groups import PlainRegions

TWO = gpus(2, bytes=16 * GIB, reserved_bytes=600 * MIB, context_bytes=300 * MIB)
FIRST, SECOND = (gpu.uuid for gpu in TWO)


class ServedNode:
    """A node with a driver, on which the service runs."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.directory = directory
        self.stack = stack
        self.driver: Node | None = None
        self.tenants: list[Tenant] = []
        self.report: Callable[[OverUse | Refusal], object] = self._keep
        self.reported: list[OverUse] = []
        self.sick: list[str] = []
        self.service: GpuService | None = None

    def _keep(self, told: OverUse | Refusal) -> None:
        assert isinstance(told, OverUse)
        self.reported.append(told)

    def install_driver(self) -> None:
        self.driver = self.stack.enter_context(
            installed(self.directory / "driver", TWO, Behaviour())
        )

    def start(
        self,
        on_overuse: Action = "report",
        limited: Sequence[LimitedGPU] | None = None,
    ) -> GpuService:
        service = self.make(on_overuse, limited)
        service.start()
        return service

    def make(
        self,
        on_overuse: Action = "report",
        limited: Sequence[LimitedGPU] | None = None,
    ) -> GpuService:
        paths = paths_with(self.directory, TWO)
        made = GpuLimitSettings(
            driver_root=self.directory / "driver",
            on_overuse=on_overuse,
        )
        self.service = GpuService(
            paths,
            lambda: self.tenants,
            made,
            lambda told: self.report(told),
            limited=None if limited is None else lambda: limited,
            regions=PlainRegions(),
            sick=lambda uuid, fault: self.sick.append(uuid),
        )
        self.stack.callback(self.service.close)
        return self.service

    def container(self, group: str, limit: Limit) -> MadeContainer:
        container = self.stack.enter_context(made_container())
        pod = Pod("default", f"pod-of-{group}", container.container.pod_uid)
        self.tenants.append(Tenant(group=group, pod=pod, container="main"))
        assert self.service is not None
        self.service.groups.make(group, limit)
        return container

    def process(self, container: MadeContainer, size: int, device: int = 0) -> Driver:
        """A process of a container that allocates without a shim."""
        assert self.driver is not None
        process = self.stack.enter_context(Driver(self.driver.environment))
        container.take(process.pid)
        process.start(device)
        self.allocate(process, size)
        return process

    def allocate(self, process: Driver, size: int) -> None:
        process.do("cuMemAlloc_v2", Out(8), size)

    def values(self) -> dict[tuple[str, str], float]:
        return values(self.scrape())

    def scrape(self) -> str:
        assert self.service is not None
        return text_of(self.service.families)


def text_of(families: Callable[[], Sequence[Metric]]) -> str:
    class Collector:
        def collect(self) -> Sequence[Metric]:
            return families()

    registry = CollectorRegistry()
    registry.register(Collector())
    return generate_latest(registry).decode()


def values(text: str) -> dict[tuple[str, str], float]:
    """Values by name and holder: "pod/gpu" for a container, "gpu" for a GPU, "" otherwise."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            parts = (sample.labels.get("pod"), sample.labels.get("gpu"))
            name = sample.name.removeprefix("podfabric_gpu_")
            found[name, "/".join(part for part in parts if part is not None)] = sample.value
    return found
