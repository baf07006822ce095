"""Which device an attachment gets, and STATUS' reasons why none can."""

from typing import Any

import msgspec
import pytest

from base.pod import Pod
from cni.attachments.matching import Match
from cni.spec.config import decode
from cni.spec.request import Request
from cni.sriov import candidates, options
from cni.sriov.device_record import DeviceRecord
from cni.sriov.plan import DeviceUnfit
from deviceplugin.pod_devices import PodHoldings
from tests.unit.sriov.configuration import read
from tests.unit.sriov.node import PF, VF0, VF1, Node


def _candidates(node: Node, **config: Any) -> list[str]:  # noqa: ANN401
    nothing = Match(node.paths, PodHoldings(Pod("", "")), "fabric/net1")
    wanted = read(**{"deviceID": None} | config)
    return list(candidates.candidates(node.paths, wanted, nothing))


def _no_candidate(node: Node, **config: Any) -> DeviceUnfit:  # noqa: ANN401
    with pytest.raises(DeviceUnfit) as caught:
        _candidates(node, **config)
    return caught.value


def _missing(node: Node, **config: Any) -> list[str]:  # noqa: ANN401
    document = decode(msgspec.json.encode({"type": "sriov"} | config))
    wanted = options.read(Request(command="STATUS", config=document), needs_device=False)
    return candidates.missing(node.paths, wanted)


def test_one_device_is_the_only_candidate(ethernet: Node) -> None:
    assert _candidates(ethernet, deviceID=VF1, master="enp175s0f1") == [VF1]


def test_masters_vfs_with_an_interface_are_candidates_by_number(ethernet: Node) -> None:
    assert _candidates(ethernet, master="enp175s0f1") == [VF0, VF1]
    (ethernet.tree.device(VF0) / "net/enp175s6").rename(ethernet.paths.sys / "in a pod")
    # One that is in a pod comes last: the pod may be dead.
    assert _candidates(ethernet, master=["enp175s0f1"]) == [VF1, VF0]


def test_masters_vfs_for_userspace_are_candidates_if_asked_for(infiniband: Node) -> None:
    assert _candidates(infiniband, master="ib0") == [VF0]
    assert _candidates(infiniband, master="ib0", vfioPciMode=True) == [VF1]


def test_master_itself(ethernet: Node) -> None:
    assert _candidates(ethernet, master="ens1", pfOnly=True) == ["0000:05:00.0"]


def test_masters_of_a_list_are_tried_in_order(ethernet: Node) -> None:
    ethernet.tree.pf("0000:d8:00.0", totalvfs=2)
    ethernet.tree.netdev("0000:d8:00.0", "enp216s0")
    ethernet.tree.vf("0000:d8:00.0", "0000:d8:00.2")
    ethernet.tree.netdev("0000:d8:00.2", "enp216s0v0")
    assert _candidates(ethernet, master=["enp216s0", "enp175s0f1"]) == ["0000:d8:00.2", VF0, VF1]


def test_master_that_is_not_a_hardware_interface(ethernet: Node) -> None:  # SU1
    ethernet.tree.netdev("", "br0")
    for name in ("br0", "enp175s0f2"):
        unfit = _no_candidate(ethernet, master=name)
        assert f"{name} is not an interface of a PCI or auxiliary device" in unfit.message


def test_missing_master_does_not_hide_the_next(ethernet: Node) -> None:
    assert _candidates(ethernet, master=["in0a0pod", "enp175s0f1"]) == [VF0, VF1]


def test_masters_without_a_free_vf_are_listed_with_reasons(ethernet: Node) -> None:
    ethernet.tree.pf("0000:d8:00.0")
    ethernet.tree.netdev("0000:d8:00.0", "enp216s0")
    for address in (VF0, VF1):
        ethernet.tree.bound(address, "vfio-pci")
    unfit = _no_candidate(ethernet, master=["ens1", "enp216s0", "enp175s0f1"])
    assert unfit.code == 11
    assert unfit.message == (
        '"master": no device is free: ens1 has no VFs: write a number to its sriov_numvfs; '
        "enp216s0 cannot have VFs; none of the 2 VFs of enp175s0f1 has a network driver"
    )


def test_node_lacks_nothing(ethernet: Node) -> None:
    assert _missing(ethernet) == []
    assert _missing(ethernet, master="enp175s0f1", rdmaIsolation=True) == []
    assert _missing(ethernet, deviceID=VF0) == []


def test_master_without_vfs(ethernet: Node) -> None:
    no_vfs = ["ens1 has no VFs: write a number to sriov_numvfs of a PF"]
    assert _missing(ethernet, master="ens1") == no_vfs
    assert _missing(ethernet, master="ens1", pfOnly=True) == []


def test_node_without_vfs(ethernet: Node) -> None:
    (ethernet.tree.device(PF) / "sriov_numvfs").write_text("0\n")
    assert _missing(ethernet) == [
        "this node has no VFs: write a number to sriov_numvfs of a PF",
    ]


def test_wrong_mode_is_listed_with_other_reasons(ethernet: Node) -> None:
    ethernet.mode = "shared"
    isolation, no_vfs = _missing(ethernet, master="ens1", rdmaIsolation=True)
    assert "are in shared mode: run `rdma system set netns exclusive` before any pod" in isolation
    assert "ens1 has no VFs" in no_vfs


def test_status_names_the_missing_master(ethernet: Node) -> None:
    (reason,) = _missing(ethernet, master="enp175s0f2")
    assert "enp175s0f2" in reason


def test_scalable_function_needs_no_vfs(ethernet: Node) -> None:
    ethernet.with_a_scalable_function()
    assert _missing(ethernet, deviceID="mlx5_core.sf.6") == []


@pytest.mark.parametrize(
    ("record", "segment"),
    [
        ({"pf": "0000:3b:00.0", "pkey": 0x0001}, "0000:3b:00.0 0x8001"),
        ({"pf": "0000:3b:00.0"}, "0000:3b:00.0"),
        ({}, "0000:3b:00.2"),
    ],
)
def test_the_link_of_a_device_is_its_pfs_with_the_partition(
    record: dict[str, Any], segment: str
) -> None:
    assert DeviceRecord(device="0000:3b:00.2", driver="mlx5_core", **record).segment == segment
