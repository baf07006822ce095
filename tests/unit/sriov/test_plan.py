"""The plan of a device before an ADD, and every reason to refuse it."""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from cni.attachments.journal import Journal, JournalEntry
from cni.rdma.plugin import Rdma
from cni.spec.attachment import Attachment
from cni.spec.config import decode
from cni.spec.errors import CNIError, Code
from cni.spec.request import Request
from cni.sriov import interface
from cni.sriov.device_record import record_of
from cni.sriov.options import SriovOptions
from cni.sriov.plan import DevicePlan, DeviceUnfit, plan_of
from host.errors import HostError, LinkMissing
from host.netlink import rdma
from tests.unit.sriov import configuration
from tests.unit.sriov.node import HOST, PF, PORT_GUID, VF0, VF1, Node, ipoib, link, vf

GUID = "02:00:00:00:00:00:00:ab"
NODE_GUID = "11:22:33:00:00:aa:bb:c0"
NONE, ALL_ZERO = "ff:ff:ff:ff:ff:ff:ff:ff", "00:00:00:00:00:00:00:00"
ISOLATED: dict[str, Any] = {"rdmaIsolation": True}


def _options(address: str = VF0, **config: Any) -> SriovOptions:  # noqa: ANN401
    return configuration.read(deviceID=address, **config)


def _plan(node: Node, address: str = VF0, **config: Any) -> DevicePlan:  # noqa: ANN401
    return plan_of(HOST, node.paths, address, _options(address, **config))


def _unfit(node: Node, address: str = VF0, **config: Any) -> DeviceUnfit:  # noqa: ANN401
    with pytest.raises(DeviceUnfit) as caught:
        _plan(node, address, **config)
    return caught.value


def test_vf_is_planned_with_interface_and_pf_settings(ethernet: Node) -> None:  # SC16, SM15
    plan = _plan(ethernet)
    assert (plan.function.pf, plan.function.index) == (PF, 0)
    assert (plan.link, plan.vf) == (ethernet.links["enp175s6"], ethernet.vfs[0])
    assert (plan.infiniband, plan.rdma) == (False, ())
    assert _plan(ethernet, VF1).vf == ethernet.vfs[1]


@pytest.mark.parametrize("address", ["0000:af:06.3", "0000:af:07.0", "mlx5_core.sf.6"])
def test_missing_device(ethernet: Node, address: str) -> None:  # SC2, SC16, B14, SU3
    unfit = _unfit(ethernet, address)
    assert unfit.code == 7
    assert f'device "{address}" is not on this node: check that "deviceID"' in unfit.message


def test_vf_that_the_host_uses_is_refused_also_by_its_id(ethernet: Node) -> None:
    ethernet.addresses["enp175s6"] = ["192.0.2.7/24", "198.51.100.0/24"]
    unfit = _unfit(ethernet)
    assert unfit.code == 7
    assert f'the host uses "enp175s6" of device {VF0} (192.0.2.7' in unfit.message
    assert "`ip address flush dev enp175s6; ip route flush dev enp175s6`" in unfit.message


def test_interface_that_the_kernel_does_not_know_of_may_be_in_a_pod(ethernet: Node) -> None:  # SM8
    del ethernet.links["enp175s6"]
    unfit = _unfit(ethernet)
    assert unfit.code == 11
    assert f"device {VF0} (driver mlx5_core) has no interface on the host: try" in unfit.message


def test_interface_of_infiniband_that_is_away(infiniband: Node) -> None:  # B6
    del infiniband.links["ib1"]
    assert f"device {VF0} (driver mlx5_core) has no interface" in _unfit(infiniband).message


def test_interface_of_another_device_with_the_name_is_refused(ethernet: Node) -> None:
    ethernet.links["enp175s6"] = link("enp175s6", VF1)
    assert "has no interface on the host" in _unfit(ethernet).message


def test_child_interface_is_not_the_devices_interface(infiniband: Node) -> None:
    infiniband.links["ib1"] = ipoib("ib1", VF0, parent=3)
    assert "has no interface on the host" in _unfit(infiniband).message


def test_device_without_driver(ethernet: Node) -> None:
    ethernet.tree.bound(VF0, "")
    ethernet.links.clear()
    unfit = _unfit(ethernet)
    assert unfit.code == 7
    assert f"device {VF0} has no driver: bind a network driver, or vfio-pci" in unfit.message


