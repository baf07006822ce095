"""Which device an attachment gets, and every reason why it is not given one."""

from typing import Any

import msgspec
import pytest

from cni.attachments.matching import Match
from cni.spec.request import Request
from cni.sriov import devices, options
from cni.sriov.devices import Plan, Unfit
from cni.sriov.options import Options
from cni.sriov.record import record_of
from deviceplugin.claims import Pod
from deviceplugin.match import Given
from host import rdma
from host.errors import HostError, LinkMissing
from tests.unit.host.sysfs import Tree
from tests.unit.sriov.node import HOST, PF, PORT_GUID, VF0, VF1, Node, ipoib, link, vf

GUID = "02:00:00:00:00:00:00:ab"
NONE, ALL_ZERO = "ff:ff:ff:ff:ff:ff:ff:ff", "00:00:00:00:00:00:00:00"
ISOLATED: dict[str, Any] = {"rdmaIsolation": True}


def _options(**config: Any) -> Options:  # noqa: ANN401
    document = {"type": "sriov", "deviceID": VF0} | config
    return options.read(Request(command="ADD", config=msgspec.json.encode(document)))


def _plan(node: Node, address: str = VF0, **config: Any) -> Plan:  # noqa: ANN401
    return devices.plan(HOST, node.paths, address, _options(deviceID=address, **config))


def _unfit(node: Node, address: str = VF0, **config: Any) -> Unfit:  # noqa: ANN401
    with pytest.raises(Unfit) as caught:
        _plan(node, address, **config)
    return caught.value


def _candidates(node: Node, **config: Any) -> list[str]:  # noqa: ANN401
    nothing = Match(node.paths, Given(Pod("", "")), "fabric/net1")
    wanted = _options(**{"deviceID": None} | config)
    return list(devices.candidates(node.paths, wanted, nothing))


def _no_candidate(node: Node, **config: Any) -> Unfit:  # noqa: ANN401
    with pytest.raises(Unfit) as caught:
        _candidates(node, **config)
    return caught.value


def _missing(node: Node, **config: Any) -> list[str]:  # noqa: ANN401
    document = msgspec.json.encode({"type": "sriov"} | config)
    wanted = options.read(Request(command="STATUS", config=document), needs_device=False)
    return devices.missing(HOST, node.paths, wanted)


def test_vf_is_planned_with_interface_and_what_its_pf_shows(ethernet: Node) -> None:  # SC16, SM15
    found = _plan(ethernet)
    assert (found.function.pf, found.function.index) == (PF, 0)
    assert (found.link, found.vf) == (ethernet.links["enp175s6"], ethernet.vfs[0])
    assert (found.infiniband, found.rdma) == (False, ())
    assert _plan(ethernet, VF1).vf == ethernet.vfs[1]


@pytest.mark.parametrize("address", ["0000:af:06.3", "0000:af:07.0", "mlx5_core.sf.6"])
def test_device_that_is_not_there(ethernet: Node, address: str) -> None:  # SC2, SC16, B14, SU3
    unfit = _unfit(ethernet, address)
    assert unfit.code == 7
    assert f'there is no device "{address}" on this node: is it the device that' in unfit.message


def test_interface_that_the_kernel_does_not_know_of_may_be_in_a_pod(ethernet: Node) -> None:  # SM8
    del ethernet.links["enp175s6"]
    unfit = _unfit(ethernet)
    assert unfit.code == 11
    assert f"device {VF0} (driver mlx5_core) has no interface on the host: either" in unfit.message


def test_interface_of_infiniband_that_is_away(infiniband: Node) -> None:  # B6
    del infiniband.links["ib1"]
    assert f"device {VF0} (driver mlx5_core) has no interface" in _unfit(infiniband).message


def test_interface_of_another_device_under_the_name_is_not_taken(ethernet: Node) -> None:
    ethernet.links["enp175s6"] = link("enp175s6", VF1)
    assert "has no interface on the host" in _unfit(ethernet).message


