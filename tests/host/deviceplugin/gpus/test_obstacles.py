"""A GPU is given in parts only if its limits can be kept."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from base.paths import Paths
from deviceplugin.plugin import DevicePlugin
from deviceplugin.pools.pool_config import DevicePluginConfig
from gpu.driver.driver_files import SharedFile
from gpu.pools.limit_backend import ALONE, GpuParts
from host.selinux import ATTRIBUTE, READ, WRITE
from tests.host.deviceplugin.gpus.gpu_node import MEMORY, container, edits, units
from tests.kubelet.devices import PodRejected
from tests.kubelet.kubelet import Kubelet
from tests.unit.gpu.groups import FileGroups

MIB = 1 << 20
LIBRARY = SharedFile("/var/lib/podfabric/gpu/shim/libpfcuda.so", "/usr/lib64/libcuda.so.1")


class ObstructedNode:
    """A node with one GPU, with possible obstacles to limits."""

    def __init__(self, paths: Paths, stack: ExitStack) -> None:
        self.paths = paths
        self.stack = stack
        self.groups = FileGroups(paths.run / "gpu")
        self.obstacle: str | None = None
        self.plugin: DevicePlugin | None = None
        self.shared: Sequence[SharedFile] = (LIBRARY,)

    def parts(self) -> GpuParts:
        return GpuParts(
            groups=self.groups,
            obstacle=lambda: self.obstacle,
            files=self.files,
        )

    def files(self) -> Sequence[SharedFile]:
        return self.shared

    def start(self, parts: GpuParts | None = None, **pool: object) -> None:
        config = DevicePluginConfig(pools=(), gpus=(units(8, **pool),))
        self.plugin = DevicePlugin(self.paths, config, gpu_parts=parts or self.parts())
        self.stack.callback(self.plugin.close)
        self.plugin.start()


@pytest.fixture
def gpus() -> int:
    return 1


@pytest.fixture
def node(paths: Paths) -> Iterator[ObstructedNode]:
    with ExitStack() as stack:
        yield ObstructedNode(paths, stack)


def withheld(kubelet: Kubelet) -> Callable[[], bool]:
    return lambda: kubelet.capacity(MEMORY) == 8 and kubelet.allocatable(MEMORY) == 0


def test_a_gpu_is_given_once_the_shims_are_there_and_not_when_they_are_gone(
    node: ObstructedNode, kubelet: Kubelet
) -> None:
    node.obstacle = "/var/lib/podfabric/gpu/shim has no libpfcuda.so"
    node.start()
    kubelet.wait(withheld(kubelet))
    node.obstacle = None
    kubelet.wait(lambda: kubelet.allocatable(MEMORY) == 8)
    node.obstacle = "no libcuda.so.1 below /"
    kubelet.wait(withheld(kubelet))
    endpoint = kubelet.endpoint(MEMORY)
    assert endpoint is not None
    (first, *_) = sorted(kubelet.devices(MEMORY))
    with pytest.raises(Exception, match=r"its GPU is unhealthy: .* no libcuda.so.1 below /"):
        endpoint.allocate([first])


def test_with_selinux_only_our_files_get_the_label_of_containers(
    node: ObstructedNode, kubelet: Kubelet
) -> None:
    switch = node.paths.sys / "fs/selinux/enforce"
    switch.parent.mkdir(parents=True)
    switch.write_text("1")
    node.paths.shims.mkdir(parents=True)
    shim, driver = node.paths.shims / "libpfcuda.so", node.paths.state / "libcuda.so.580"
    for file in (shim, driver):
        file.touch()
    node.shared = (SharedFile(str(shim), "/lib/libcuda.so"), SharedFile(str(driver), "/lib/real"))
    node.start()
    kubelet.wait(lambda: kubelet.allocatable(MEMORY) == 8)
    found = edits(node.paths, kubelet.admit("trainer", [container(memory=2)]))
    host = {each["containerPath"]: Path(each["hostPath"]) for each in found["mounts"]}
    labels = {"limits": READ, "region": WRITE, "agent": WRITE}
    for name, wanted in labels.items():
        assert os.getxattr(host[f"/run/podfabric/gpu/{name}"], ATTRIBUTE) == wanted
    assert os.getxattr(shim, ATTRIBUTE) == READ
    with pytest.raises(OSError, match="No data"):
        os.getxattr(driver, ATTRIBUTE)


def test_a_plugin_alone_gives_no_part(
    node: ObstructedNode, kubelet: Kubelet, caplog: pytest.LogCaptureFixture
) -> None:
    node.start(GpuParts())
    kubelet.wait(withheld(kubelet))
    assert ALONE in caplog.text


def test_too_few_units_for_a_context_are_refused_with_the_number_that_is_enough(
    node: ObstructedNode, kubelet: Kubelet
) -> None:
    node.start(unit=256 * MIB)
    kubelet.wait(lambda: kubelet.allocatable(MEMORY) == 32)
    text = r"256 MiB of alnair/vgpu-memory: a CUDA context alone takes 400 MiB: request 2 or"
    with pytest.raises(PodRejected, match=text):
        kubelet.admit("small", [container(memory=1)])
    kubelet.admit("enough", [container(memory=2)])
    assert len(node.groups.limits()) == 1


def test_after_a_boot_a_holder_is_admitted_again_before_the_driver_is_there(
    node: ObstructedNode, kubelet: Kubelet
) -> None:
    """The kubelet rejects a pod with an unhealthy id for good."""
    node.start()
    kubelet.wait(lambda: kubelet.allocatable(MEMORY) == 8)
    kubelet.admit("trainer", [container(memory=3)])
    assert node.plugin is not None
    node.plugin.close()
    node.obstacle = "no libcuda.so.1 below /"
    node.start()
    kubelet.wait(lambda: kubelet.count("ListAndWatch", MEMORY) == 2)
    kubelet.wait(lambda: kubelet.capacity(MEMORY) == 8 and kubelet.allocatable(MEMORY) == 3)
