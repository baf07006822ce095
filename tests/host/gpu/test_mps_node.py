"""A whole node with the tier `mps`: what containers get, and that none starts without a server.

The socket of MPS' control daemon is a stand-in, and so is the driver.
"""

import socket
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from deviceplugin import checkpoint
from deviceplugin.gpus import slot_files
from deviceplugin.gpus.given import group_of
from tests.host.gpu.oci import CdiContainer, no_cgroups_left
from tests.host.gpu.test_doctor import R580
from tests.host.gpu.whole_node import WholeNode, whole_node
from tests.kubelet.kubelet import NotStarted, Pod
from tests.standin.driver import Out
from tests.standin.gpus import GIB, MIB, gpus
from tests.waiting import until

MEMORY, COMPUTE = "alnair/vgpu-memory", "alnair/vgpu-compute"
OUT_OF_MEMORY = 2
DEFAULT, EXCLUSIVE_PROCESS = 0, 3

MakeNode = Callable[..., WholeNode]


class ControlDaemon:
    """What a client of MPS finds of the control daemon: a socket in the directory of the pipes."""

    def __init__(self, pipes: Path) -> None:
        self.path = pipes / "control"

    @contextmanager
    def running(self) -> Iterator[None]:
        self.path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self.path))
            listener.listen()
            yield


@pytest.fixture
def make_node() -> Iterator[MakeNode]:
    """Makes a node with one GPU, whose agent runs. Its directories of MPS are there."""
    with ExitStack() as stack:

        def made(*, require: str = "mps", mode: int = EXCLUSIVE_PROCESS) -> WholeNode:
            # Not below /dev/shm: containers have the daemon's, which hides the stand-in driver.
            root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pf-", dir="/tmp")))
            one = gpus(1, bytes=16 * GIB, reserved_bytes=600 * MIB, compute_mode=mode)
            node = stack.enter_context(whole_node(root, one, R580))
            for name in ("mps", "shm"):
                (root / name).mkdir()
            node.configure(
                gpus=[{"mode": "units"}],
                devices={"gpuBinding": "start"},
                gpuLimits={
                    "driverRoot": str(root / "driver"),
                    "enforce": ["mps", "shim"],
                    "require": require,
                    "mps": {"pipes": str(root / "mps"), "shm": str(root / "shm")},
                },
            )
            node.start_agent()
            node.kubelet.wait(lambda: node.kubelet.capacity(MEMORY) == 15)
            return node

        yield made


def admitted(node: WholeNode, name: str = "trainer") -> tuple[Pod, CdiContainer]:
    """A pod with 2 GiB and half of the time, which has not started yet."""
    uid = str(uuid.uuid4())
    node.stack.enter_context(no_cgroups_left(uid))
    node.kubelet.wait(lambda: node.kubelet.allocatable(MEMORY) == 15)
    node.kubelet.wait(lambda: node.kubelet.allocatable(COMPUTE) == 100)
    limits = {MEMORY: 2, COMPUTE: 50}
    containers = [{"name": "main", "limits": limits}]
    pod = node.kubelet.admit(name, containers, uid=uid, start=False)
    given_now = (each.gpu for each in checkpoint.read(node.paths).allocations)
    (slot,) = {gpu.slot for gpu in given_now if gpu is not None and gpu.slot}
    return pod, CdiContainer(node, uid, slot_files.qualified(group_of(MEMORY, slot)))


def test_a_container_is_a_client_of_mps_with_its_limits_and_has_the_shim(
    make_node: MakeNode,
) -> None:
    """The daemon has no server yet: NVIDIA's starts one when its first client comes."""
    node = make_node()
    daemon = ControlDaemon(node.root / "mps")
    with daemon.running():
        pod, container = admitted(node)
        node.kubelet.run(pod)
        (tier,) = {each.gpu.tier for each in checkpoint.read(node.paths).allocations if each.gpu}
        assert tier == "mps"
        assert set(container.edits["env"]) == {
            f"CUDA_MPS_PIPE_DIRECTORY={node.root}/mps",
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=2048M",
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50",
            "NVIDIA_VISIBLE_DEVICES=void",
        }
        mounts = {each["containerPath"]: each for each in container.edits["mounts"]}
        for host, inside in (
            (node.root / "mps", f"{node.root}/mps"),
            (node.root / "shm", "/dev/shm"),
        ):
            assert (mounts[inside]["hostPath"], mounts[inside]["options"][0]) == (str(host), "rw")
        process = container.start()
        process.start()
        # The shim keeps the sum of all processes, and no share of the time: MPS keeps that of SMs.
        assert process.result("cuMemAlloc_v2", Out(8), 2 * GIB) == OUT_OF_MEMORY
        share = "compute_share_ratio", "trainer/main"
        until(lambda: node.values().get(share) == 1.0, what="series of the container")
        assert node.values()["tier_info", "mps"] == 1


def test_without_a_control_daemon_no_container_starts(make_node: MakeNode) -> None:
    node = make_node()
    daemon = ControlDaemon(node.root / "mps")
    with daemon.running():
        pod, container = admitted(node)
    for is_killed in (True, False):  # which leaves the socket's file
        if not is_killed:
            daemon.path.unlink()
        with pytest.raises(NotStarted, match=r"no MPS control daemon listens at .*/mps/control"):
            node.kubelet.run(pod)
        assert not list(node.paths.cdi.glob("podfabric-slot-*")), "the runtime finds no device"
    node.kubelet.wait(lambda: node.kubelet.allocatable(MEMORY) == 2)  # those of the pod alone
    assert "nvidia0 is not given: limits must be enforced by mps or stronger" in node.log
    with daemon.running():
        until(lambda: "limits are kept by: mps" in node.log.rpartition("not given")[2])
        # A resource's list is written after the other's: the start looks at both.
        node.kubelet.wait(lambda: node.kubelet.allocatable(MEMORY) == 15)
        node.kubelet.wait(lambda: node.kubelet.allocatable(COMPUTE) == 100)
        node.kubelet.run(pod)
        assert "env" in container.edits


def test_a_container_that_starts_again_without_a_daemon_is_refused(make_node: MakeNode) -> None:
    node = make_node()
    daemon = ControlDaemon(node.root / "mps")
    with daemon.running():
        pod, container = admitted(node)
        node.kubelet.run(pod)
        process = container.start()
        process.start()
    with pytest.raises(NotStarted):
        node.kubelet.run(pod)
    process.do("cuMemAlloc_v2", Out(8), GIB)  # what runs is left alone


def test_a_gpu_that_programs_could_use_without_mps_is_not_given(make_node: MakeNode) -> None:
    node = make_node(mode=DEFAULT)
    with ControlDaemon(node.root / "mps").running():
        until(lambda: "is not in the compute mode EXCLUSIVE_PROCESS" in node.log, what="the reason")
        assert node.kubelet.allocatable(MEMORY) == 0
        until(lambda: node.values().get(("withheld", "0")) == 1, what="metric")


def test_where_the_shim_is_enough_a_node_without_a_daemon_has_that(make_node: MakeNode) -> None:
    node = make_node(require="shim")
    pod, container = admitted(node)
    node.kubelet.run(pod)
    (tier,) = {each.gpu.tier for each in checkpoint.read(node.paths).allocations if each.gpu}
    assert tier == "shim"
    assert container.edits["env"] == ["NVIDIA_VISIBLE_DEVICES=void"]
