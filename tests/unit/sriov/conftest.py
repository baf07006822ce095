"""Nodes with VFs, one of each link layer."""

from pathlib import Path

import pytest

from tests.unit.host import sysfs
from tests.unit.sriov.node import PF, VF0, VF1, Node, ipoib, link, vf


@pytest.fixture
def ethernet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    """A PF with two VFs, with netdevs enp175s6 and enp175s7 and RoCE devices."""
    node = Node(sysfs.ethernet(tmp_path / "sys"), tmp_path)
    node.tree.rdma(VF0, "mlx5_2", uverbs="uverbs2")
    node.rdma[2] = "mlx5_2"
    node.links = {
        "enp175s0f1": link("enp175s0f1", PF, index=2),
        "enp175s6": link("enp175s6", VF0, index=10),
        "enp175s7": link("enp175s7", VF1, index=11),
    }
    node.vfs = {0: vf(0), 1: vf(1, mac="02:11:22:33:aa:bc")}
    node.stands_for_the_kernel(monkeypatch)
    return node


@pytest.fixture
def infiniband(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    """A PF with two VFs: ib1 with RDMA device mlx5_1, the other one bound to vfio-pci."""
    node = Node(sysfs.infiniband(tmp_path / "sys"), tmp_path)
    node.rdma = {0: "mlx5_0", 1: "mlx5_1"}
    node.links = {"ib0": ipoib("ib0", PF, index=3), "ib1": ipoib("ib1", VF0, index=12)}
    of_the_pf = node.links["ib0"].mac
    node.vfs = {index: vf(index, mac=of_the_pf) for index in (0, 1)}
    node.stands_for_the_kernel(monkeypatch)
    return node