def test_pf_without_interface_on_the_host_is_named(ethernet: Node) -> None:
    del ethernet.links["enp175s0f1"]
    with pytest.raises(LinkMissing, match=f"PF {PF} has no interface on the host: bind the PF to"):
        _plan(ethernet)


@pytest.mark.parametrize(("address", "is_vf"), [(VF0, True), (VF1, True), (PF, False)])
def test_kind_of_device_decides(infiniband: Node, address: str, is_vf: bool) -> None:  # B14
    if is_vf:
        assert _plan(infiniband, address).vf is not None
    else:
        assert f'device {PF} is not a VF: set "pfOnly": true to' in _unfit(infiniband, PF).message


@pytest.mark.parametrize("mode", [{}, {"vfioPciMode": True}, {"vfioPciMode": False}])
def test_vf_on_vfio_has_no_interface(infiniband: Node, mode: dict[str, bool]) -> None:  # B8, B15
    plan = _plan(infiniband, VF1, **mode)
    assert (plan.function.driver, plan.link, plan.infiniband) == ("vfio-pci", None, False)
    assert plan.vf == infiniband.vfs[1]


def test_vfio_mode_of_a_device_with_another_driver(infiniband: Node) -> None:  # B15
    assert _unfit(infiniband, vfioPciMode=True).message == (
        f'"vfioPciMode" is true, but device {VF0} has driver "mlx5_core": bind vfio-pci first'
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
        f'"{name}" needs an interface, but device {VF1} with driver vfio-pci has none: remove '
        "the key"
    )


def test_whole_pf(ethernet: Node) -> None:
    ethernet.links["ens1"] = link("ens1", "0000:05:00.0")
    plan = _plan(ethernet, "0000:05:00.0", pfOnly=True, mtu=9000)
    assert (plan.link, plan.vf) == (ethernet.links["ens1"], None)


def test_whole_pf_that_has_vfs(ethernet: Node) -> None:
    assert _unfit(ethernet, PF, pfOnly=True).message == (
        f'"pfOnly": the PF {PF} has VFs: write 0 to its sriov_numvfs first'
    )


def test_vf_where_the_whole_pf_is_asked_for(ethernet: Node) -> None:
    assert f'"pfOnly": {VF0} is a VF of {PF}: remove' in _unfit(ethernet, pfOnly=True).message


def test_scalable_function_has_an_interface_and_its_own_address(ethernet: Node) -> None:
    ethernet.with_a_scalable_function()
    plan = _plan(ethernet, "mlx5_core.sf.6", mac="02:00:00:00:00:01")
    assert (plan.vf, plan.link) == (None, ethernet.links["enp175s0f1s0"])
    record = record_of(plan, _options("mlx5_core.sf.6", mac="02:00:00:00:00:01"))
    assert (record.mac, record.before, record.pf) == ("02:00:00:00:00:01", None, "")
    assert record.segment == PF  # all scalable functions of a port are on one link


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
    ethernet.with_a_scalable_function()
    (name,) = option
    assert _unfit(ethernet, "mlx5_core.sf.6", **option).message == (
        f'"{name}" is an option for VFs, but device mlx5_core.sf.6 is not a VF: remove the key'
    )