def test_child_of_the_interface_is_not_taken_for_it(infiniband: Node) -> None:
    infiniband.links["ib1"] = ipoib("ib1", VF0, parent=3)
    assert "has no interface on the host" in _unfit(infiniband).message


def test_device_without_driver(ethernet: Node) -> None:
    ethernet.tree.bound(VF0, "")
    ethernet.links.clear()
    unfit = _unfit(ethernet)
    assert unfit.code == 7
    assert f"device {VF0} has no driver: bind it to its own, or to vfio-pci" in unfit.message


def test_pf_without_interface_on_the_host_is_named(ethernet: Node) -> None:
    del ethernet.links["enp175s0f1"]
    with pytest.raises(LinkMissing, match=f"the PF {PF} has no interface on the host: is its dri"):
        _plan(ethernet)


@pytest.mark.parametrize(("address", "is_vf"), [(VF0, True), (VF1, True), (PF, False)])
def test_kind_of_device_decides(infiniband: Node, address: str, is_vf: bool) -> None:  # B14
    if is_vf:
        assert _plan(infiniband, address).vf is not None
    else:
        assert f'device {PF} is no VF: set "pfOnly": true if' in _unfit(infiniband, PF).message


@pytest.mark.parametrize("mode", [{}, {"vfioPciMode": True}, {"vfioPciMode": False}])
def test_vf_of_vfio_has_no_interface_whatever_the_option(
    infiniband: Node, mode: dict[str, bool]
) -> None:  # B8, B15
    found = _plan(infiniband, VF1, **mode)
    assert (found.function.driver, found.link, found.infiniband) == ("vfio-pci", None, False)
    assert found.vf == infiniband.vfs[1]


def test_vfio_mode_of_a_device_with_another_driver(infiniband: Node) -> None:  # B15
    assert _unfit(infiniband, vfioPciMode=True).message == (
        f'"vfioPciMode" is true, but device {VF0} has driver "mlx5_core": bind it to vfio-pci first'
    )


@pytest.mark.parametrize(
    "option",
    [
        {"mtu": 1500},
        {"allmulti": True},
        {"promisc": True},
    ],
)
def test_option_of_an_interface_on_a_device_without_one(
    infiniband: Node, option: dict[str, Any]
) -> None:
    (name,) = option
    assert _unfit(infiniband, VF1, **option).message == (
        f'"{name}": device {VF1} has driver vfio-pci, so there is no interface to set it on: '
        "remove it"
    )


def test_whole_pf(ethernet: Node) -> None:
    ethernet.links["ens1"] = link("ens1", "0000:05:00.0")
    found = _plan(ethernet, "0000:05:00.0", pfOnly=True, mtu=9000)
    assert (found.link, found.vf) == (ethernet.links["ens1"], None)


def test_whole_pf_that_has_vfs(ethernet: Node) -> None:
    assert _unfit(ethernet, PF, pfOnly=True).message == (
        f'"pfOnly": the PF {PF} has VFs, whose settings need it on the host: set its '
        "sriov_numvfs to 0 first"
    )


def test_vf_where_the_whole_pf_is_asked_for(ethernet: Node) -> None:
    assert f'"pfOnly": {VF0} is a VF of {PF}: leave' in _unfit(ethernet, pfOnly=True).message


def _with_a_scalable_function(node: Node) -> None:
    node.tree.sf(PF, "mlx5_core.sf.6")
    node.tree.netdev("mlx5_core.sf.6", "enp175s0f1s0")
    node.links["enp175s0f1s0"] = link("enp175s0f1s0", "mlx5_core.sf.6")


def test_scalable_function_has_an_interface_and_its_own_address(ethernet: Node) -> None:
    _with_a_scalable_function(ethernet)
    found = _plan(ethernet, "mlx5_core.sf.6", mac="02:00:00:00:00:01")
    assert (found.vf, found.link) == (None, ethernet.links["enp175s0f1s0"])
    record = record_of(found, _options(deviceID="mlx5_core.sf.6", mac="02:00:00:00:00:01"))
    assert (record.mac, record.before, record.pf) == ("02:00:00:00:00:01", None, "")


