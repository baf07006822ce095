"""A whole node whose driver keeps limits of memory: the tier `kernel`, from Allocate to the cgroup.

The runtime is runc, the cgroups are the kernel's, the driver is the stand-in.
"""

import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from deviceplugin import checkpoint
from tests.host.gpu.oci import CdiContainer, no_cgroups_left
from tests.host.gpu.test_doctor import R580, R615
from tests.host.gpu.whole_node import LIBRARIES, WholeNode, whole_node
from tests.standin.driver import Driver, Out
from tests.standin.gpus import GIB, MIB, Failure, Limit, gpus
from tests.waiting import until

MEMORY, COMPUTE = "alnair/vgpu-memory", "alnair/vgpu-compute"
OUT_OF_MEMORY = 2
ONE = gpus(1, bytes=16 * GIB, reserved_bytes=600 * MIB, context_bytes=300 * MIB)
OLD = f"driver {R580} has no memory limits of cgroups: R615 or later has them"
SET = "nvmlDeviceSetMemoryLimits_v1"

MakeNode = Callable[..., WholeNode]


@pytest.fixture
def make_node() -> Iterator[MakeNode]:
    """Makes a node with one GPU, whose agent runs and offers units of 1 GiB."""
    with ExitStack() as stack:

        def made(
            driver: str = R615,
            *,
            require: str = "shim",
            binding: str = "start",
            failures: tuple[Failure, ...] = (),
            given: int = 15,
            before: Callable[[WholeNode], object] = lambda node: None,
        ) -> WholeNode:
            root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pf-")))
            node = stack.enter_context(whole_node(root, ONE, driver, failures))
            limits = {"driverRoot": str(root / "driver"), "enforce": ["kernel", "shim"]}
            node.configure(
                gpus=[{"mode": "units"}],
                devices={"gpuBinding": binding},
                gpuLimits={**limits, "require": require},
            )
            before(node)
            node.start_agent()
            node.kubelet.wait(lambda: node.kubelet.capacity(MEMORY) == 15)
            node.kubelet.wait(lambda: node.kubelet.allocatable(MEMORY) == given)
            node.kubelet.wait(lambda: node.kubelet.allocatable(COMPUTE) == (100 if given else 0))
            return node

        yield made


def admitted(node: WholeNode, name: str = "trainer") -> CdiContainer:
    """A container with 2 GiB and half of the time."""
    uid = str(uuid.uuid4())
    node.stack.enter_context(no_cgroups_left(uid))
    limits = {MEMORY: 2, COMPUTE: 50}
    pod = node.kubelet.admit(name, [{"name": "main", "limits": limits}], uid=uid)
    (device,) = pod.containers["main"].cdi
    return CdiContainer(node, uid, device)


def free(process: Driver) -> int:
    left, total = process.do("cuMemGetInfo_v2", Out(8), Out(8))
    assert total == 2 * GIB
    return left


def tier_of(node: WholeNode) -> str:
    (tier,) = {entry.gpu.tier for entry in checkpoint.read(node.paths).allocations if entry.gpu}
    return tier


def cgroup_limit(node: WholeNode, container: CdiContainer) -> Limit | None:
    """The limit that the driver has for the cgroup of a container's last start."""
    path = f"{node.paths.sys}/fs/cgroup{container.cgroup}"
    return next((each for each in node.driver.read().limits if each.cgroup == path), None)


def test_the_driver_limits_a_container_and_the_shim_keeps_its_share(make_node: MakeNode) -> None:
    node = make_node()
    container = admitted(node)
    assert tier_of(node) == "kernel"
    process = container.start()
    process.start()
    limit = cgroup_limit(node, container)
    assert limit is not None
    assert (limit.soft, limit.hard) == (0, 2 * GIB)
    assert process.result("cuMemAlloc_v2", Out(8), 2 * GIB) == OUT_OF_MEMORY
    process.do("cuMemAlloc_v2", Out(8), GIB)
    wanted = {
        ("memory_limit_bytes", "trainer/main"): 2 * GIB,
        ("memory_used_bytes", "trainer/main"): GIB + 300 * MIB,
        ("compute_share_ratio", "trainer/main"): 0.5,
        ("processes", "trainer/main"): 1,  # of the shim
        ("tier_info", "kernel"): 1,
    }
    until(lambda: free(process) == GIB - 300 * MIB, what="measured context")
    until(lambda: wanted.items() <= node.values().items(), what="series of the container")