@pytest.mark.parametrize(
    ("option", "remedy"),
    [
        ({"vlan": 100}, 'InfiniBand: remove the option and use "pkey"'),
        ({"mac": "02:00:00:00:00:01"}, 'InfiniBand: remove the option and use "guid"'),
        ({"spoofchk": "off"}, '"spoofchk" is an option for Ethernet, but the link layer of '),
        ({"trust": "on"}, "but the link layer of device 0000:af:06.0 is InfiniBand: "),
        ({"min_tx_rate": 1}, "is InfiniBand: remove the option"),
        ({"max_tx_rate": 5}, '"max_tx_rate" is an option for Ethernet, but the link layer'),
        (
            {"ipam": {"type": "dhcp"}},
            '"ipam.type": the dhcp plugin cannot serve InfiniBand: use "podfabric-',
        ),
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
        f'"{name}" is an option for InfiniBand, but the link layer of device {VF0} is Ethernet: '
        "remove the option"
    )


def test_other_link_layer_is_named(ethernet: Node) -> None:
    ethernet.links["enp175s6"] = link("enp175s6", VF0, link_type=772)
    assert f'"enp175s6" of device {VF0} has link type loopback' in _unfit(ethernet).message


@pytest.mark.parametrize("guid", [ALL_ZERO, NONE])
def test_vf_without_a_valid_guid(infiniband: Node, guid: str) -> None:  # B3
    infiniband.links["ib1"] = ipoib("ib1", VF0, guid)
    unfit = _unfit(infiniband)
    assert unfit.code == 7
    assert f'VF {VF0} has no valid GUID ({guid}): set "guid", use ib-' in unfit.message


@pytest.mark.parametrize("guid", [ALL_ZERO, NONE])
def test_vf_without_a_valid_guid_is_fine_if_it_gets_one(infiniband: Node, guid: str) -> None:
    infiniband.links["ib1"] = ipoib("ib1", VF0, guid)
    plan = _plan(infiniband, guid=GUID)
    record = record_of(plan, _options(guid=GUID))
    assert record.applied is not None
    assert (record.applied.node_guid, record.applied.port_guid) == (GUID, GUID)


def test_valid_guid_is_kept_and_there_is_nothing_to_restore(infiniband: Node) -> None:  # B4
    plan = _plan(infiniband)
    record = record_of(plan, _options())
    assert record.before == record.applied
    assert record.before is not None
    assert record.before.port_guid == PORT_GUID  # of the interface: the kernel told none


def test_guid_that_the_kernel_tells_counts_more_than_the_interfaces(infiniband: Node) -> None:  # B2
    infiniband.vfs[0] = vf(0, node_guid=GUID, port_guid=GUID)
    planned = _plan(infiniband).vf
    assert planned is not None
    assert (planned.node_guid, planned.port_guid) == (GUID, GUID)


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ({}, (NODE_GUID, PORT_GUID)),
        ({"node_guid": GUID}, (GUID, PORT_GUID)),
        ({"port_guid": GUID}, (NODE_GUID, GUID)),
    ],
)
def test_guid_that_the_kernel_does_not_tell_is_the_one_that_the_driver_has_read(
    infiniband: Node, told: dict[str, str], found: tuple[str, str]
) -> None:
    """Each of the two: a PF reports its settings."""
    device = infiniband.paths.sys / "class/infiniband/mlx5_1"
    (device / "node_guid").write_text("1122:3300:00aa:bbc0\n")
    infiniband.vfs[0] = vf(0, **told)
    planned = _plan(infiniband).vf
    assert planned is not None
    assert (planned.node_guid, planned.port_guid) == found


def test_rdma_devices_are_moved_only_if_asked_for(ethernet: Node) -> None:  # R3
    assert _plan(ethernet).rdma == ()
    (device,) = _plan(ethernet, **ISOLATED).rdma
    assert (device.index, device.name) == (2, "mlx5_2")


def test_rdma_isolation_in_shared_mode(ethernet: Node) -> None:  # R1
    ethernet.mode = "shared"
    unfit = _unfit(ethernet, **ISOLATED)
    assert unfit.code == 7
    assert '"rdmaIsolation": RDMA devices of this node are in shared mode: run `rd' in unfit.message
    assert unfit.message.endswith(' and reboot, or remove "rdmaIsolation"')


def test_plugin_rdma_in_shared_mode(ethernet: Node) -> None:
    """The plugin has no option "rdmaIsolation"."""
    ethernet.mode = "shared"
    with pytest.raises(
        CNIError, match=r'^plugin "rdma": RDMA .* or remove plugin "rdma"$'
    ) as unfit:
        Rdma(ethernet.paths).status(Request(command="STATUS"))
    assert unfit.value.code == Code.UNAVAILABLE


def test_rdma_isolation_on_a_kernel_without_rdma(
    ethernet: Node, monkeypatch: pytest.MonkeyPatch
) -> None:  # R1, R2
    def refuse(socket: object) -> str:
        raise HostError("no RDMA netlink")

    monkeypatch.setattr(rdma, "mode", refuse)
    assert _unfit(ethernet, **ISOLATED).message == '"rdmaIsolation": no RDMA netlink'


def test_rdma_isolation_of_a_device_without_rdma(ethernet: Node) -> None:  # R7
    unfit = _unfit(ethernet, VF1, **ISOLATED)
    assert unfit.code == 7  # another try cannot help
    assert f'"rdmaIsolation": device {VF1} has no RDMA device: load the driv' in unfit.message