@pytest.mark.parametrize(
    "option",
    [
        {"vlan": 0},
        {"spoofchk": "off"},
        {"trust": "off"},
        {"link_state": "enable"},
        {"min_tx_rate": 0},
        {"max_tx_rate": 5},
        {"guid": GUID},
    ],
)
def test_option_that_only_a_pf_sets_on_a_scalable_function(
    ethernet: Node, option: dict[str, Any]
) -> None:
    _with_a_scalable_function(ethernet)
    (name,) = option
    assert _unfit(ethernet, "mlx5_core.sf.6", **option).message == (
        f'"{name}": device mlx5_core.sf.6 is no VF, and only a PF sets that for its VF: remove it'
    )


@pytest.mark.parametrize(
    ("option", "remedy"),
    [
        (
            {"vlan": 100},
            '"vlan": the link layer of device 0000:af:06.0 is InfiniBand, which has "p',
        ),
        ({"mac": "02:00:00:00:00:01"}, '"mac": the link layer of device 0000:af:06.0 is InfiniBan'),
        ({"ipam": {"type": "dhcp"}}, '"ipam.type": dhcp cannot serve InfiniBand: use "podfabric-'),
    ],
)
def test_option_of_ethernet_on_infiniband(
    infiniband: Node, option: dict[str, Any], remedy: str
) -> None:
    unfit = _unfit(infiniband, **option)
    assert (unfit.code, remedy in unfit.message) == (7, True)


@pytest.mark.parametrize("option", [{"guid": GUID}, {"pkey": "0x8001"}])
def test_option_of_infiniband_on_ethernet(ethernet: Node, option: dict[str, Any]) -> None:
    (name,) = option
    assert _unfit(ethernet, **option).message == (
        f'"{name}": the link layer of device {VF0} is Ethernet, which has none: remove it'
    )


def test_other_link_layer_is_named(ethernet: Node) -> None:
    ethernet.links["enp175s6"] = link("enp175s6", VF0, link_type=772)
    assert f'"enp175s6" of device {VF0} has link type loopback' in _unfit(ethernet).message


@pytest.mark.parametrize("guid", [ALL_ZERO, NONE])
def test_vf_without_a_valid_guid(infiniband: Node, guid: str) -> None:  # B3
    infiniband.links["ib1"] = ipoib("ib1", VF0, guid)
    unfit = _unfit(infiniband)
    assert unfit.code == 7
    assert f'VF {VF0} has no valid GUID ({guid}): set "guid", have ib-kub' in unfit.message


@pytest.mark.parametrize("guid", [ALL_ZERO, NONE])
def test_vf_without_a_valid_guid_is_fine_if_it_gets_one(infiniband: Node, guid: str) -> None:
    infiniband.links["ib1"] = ipoib("ib1", VF0, guid)
    found = _plan(infiniband, guid=GUID)
    record = record_of(found, _options(guid=GUID))
    assert record.applied is not None
    assert (record.applied.node_guid, record.applied.port_guid) == (GUID, GUID)


def test_valid_guid_is_kept_and_there_is_nothing_to_restore(infiniband: Node) -> None:  # B4
    found = _plan(infiniband)
    record = record_of(found, _options())
    assert record.before == record.applied
    assert record.before is not None
    assert record.before.port_guid == PORT_GUID  # of the interface: the kernel told none


def test_guid_that_the_kernel_tells_counts_more_than_the_interfaces(infiniband: Node) -> None:  # B2
    infiniband.vfs[0] = vf(0, node_guid=GUID, port_guid=GUID)
    found = _plan(infiniband).vf
    assert found is not None
    assert (found.node_guid, found.port_guid) == (GUID, GUID)


def test_rdma_devices_are_moved_only_if_asked_for(ethernet: Node) -> None:  # R3
    assert _plan(ethernet).rdma == ()
    (device,) = _plan(ethernet, **ISOLATED).rdma
    assert (device.index, device.name) == (2, "mlx5_2")


