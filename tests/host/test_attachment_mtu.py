"""An interface in a real namespace with a larger MTU than its parent on a made-up server."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from base.paths import Paths
from cni.attachments.journal import Journal, JournalEntry
from host.namespaces import NetworkNamespace
from node.attachment_faults import AttachmentHealth
from node.state import ThisNode
from tests.netns import ip, namespace
from tests.unit.host import servers
from tests.unit.host.sysfs import Tree
from tests.unit.node import test_fabric_node

CHILD = {"mode": "datagram", "mtu": 4092}
VF = {"pkey": None, "device": servers.VFS_ETHERNET[0], "origin": {"mtu": 4092}}
PF = "enp59s0f1np0"


@pytest.fixture
def pod() -> Iterator[Path]:
    """A pod with the interface net1, whose MTU is 4092."""
    with namespace() as path:
        ip("-n", path.name, "link", "add", "net1", "mtu", "4092", "type", "veth")
        yield path


@pytest.fixture
def server(tmp_path: Path) -> Paths:
    return servers.vfs(tmp_path)


def attach(server: Paths, pod: Path, record: dict[str, object], device: str = "") -> None:
    test_fabric_node.attach(server, "worker-0", "" if device else "ib0", **record)
    (entry,) = Journal(server).entries()
    assert isinstance(entry, JournalEntry)
    with NetworkNamespace.open(str(pod)) as inside:
        identity = inside.identity
    Journal(server).write(replace(entry, netns=str(pod), netns_identity=identity, device=device))


def faults(server: Paths, netdev: str, mtu: str) -> list[str]:
    health = AttachmentHealth()
    health.look(ThisNode(server, tolerant=True))
    Tree(server.sys, server).write(f"class/net/{netdev}/mtu", mtu)
    found = AttachmentHealth().look(ThisNode(server, tolerant=True))
    assert health.differs(server) or not found  # each fault is noticed without a look
    return [text for _, text in found]


@pytest.mark.parametrize(
    ("record", "device", "netdev"), [(CHILD, "", "ib0"), (VF, servers.VFS_ETHERNET[0], PF)]
)
def test_a_smaller_mtu_above_is_a_fault(
    server: Paths, pod: Path, record: dict[str, object], device: str, netdev: str
) -> None:
    attach(server, pod, record, device)
    assert faults(server, netdev, "4092") == []
    assert faults(server, netdev, "1500") == [
        f"{netdev} has MTU 1500, less than the MTU 4092 of net1 of ml/worker-0: larger packets "
        "are lost"
    ]
    assert faults(server, netdev, "") == []  # the file has no number


def test_an_mtu_that_was_lowered_in_the_pod_is_no_fault(server: Paths, pod: Path) -> None:
    """The kernel itself lowers a child's MTU to the MTU of the child's broadcast group."""
    attach(server, pod, CHILD)
    ip("-n", pod.name, "link", "set", "net1", "mtu", "1500")
    assert faults(server, "ib0", "1500") == []
    ip("netns", "delete", pod.name)
    assert faults(server, "ib0", "1500") == []


@pytest.mark.parametrize(
    ("changed", "driver"),
    [({"mode": "connected"}, "mlx5_core"), ({"mtu": 0}, "mlx5_core"), ({}, "mlx4_core")],
)
def test_an_uncertain_limit_is_no_fault(
    server: Paths, pod: Path, changed: dict[str, object], driver: str
) -> None:
    attach(server, pod, CHILD | changed)
    Tree(server.sys, server).bound(servers.VFS_PF, driver)
    assert faults(server, "ib0", "1500") == []