def test_a_library_of_the_tenants_own_is_limited_too_in_all_its_processes(
    make_node: MakeNode,
) -> None:
    node = make_node()
    container = admitted(node)
    process = container.start(f"{node.root}/driver/{LIBRARIES}/libcuda.so.1")
    process.start()
    assert free(process) == 2 * GIB - 300 * MIB, "the limit is on the leaf, so the driver shows it"
    process.do("cuMemAlloc_v2", Out(8), GIB)
    assert process.result("cuMemAlloc_v2", Out(8), GIB) == OUT_OF_MEMORY


def test_each_start_of_a_container_is_limited(make_node: MakeNode) -> None:
    node = make_node()
    container = admitted(node)
    seen = set()
    for _ in range(2):
        process = container.start()
        process.start()
        limit = cgroup_limit(node, container)
        assert limit is not None and limit.hard == 2 * GIB
        seen.add(limit.cgroup)
        process.kill()
    assert len(seen) == 2


def test_a_failure_of_the_driver_fails_the_start_and_the_next_one_works(
    make_node: MakeNode,
) -> None:
    node = make_node(failures=(Failure(SET, 1, 999),))
    container = admitted(node)
    status, said = container.start("libc.so.6").ended()
    assert status != 0
    assert "error running hook" in said, "no program of the container runs after that"
    assert "podfabric gpu-limit: group alnair-vgpu-memory." in said
    assert "a container does not start: group alnair-vgpu-memory." in node.log
    assert container.start("libc.so.6").result("getpid") > 0
    assert cgroup_limit(node, container) is not None


def test_without_an_agent_no_container_starts_and_with_the_next_one_it_does(
    make_node: MakeNode,
) -> None:
    node = make_node()
    container = admitted(node)
    running = container.start()
    running.start()
    node.kill_agent()
    status, said = container.start().ended()
    assert status != 0 and "must not start without limits" in said
    running.do("cuMemAlloc_v2", Out(8), GIB)  # needs no agent
    node.start_agent()
    node.kubelet.wait(lambda: node.kubelet.count("ListAndWatch", MEMORY) == 2)
    container.start().start()


def test_the_hook_is_needed_and_a_container_that_starts_again_gets_what_the_node_has(
    make_node: MakeNode,
) -> None:
    node = make_node(before=lambda node: node.paths.gpu_limit.rename(node.root / "gpu-limit"))
    container = admitted(node)
    missing = f"{node.paths.gpu_limit} is not there: run `podfabric install --gpu` on this node"
    assert f"limits are kept by: shim (kernel: {missing})" in node.log
    assert tier_of(node) == "shim"
    assert "hooks" not in container.edits
    process = container.start()
    process.start()
    assert process.result("cuMemAlloc_v2", Out(8), 2 * GIB) == OUT_OF_MEMORY
    assert cgroup_limit(node, container) is None
    (node.root / "gpu-limit").rename(node.paths.gpu_limit)
    until(lambda: "limits are kept by: kernel" in node.log, what="the other tier")
    assert tier_of(node) == "shim", "of a container that runs"


def test_a_container_that_is_bound_at_admission_has_no_hook_and_the_reason_is_told(
    make_node: MakeNode,
) -> None:
    node = make_node(binding="admission")
    assert "limits are kept by: shim (kernel: it takes CDI devices" in node.log


@pytest.mark.parametrize("require", ["shim", "kernel"])
def test_an_old_driver_cannot_and_where_the_kernel_tier_is_required_no_gpu_is_given(
    make_node: MakeNode, require: str
) -> None:
    node = make_node(R580, require=require, given=15 if require == "shim" else 0)
    if require == "shim":
        assert f"limits are kept by: shim (kernel: {OLD})" in node.log
        container = admitted(node)
        assert (tier_of(node), "hooks" in container.edits) == ("shim", False)
        return
    assert "nvidia0 is not given: limits must be enforced by kernel or stronger" in node.log
    assert OLD in node.log
    until(lambda: node.values().get(("withheld", "0")) == 1, what="metric")
    for words in (("explain", "--dry-run", "--resource", MEMORY), ("devices", "--gpus")):
        assert OLD in " ".join(node.podfabric(*words).split())
