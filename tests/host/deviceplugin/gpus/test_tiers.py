"""A GPU is given in parts only if its limits can be kept as the configuration says."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from base.paths import Paths
from deviceplugin import checkpoint
from deviceplugin.gpus import tiers
from deviceplugin.gpus.parts import ALONE, GpuParts
from deviceplugin.plugin import DevicePlugin
from deviceplugin.pools.config import DevicePluginConfig
from deviceplugin.pools.gpu_pool import GpuBinding
from gpu.driver_files import SharedFile
from gpu.settings import GpuLimitSettings
from gpu.tiers import Tier
from host.selinux import ATTRIBUTE, READ, WRITE
from tests.host.deviceplugin.gpus.gpu_node import MEMORY, container, units
from tests.kubelet.devices import PodRejected
from tests.kubelet.kubelet import Kubelet
from tests.unit.gpu.groups import FileGroups
from tests.waiting import until

MIB = 1 << 20
OLD = "driver 580.65.06 has no memory limits of cgroups: R615 or later has them"
LIBRARY = SharedFile("/var/lib/podfabric/gpu/shim/libpfcuda.so", "/usr/lib64/libcuda.so.1")


class TieredNode:
    """A node with one GPU, whose obstacles can change."""

    def __init__(self, paths: Paths, stack: ExitStack) -> None:
        self.paths = paths
        self.stack = stack
        self.groups = FileGroups(paths.run / "gpu")
        self.obstacles: dict[Tier, str | None] = {"kernel": OLD, "shim": None}
        self.plugin: DevicePlugin | None = None
        self.shared: Sequence[SharedFile] = (LIBRARY,)

    def parts(self) -> GpuParts:
        return GpuParts(
            groups=self.groups,
            obstacles=lambda mount, uuid: {
                tier: (lambda tier=tier: self.obstacles[tier])  # type: ignore[misc]
                for tier in self.obstacles
            },
            files=self.files,
        )

    def files(self, mount: SharedFile | None) -> Sequence[SharedFile]:
        return self.shared

    def start(
        self,
        settings: GpuLimitSettings,
        parts: GpuParts | None = None,
        binding: GpuBinding = "admission",
        **pool: object,
    ) -> None:
        config = DevicePluginConfig(
            pools=(), gpus=(units(8, **pool),), gpu_limits=settings, gpu_binding=binding
        )
        self.plugin = DevicePlugin(self.paths, config, gpu_parts=parts or self.parts())
        self.stack.callback(self.plugin.close)
        self.plugin.start()

    def tier(self) -> str:
        (allocated,) = {
            entry.gpu.tier for entry in checkpoint.read(self.paths).allocations if entry.gpu
        }
        return allocated


@pytest.fixture
def gpus() -> int:
    return 1


@pytest.fixture
def node(paths: Paths) -> Iterator[TieredNode]:
    with ExitStack() as stack:
        yield TieredNode(paths, stack)


def withheld(kubelet: Kubelet) -> Callable[[], bool]:
    return lambda: kubelet.capacity(MEMORY) == 8 and kubelet.allocatable(MEMORY) == 0


def test_an_old_driver_makes_gpus_unhealthy_where_the_kernel_tier_is_required(
    node: TieredNode, kubelet: Kubelet, caplog: pytest.LogCaptureFixture
) -> None:
    node.start(GpuLimitSettings(enforce=("kernel", "shim"), require="kernel"))
    kubelet.wait(withheld(kubelet))
    assert "nvidia0 is not given: limits must be enforced by kernel or stronger" in caplog.text
    assert OLD in caplog.text
    (written,) = tiers.written(node.paths).values()
    assert written.choice.unhealthy is not None and OLD in written.choice.unhealthy


def test_a_stronger_tier_that_cannot_be_had_is_told_and_the_next_one_taken(
    node: TieredNode, kubelet: Kubelet, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    node.start(GpuLimitSettings(enforce=("kernel", "shim")))
    kubelet.wait(lambda: kubelet.allocatable(MEMORY) == 8)
    assert f"nvidia0: limits are kept by: shim (kernel: {OLD})" in caplog.text
    pod = kubelet.admit("trainer", [container(memory=2)])
    assert pod.containers["main"].mounts[LIBRARY.container] == (LIBRARY.host, True)
    assert node.tier() == "shim"


def test_a_gpu_without_shims_is_given_only_where_nothing_is_required(
    node: TieredNode, kubelet: Kubelet
) -> None:
    node.obstacles["shim"] = "/var/lib/podfabric/gpu/shim has no libpfcuda.so"
    node.start(GpuLimitSettings(require="none"))
    kubelet.wait(lambda: kubelet.allocatable(MEMORY) == 8)
    pod = kubelet.admit("trainer", [container(memory=2)])
    assert pod.containers["main"].mounts == {}
    assert node.groups.limits() == {}
    assert node.tier() == "none"


def test_a_gpu_is_given_once_the_shims_are_there_and_not_when_they_are_gone(
    node: TieredNode, kubelet: Kubelet
) -> None:
    node.obstacles["shim"] = "/var/lib/podfabric/gpu/shim has no libpfcuda.so"
    node.start(GpuLimitSettings())
    kubelet.wait(withheld(kubelet))
    node.obstacles["shim"] = None
    kubelet.wait(lambda: kubelet.allocatable(MEMORY) == 8)
    node.obstacles["shim"] = "no libcuda.so.1 below /"
    kubelet.wait(withheld(kubelet))
    endpoint = kubelet.endpoint(MEMORY)
    assert endpoint is not None
    (first, *_) = sorted(kubelet.devices(MEMORY))
    with pytest.raises(Exception, match=r"its GPU is unhealthy: .* no libcuda.so.1 below /"):
        endpoint.allocate([first])


def test_a_container_keeps_the_tier_that_it_was_given_when_it_starts_again(
    node: TieredNode, kubelet: Kubelet
) -> None:
    """Its mounts are those of Allocate: it has no shim, whatever the node has by now."""
    node.obstacles["shim"] = "no driver"
    node.start(GpuLimitSettings(require="none"))
    kubelet.wait(lambda: kubelet.allocatable(MEMORY) == 8)
    pod = kubelet.admit("trainer", [container(memory=2)])
    node.obstacles["shim"] = None
    assert node.plugin is not None
    until(lambda: node.plugin.gpu_tiers()[0].choice.tier == "shim")  # type: ignore[union-attr]
    kubelet.run(pod)
    assert node.tier() == "none"
    assert node.groups.limits() == {}


def test_a_container_without_a_cdi_device_that_is_taken_over_from_the_kubelet_has_the_shims(
    node: TieredNode, kubelet: Kubelet
) -> None:
    settings = GpuLimitSettings(enforce=("kernel", "shim"))
    node.obstacles["kernel"] = None
    node.start(settings)
    kubelet.wait(lambda: kubelet.allocatable(MEMORY) == 8)
    kubelet.run(kubelet.admit("trainer", [container(memory=2)]))
    assert node.tier() == "shim"
    assert node.plugin is not None
    node.plugin.close()
    node.paths.checkpoint.unlink()
    node.start(settings, binding="start")
    until(lambda: len(checkpoint.read(node.paths).allocations) == 2, what="its ids")
    assert node.plugin.gpu_tiers()[0].choice.tier == "kernel"
    assert node.tier() == "shim"


def test_where_the_kernel_has_selinux_containers_may_use_what_is_ours_and_nothing_else_changes(
    node: TieredNode, kubelet: Kubelet
) -> None:
    switch = node.paths.sys / "fs/selinux/enforce"
    switch.parent.mkdir(parents=True)
    switch.write_text("1")
    node.paths.shims.mkdir(parents=True)
    shim, driver = node.paths.shims / "libpfcuda.so", node.paths.state / "libcuda.so.580"
    for file in (shim, driver):
        file.touch()
    node.shared = (SharedFile(str(shim), "/lib/libcuda.so"), SharedFile(str(driver), "/lib/real"))
    node.start(GpuLimitSettings())
    kubelet.wait(lambda: kubelet.allocatable(MEMORY) == 8)
    mounts = kubelet.admit("trainer", [container(memory=2)]).containers["main"].mounts
    host = {inside: Path(path) for inside, (path, _) in mounts.items()}
    labels = {"limits": READ, "region": WRITE, "agent": WRITE}
    for name, wanted in labels.items():
        assert os.getxattr(host[f"/run/podfabric/gpu/{name}"], ATTRIBUTE) == wanted
    assert os.getxattr(shim, ATTRIBUTE) == READ
    with pytest.raises(OSError, match="No data"):
        os.getxattr(driver, ATTRIBUTE)


def test_a_plugin_alone_gives_no_part_unless_nothing_is_required(
    node: TieredNode, kubelet: Kubelet, caplog: pytest.LogCaptureFixture
) -> None:
    node.start(GpuLimitSettings(), GpuParts())
    kubelet.wait(withheld(kubelet))
    assert ALONE in caplog.text


def test_too_few_units_for_a_context_are_refused_with_the_number_that_is_enough(
    node: TieredNode, kubelet: Kubelet
) -> None:
    node.start(GpuLimitSettings(), unit=256 * MIB)
    kubelet.wait(lambda: kubelet.allocatable(MEMORY) == 32)
    text = r"256 MiB of alnair/vgpu-memory: a CUDA context is charged with 400 MiB .* ask for 2 or"
    with pytest.raises(PodRejected, match=text):
        kubelet.admit("small", [container(memory=1)])
    kubelet.admit("enough", [container(memory=2)])
    assert node.tier() == "shim"


def test_after_a_boot_a_holder_is_admitted_again_before_the_driver_is_there(
    node: TieredNode, kubelet: Kubelet
) -> None:
    """The kubelet rejects for good a pod with an unhealthy id."""
    node.start(GpuLimitSettings())
    kubelet.wait(lambda: kubelet.allocatable(MEMORY) == 8)
    kubelet.admit("trainer", [container(memory=3)])
    assert node.plugin is not None
    node.plugin.close()
    node.obstacles["shim"] = "no libcuda.so.1 below /"
    node.start(GpuLimitSettings())
    kubelet.wait(lambda: kubelet.count("ListAndWatch", MEMORY) == 2)
    kubelet.wait(lambda: kubelet.capacity(MEMORY) == 8 and kubelet.allocatable(MEMORY) == 3)