def test_rdma_isolation_of_a_device_whose_rdma_device_is_in_a_pod(ethernet: Node) -> None:
    """Its uverbs device is visible in every namespace."""
    entry = ethernet.tree.device(VF1) / "infiniband_verbs/uverbs9"
    entry.mkdir(parents=True)
    (entry / "ibdev").write_text("mlx5_9\n")
    unfit = _unfit(ethernet, VF1, **ISOLATED)
    assert (unfit.code, "RDMA device mlx5_9 of" in unfit.message) == (11, True)


def test_rdma_device_that_has_gone_meanwhile(ethernet: Node) -> None:
    ethernet.rdma.clear()
    unfit = _unfit(ethernet, **ISOLATED)
    assert (unfit.code, unfit.message) == (
        11,
        f"RDMA device mlx5_2 of {VF0} has gone from the host: try again",
    )


def test_all_rdma_devices_of_a_function_are_moved(ethernet: Node) -> None:
    ethernet.tree.rdma(VF0, "mlx5_3")
    ethernet.rdma[5] = "mlx5_3"
    assert [device.name for device in _plan(ethernet, **ISOLATED).rdma] == ["mlx5_2", "mlx5_3"]


def test_soft_roce_which_a_move_would_destroy_is_in_the_way(ethernet: Node) -> None:
    ethernet.tree.soft_rdma("rxe0", "enp175s6")
    for config in ({}, ISOLATED):
        assert "run `rdma link delete rxe0` first" in _unfit(ethernet, **config).message


def test_scalable_functions_rdma_device(ethernet: Node) -> None:  # R4
    ethernet.with_a_scalable_function()
    ethernet.tree.rdma("mlx5_core.sf.6", "mlx5_6")
    ethernet.rdma[6] = "mlx5_6"
    (device,) = _plan(ethernet, "mlx5_core.sf.6", **ISOLATED).rdma
    assert (device.index, device.name) == (6, "mlx5_6")


def test_pf_in_switchdev_mode_is_distinguished_from_representors(ethernet: Node) -> None:
    ethernet.in_switchdev_mode()
    assert _plan(ethernet).vf == ethernet.vfs[0]


def test_guid_of_zeros_is_not_restored(infiniband: Node) -> None:  # B11
    infiniband.links["ib1"] = ipoib("ib1", VF0, ALL_ZERO)
    planned = _plan(infiniband, guid=GUID).vf
    assert planned is not None
    assert (planned.node_guid, planned.port_guid) == (None, None)  # which goes back as all FF


def test_guid_of_the_last_pod_is_not_kept_for_the_next(infiniband: Node) -> None:
    infiniband.vfs[0] = vf(0, node_guid=NONE, port_guid=NONE)  # as the last DEL has set it
    infiniband.links["ib1"] = ipoib("ib1", VF0, GUID)  # the driver was not bound since
    assert "has no valid GUID" in _unfit(infiniband).message


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"pf": "0000:af:00.0"}, f'PF of device {VF0} is "{PF}", but the ADD set "0000:af:00.0"'),
        ({"applied": vf(1)}, f'VF number of device {VF0} is "0", but the ADD set "1"'),
    ],
)
def test_check_names_what_has_changed_of_a_vf(
    ethernet: Node, changes: dict[str, Any], text: str
) -> None:
    pod_interface = {"name": "net1", "sandbox": "/n"}
    config = {
        "cniVersion": "1.0.0",
        "name": "n",
        "type": "sriov",
        "prevResult": {"cniVersion": "1.0.0", "interfaces": [pod_interface], "ips": []},
    }
    request = Request(
        command="CHECK",
        container_id="c1",
        ifname="net1",
        netns="/n",
        network="n",
        cni_version="1.0.0",
        config=decode(json.dumps(config).encode()),
    )
    record = replace(record_of(_plan(ethernet), _options()), **changes)
    journal = Journal(ethernet.paths)
    journal.write(JournalEntry.begun("sriov", request, None, "boot", record))
    with pytest.raises(CNIError) as caught:
        interface.check(journal, ethernet.paths, Attachment.of(request), request)
    assert (caught.value.code, caught.value.message) == (Code.CHECK_FAILED, text)