def test_rdma_isolation_in_shared_mode(ethernet: Node) -> None:  # R1
    ethernet.mode = "shared"
    unfit = _unfit(ethernet, **ISOLATED)
    assert unfit.code == 7
    assert '"rdmaIsolation": RDMA devices of this node are in shared mode: run `rd' in unfit.message


def test_rdma_isolation_on_a_kernel_without_rdma(
    ethernet: Node, monkeypatch: pytest.MonkeyPatch
) -> None:  # R1, R2
    def refuse(socket: object) -> str:
        raise HostError("no RDMA netlink")

    monkeypatch.setattr(rdma, "mode", refuse)
    assert _unfit(ethernet, **ISOLATED).message == '"rdmaIsolation": no RDMA netlink'


def test_rdma_isolation_of_a_device_without_rdma(ethernet: Node) -> None:  # R7
    unfit = _unfit(ethernet, VF1, **ISOLATED)
    assert f'"rdmaIsolation": device {VF1} has no RDMA device: load the driv' in unfit.message


def test_rdma_device_that_has_gone_meanwhile(ethernet: Node) -> None:
    ethernet.rdma.clear()
    unfit = _unfit(ethernet, **ISOLATED)
    assert (unfit.code, unfit.message) == (11, f"RDMA device mlx5_2 of {VF0} has gone")


def test_all_rdma_devices_of_a_function_are_moved(ethernet: Node) -> None:
    ethernet.tree.rdma(VF0, "mlx5_3")
    ethernet.rdma[5] = "mlx5_3"
    assert [device.name for device in _plan(ethernet, **ISOLATED).rdma] == ["mlx5_2", "mlx5_3"]


def test_soft_roce_is_made_anew_where_its_interface_is_and_never_isolated(ethernet: Node) -> None:
    ethernet.tree.soft_rdma("rxe0", "enp175s6")
    ethernet.rdma[5] = "rxe0"
    plan = _plan(ethernet)
    assert ([device.name for device in plan.soft], plan.rdma) == (["rxe0"], ())
    assert '"rdmaIsolation": RDMA device rxe0' in _unfit(ethernet, **ISOLATED).message


def test_scalable_functions_rdma_device(ethernet: Node) -> None:  # R4
    _with_a_scalable_function(ethernet)
    ethernet.tree.rdma("mlx5_core.sf.6", "mlx5_6")
    ethernet.rdma[6] = "mlx5_6"
    (device,) = _plan(ethernet, "mlx5_core.sf.6", **ISOLATED).rdma
    assert (device.index, device.name) == (6, "mlx5_6")


def test_pf_in_switchdev_mode_is_known_from_its_representors(ethernet: Node) -> None:
    tree: Tree = ethernet.tree
    tree.netdev(PF, "aaa_rep0", phys_port_name="pf0vf0")
    (tree.device(PF) / "net/enp175s0f1/phys_port_name").write_text("p0\n")
    ethernet.links["aaa_rep0"] = link("aaa_rep0", PF, flags=0)
    assert _plan(ethernet).vf == ethernet.vfs[0]
    assert _missing(ethernet) == []  # the representor is down, the PF is up


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


def test_master_that_is_no_interface_of_hardware(ethernet: Node) -> None:  # SU1
    ethernet.tree.netdev("", "br0")
    for name in ("br0", "enp175s0f2"):
        unfit = _no_candidate(ethernet, master=name)
        assert f"{name} is no interface of a PCI or auxiliary device" in unfit.message


def test_master_that_is_away_does_not_hide_the_next_one(ethernet: Node) -> None:
    assert _candidates(ethernet, master=["in0a0pod", "enp175s0f1"]) == [VF0, VF1]


