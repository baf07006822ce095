"""The agent serves the pools of its node, and reports them in its metrics."""

import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from base.paths import Paths
from base.pod import Pod
from cni.attachments.pod_choices import YOUNG, PodChoices
from deviceplugin import checkpoint
from tests.host.deviceplugin.processes import configure, made_server, running
from tests.kubelet import Kubelet
from tests.unix_http import UnixHTTPConnection
from tests.waiting import until

POOLS = (
    {"name": "rdma/hca", "slots": 4, "selectors": {"rdmaDevices": ["mlx5_0", "mlx5_1"]}},
    {"name": "rdma/rest", "mode": "exclusive"},
)


@pytest.fixture
def server() -> Iterator[Paths]:
    with tempfile.TemporaryDirectory(prefix="pf-") as root:
        paths = made_server(Path(root))
        configure(paths, *POOLS, agent={"listen": f"unix:{root}/http", "sweep": False})
        yield paths


def devices(server: Paths) -> dict[tuple[str, str], float]:
    """`podfabric_devices` from a scrape, by resource and state."""
    connection = UnixHTTPConnection(server.kubelet.parent / "http")
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    finally:
        connection.close()
    line = r'^podfabric_devices\{resource="(.+)",state="(.+)"\} (.+)$'
    found = re.findall(line, text, re.MULTILINE)
    return {(resource, state): float(value) for resource, state, value in found}


def test_pools_are_served_and_counted(server: Paths) -> None:
    with running(server, "agent") as agent, Kubelet(server.kubelet) as kubelet:
        kubelet.wait(lambda: kubelet.allocatable("rdma/hca") == 8)
        kubelet.wait(lambda: kubelet.allocatable("rdma/rest") == 6)
        kubelet.admit("worker-0", [{"name": "main", "limits": {"rdma/hca": 2}}])
        port = server.sys / "class/infiniband/mlx5_7/ports/1"
        (port / "state").write_text("1: DOWN\n")
        (port / "phys_state").write_text("3: Disabled\n")
        kubelet.wait(lambda: kubelet.allocatable("rdma/rest") == 5)
        expected = {
            ("rdma/hca", "healthy"): 8,
            ("rdma/hca", "unhealthy"): 0,
            ("rdma/hca", "held"): 2,
            ("rdma/hca", "registered"): 1,
            ("rdma/rest", "healthy"): 5,
            ("rdma/rest", "unhealthy"): 1,
            ("rdma/rest", "held"): 0,
            ("rdma/rest", "registered"): 1,
        }
        until(lambda: devices(server) == expected)
        assert agent.end() == 0


def test_next_agent_offers_the_pools_at_once_and_keeps_every_allocation(server: Paths) -> None:
    """Pods are admitted directly before and after each change; one agent answers each."""
    resource = "rdma/hca"
    with ExitStack() as stack:
        serving = stack.enter_context(running(server, "agent"))
        kubelet = stack.enter_context(Kubelet(server.kubelet))
        kubelet.wait(lambda: kubelet.allocatable(resource) == 8)
        for number in range(3):
            waiting = stack.enter_context(running(server, "agent"))
            until(lambda: "waiting until it ends" in waiting.log)  # noqa: B023
            kubelet.admit(f"before-{number}", [{"name": "main", "limits": {resource: 1}}])
            before = kubelet.endpoint(resource)
            assert serving.end() == 0
            kubelet.wait(
                lambda: (
                    kubelet.endpoint(resource) is not before  # noqa: B023
                    and kubelet.allocatable(resource) == 8
                )
            )
            kubelet.admit(f"after-{number}", [{"name": "main", "limits": {resource: 1}}])
            until(lambda: devices(server).get((resource, "registered")) == 1)
            serving = waiting
        held = {one for held in kubelet.held() for one in held.devices}
        written = {kept.id for kept in checkpoint.read(server).allocations}
        assert len(held) == 6
        assert written == held
        assert serving.end() == 0


@pytest.mark.parametrize("command", ["agent", "device-plugin"])
def test_choices_of_pods_that_the_kubelet_forgot_are_removed(server: Paths, command: str) -> None:
    gone, new = Pod("ml", "worker-7", "uid-7"), Pod("ml", "worker-8", "uid-8")
    for pod in (gone, new):
        PodChoices(server, pod).record("fabric/net1", "0000:3b:00.0")
    (old,) = (path for path in (server.devices / "pods").iterdir() if b"uid-7" in path.read_bytes())
    os.utime(old, (time.time() - YOUNG - 1,) * 2)
    with running(server, command), Kubelet(server.kubelet) as kubelet:
        kubelet.wait(lambda: kubelet.allocatable("rdma/hca") == 8)
        kubelet.admit("worker-0", [{"name": "main", "limits": {"rdma/hca": 1}}])
        until(lambda: not old.exists())
    (left,) = (server.devices / "pods").iterdir()
    assert b"uid-8" in left.read_bytes()
