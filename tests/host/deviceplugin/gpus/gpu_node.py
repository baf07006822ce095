"""A node with GPUs and their device plugin, for tests with the stand-in for the kubelet."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from base.paths import Paths
from deviceplugin import checkpoint
from deviceplugin.checkpoint import AllocatedGPU, Allocation
from deviceplugin.plugin import DevicePlugin
from deviceplugin.pools.pool_config import DevicePluginConfig, PoolConfig
from gpu.gpu_pool import GpuPoolConfig
from gpu.pools.limit_backend import GpuParts
from tests.kubelet.kubelet import Kubelet, Pod
from tests.unit.gpu.driver import Driver
from tests.unit.gpu.groups import FileGroups

GIB = 1 << 30
NONE: Mapping[str, int] = {}
MEMORY, COMPUTE = "alnair/vgpu-memory", "alnair/vgpu-compute"


def made_paths(kubelet: Path) -> Paths:
    """Roots next to the kubelet's, with the files that each node has."""
    base = kubelet.parent
    names = ("sys", "proc", "dev", "run", "state", "etc", "cdi", "devinfo")
    paths = Paths(kubelet=kubelet, **{name: base / name for name in names})
    boot_id = paths.proc / "sys/kernel/random/boot_id"
    boot_id.parent.mkdir(parents=True)
    boot_id.write_text("9b6b5c1e-0d5a-4a3f-8f0e-6d5b1b1c9d11\n")
    for directory in (paths.sys, paths.dev, paths.etc):
        directory.mkdir()
    return paths


def swap_nodes(paths: Paths) -> None:
    """Exchange the device nodes of the first two GPUs, as a reboot may."""
    for number, other in ((0, 1), (1, 0)):
        file = paths.proc / f"driver/nvidia/gpus/0000:1{number}:00.0/information"
        file.write_text(file.read_text().replace(f"Minor: \t {number}", f"Minor: \t {other}"))


def units(gib: int, **changed: object) -> GpuPoolConfig:
    """A pool of mode units with GPUs of `gib` units of memory each."""
    fields = {"mode": "units", "memory": gib * GIB, "reserve": 0}
    return GpuPoolConfig(**{**fields, **changed})  # type: ignore[arg-type]


class GpuNode:
    """A node whose device plugin can be restarted."""

    def __init__(
        self,
        paths: Paths,
        gpus: Sequence[GpuPoolConfig],
        pools: Sequence[PoolConfig] = (),
        **settings: object,
    ) -> None:
        self.paths = paths
        self.driver = Driver(paths)
        self.config = DevicePluginConfig(pools=tuple(pools), gpus=tuple(gpus), **settings)  # type: ignore[arg-type]
        self.groups = FileGroups(paths.run / "gpu")
        self.start()

    def start(self) -> None:
        """Start the plugin, after the present one was closed."""
        parts = GpuParts(groups=self.groups, obstacle=lambda: None)
        self.plugin = DevicePlugin(self.paths, self.config, gpu_parts=parts)
        self.plugin.start()

    def restart(self) -> None:
        self.plugin.close()
        self.start()


def await_restarted(kubelet: Kubelet) -> None:
    """Wait until the kubelet reads the lists of the second plugin, for both resources."""

    def reads(resource: str) -> bool:
        again = kubelet.count("ListAndWatch", resource) == 2
        return again and kubelet.allocatable(resource) > 0

    kubelet.wait(lambda: reads(MEMORY) and reads(COMPUTE))


def container(
    name: str = "main",
    *,
    memory: int = 0,
    compute: int = 0,
    init: bool = False,
    others: Mapping[str, int] = NONE,
) -> Mapping[str, object]:
    """A container that requests units of memory, percents of time, and the resources in
    `others`."""
    asked = {name: count for name, count in ((MEMORY, memory), (COMPUTE, compute)) if count}
    return {"name": name, "limits": {**asked, **others}, "init": init}


def given(paths: Paths) -> list[AllocatedGPU]:
    """The parts of GPUs in the checkpoint."""
    return [entry.gpu for entry in checkpoint.read(paths).allocations if entry.gpu is not None]


def bound(paths: Paths) -> dict[str, tuple[int, int]]:
    """GiB and percent by GPU; parts without a GPU under ""."""
    sums: dict[str, tuple[int, int]] = {}
    for gpu in given(paths):
        memory, compute = sums.get(gpu.uuid, (0, 0))
        sums[gpu.uuid] = (
            memory + gpu.memory_bytes // GIB,
            compute + round(gpu.compute_share * 100),
        )
    return sums


def compared(node: GpuNode) -> Sequence[Allocation]:
    """The checkpoint's allocations after a comparison with the kubelet."""
    node.plugin.compare()
    return checkpoint.read(node.paths).allocations


def edits(paths: Paths, pod: Pod, name: str = "main") -> dict[str, Any]:
    """The edits that the runtime finds for a container's CDI name."""
    (qualified,) = pod.containers[name].cdi
    kind, _, slot = qualified.partition("=")
    document = json.loads((paths.cdi / f"podfabric-slot-{slot}.json").read_text())
    assert document["kind"] == kind
    (device,) = document["devices"]
    assert device["name"] == slot
    found: dict[str, Any] = device["containerEdits"]
    return found


def gpu_node_of(found: dict[str, Any]) -> str:
    """The only GPU node among the edits."""
    (path,) = [node["path"] for node in found["deviceNodes"] if node["path"][-1].isdigit()]
    return str(path)