def test_masters_without_a_free_vf_are_told_with_reasons(ethernet: Node) -> None:
    ethernet.tree.pf("0000:d8:00.0")
    ethernet.tree.netdev("0000:d8:00.0", "enp216s0")
    for address in (VF0, VF1):
        ethernet.tree.bound(address, "vfio-pci")
    unfit = _no_candidate(ethernet, master=["ens1", "enp216s0", "enp175s0f1"])
    assert unfit.code == 11
    assert unfit.message == (
        '"master": no device is free: ens1 has no VFs: write a number to its sriov_numvfs; '
        "enp216s0 cannot have VFs; none of the 2 VFs of enp175s0f1 has an interface's driver"
    )


def test_node_lacks_nothing(ethernet: Node) -> None:
    assert _missing(ethernet) == []
    assert _missing(ethernet, master="enp175s0f1", rdmaIsolation=True) == []
    assert _missing(ethernet, deviceID=VF0) == []


def test_pf_that_is_down(ethernet: Node) -> None:
    ethernet.links["enp175s0f1"] = link("enp175s0f1", PF, flags=0)
    down = ["the PF enp175s0f1 is down: ip link set enp175s0f1 up"]
    assert _missing(ethernet) == down
    assert _missing(ethernet, master="enp175s0f1") == down
    assert _missing(ethernet, deviceID=VF1) == down


def test_one_pf_that_is_ready_is_enough(ethernet: Node) -> None:
    ethernet.links["enp175s0f1"] = link("enp175s0f1", PF, flags=0)
    ethernet.tree.pf("0000:d8:00.0", totalvfs=2)
    ethernet.tree.netdev("0000:d8:00.0", "enp216s0")
    ethernet.tree.vf("0000:d8:00.0", "0000:d8:00.2")
    ethernet.links["enp216s0"] = link("enp216s0", "0000:d8:00.0")
    assert _missing(ethernet) == []


def test_pf_that_is_away(ethernet: Node) -> None:
    del ethernet.links["enp175s0f1"]
    assert _missing(ethernet) == [f"the PF {PF} has no interface on the host"]


def test_master_without_vfs(ethernet: Node) -> None:
    no_vfs = ["the PF 0000:05:00.0 has no VFs: write a number to its sriov_numvfs"]
    assert _missing(ethernet, master="ens1") == no_vfs
    assert _missing(ethernet, master="ens1", pfOnly=True) == []


def test_node_without_vfs(ethernet: Node) -> None:
    (ethernet.tree.device(PF) / "sriov_numvfs").write_text("0\n")
    assert _missing(ethernet) == [
        "this node has no VFs: write a number to sriov_numvfs of a PF",
    ]


def test_wrong_mode_is_told_with_all_else_that_is_missing(ethernet: Node) -> None:
    ethernet.mode = "shared"
    ethernet.links["enp175s0f1"] = link("enp175s0f1", PF, flags=0)
    isolation, down = _missing(ethernet, rdmaIsolation=True)
    assert "are in shared mode: run `rdma system set netns exclusive` before any pod" in isolation
    assert down == "the PF enp175s0f1 is down: ip link set enp175s0f1 up"


def test_status_names_the_master_that_is_not_there(ethernet: Node) -> None:
    (reason,) = _missing(ethernet, master="enp175s0f2")
    assert "enp175s0f2" in reason


def test_scalable_function_needs_no_vfs(ethernet: Node) -> None:
    _with_a_scalable_function(ethernet)
    assert _missing(ethernet, deviceID="mlx5_core.sf.6") == []


def test_zeros_of_the_interface_are_no_guid_to_go_back_to(infiniband: Node) -> None:  # B11
    infiniband.links["ib1"] = ipoib("ib1", VF0, ALL_ZERO)
    found = _plan(infiniband, guid=GUID).vf
    assert found is not None
    assert (found.node_guid, found.port_guid) == (None, None)  # which goes back as all FF


def test_guid_that_the_last_pod_had_is_none_of_the_next_ones(infiniband: Node) -> None:
    infiniband.vfs[0] = vf(0, node_guid=NONE, port_guid=NONE)  # as the last DEL has set it
    infiniband.links["ib1"] = ipoib("ib1", VF0, GUID)  # the driver was not bound since
    assert "has no valid GUID" in _unfit(infiniband).message
