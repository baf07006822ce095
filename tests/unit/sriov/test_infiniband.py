"""The order in which a device moves into the pod, and VFs that are rebound for their GUID.

The node is made up: what the kernel would do of its own is done by the tests, and what
`cni.sriov.interface` does is read off the node's calls.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import msgspec
import pytest

from cni.attachments.journal import Journal, JournalEntry, Phase
from cni.spec.attachment import Attachment
from cni.spec.config import decode
from cni.spec.errors import CNIError
from cni.spec.request import Request
from cni.spec.result import Result
from cni.sriov import guids, interface, options, vf_release
from cni.sriov.device_record import DeviceRecord, record_of
from cni.sriov.interface import Placed
from cni.sriov.plan import DevicePlan, guid_of, plan_of
from host import netdev_move
from host.errors import HostError
from host.namespaces import NetworkNamespace
from host.netlink import rdma, vfs
from host.netlink.links import Link
from tests.unit.sriov.node import (
    BOOT,
    HOST,
    NAMESPACE,
    PF,
    POD,
    PORT_GUID,
    VF0,
    VF1,
    Node,
    ipoib,
    link,
    vf,
)

GUID = "02:00:00:00:00:00:00:ab"
ATTACHMENT = Attachment("fabric", "c1", "net1")
UNBIND, BIND = f"unbind {VF0} from mlx5_core", f"bind {VF0} to mlx5_core"


def _planned(node: Node, address: str = VF0, **config: Any) -> tuple[DevicePlan, DeviceRecord]:  # noqa: ANN401
    document = decode(msgspec.json.encode({"type": "sriov", "deviceID": address} | config))
    wanted = options.read(Request(command="ADD", config=document))
    plan = plan_of(HOST, node.paths, address, wanted)
    return plan, record_of(plan, wanted)


def _placed(node: Node, address: str = VF0, **config: Any) -> Placed:  # noqa: ANN401
    plan, record = _planned(node, address, **config)
    if guids.needs_binding(plan.link, record):
        plan, record = guids.rebind(HOST, node.paths, plan, record)
    return interface.place(HOST, POD, NAMESPACE, node.paths, ATTACHMENT, plan, record, Result())


def _binds_with_guid(node: Node, guid: str = GUID, uverbs: str = "uverbs1") -> None:
    """Let mlx5 create the VF's interface and uverbs device again when it is bound."""

    def bound() -> None:
        node.links["ib1"] = ipoib("ib1", VF0, guid, index=30)
        entry = node.paths.sys / "class/infiniband_verbs/uverbs1"
        if uverbs != "uverbs1":
            entry.unlink()
            node.tree.uverbs(uverbs, "mlx5_1")

    node.rebound = bound  # type: ignore[method-assign]


def test_guid_that_the_interface_has_already_needs_no_binding(infiniband: Node) -> None:  # B4
    _placed(infiniband)
    _placed(infiniband, guid=PORT_GUID)
    assert infiniband.calls == ["interface ib1, index 12, to the pod as net1", "net1 up"] * 2


def test_driver_is_rebound_for_another_guid(infiniband: Node) -> None:  # B2
    _binds_with_guid(infiniband)
    placed = _placed(infiniband, guid=GUID)
    assert infiniband.calls == [
        UNBIND,
        BIND,
        "interface ib1, index 30, to the pod as net1",
        "net1 up",
    ]
    assert placed.mac == ipoib("ib1", VF0, GUID).mac
    assert (placed.mtu, placed.bdf) == (2044, VF0)


def test_interface_that_does_not_come_back_is_named(
    infiniband: Node, monkeypatch: pytest.MonkeyPatch
) -> None:  # B7
    monkeypatch.setattr(guids, "APPEARANCE", 0.05)
    infiniband.rebound = lambda: infiniband.links.pop("ib1")  # type: ignore[assignment, method-assign]
    with pytest.raises(HostError, match=f'"ib1" of device {VF0} did not return to the host'):
        _placed(infiniband, guid=GUID)
    assert infiniband.calls == [UNBIND, BIND]


def test_binding_that_failed_is_undone(infiniband: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    _binds_with_guid(infiniband, uverbs="uverbs7")
    infiniband.vfs[0] = vf(0, mac=infiniband.links["ib0"].mac)
    _, record = _planned(infiniband, guid=GUID)
    with pytest.raises(CNIError):
        _placed(infiniband, guid=GUID)
    infiniband.vfs[0] = vf(0, mac=infiniband.links["ib0"].mac, node_guid=GUID, port_guid=GUID)
    infiniband.links["ib1"] = ipoib("ib1", VF0, GUID, index=30)
    infiniband.calls.clear()
    _binds_with_guid(infiniband, PORT_GUID)
    brought: list[str] = []

    @contextmanager
    def no_namespace(request: Request, entry: JournalEntry) -> Iterator[list[NetworkNamespace]]:
        yield []

    def restore(*arguments: object) -> bool:
        brought.append(str(arguments[2]))
        return True

    def set_guids(route: object, pf: Link, index: int, node: str | None, port: str | None) -> None:
        brought.append(f"VF {index} of {pf.name}: {node} {port}")

    monkeypatch.setattr(vf_release, "netlink", lambda: nullcontext(HOST))
    monkeypatch.setattr(vf_release, "namespaces_of", no_namespace)
    monkeypatch.setattr(netdev_move, "restore", restore)
    monkeypatch.setattr(netdev_move, "find", lambda *arguments: infiniband.links["ib1"])
    monkeypatch.setattr(vfs, "set_guids", set_guids)
    journal = Journal(infiniband.paths)
    entry = JournalEntry(
        plugin="sriov",
        network="fabric",
        container_id="c1",
        ifname="net1",
        netns="",
        netns_identity="cookie:1",
        boot_id=BOOT,
        phase=Phase.ADDING,
        device=VF0,
        undo=msgspec.Raw(msgspec.json.encode(record)),
    )
    journal.write(entry)
    request = Request(command="DEL")
    vf_release.release(journal, infiniband.paths, ATTACHMENT, request, entry)
    # The interface has the host's GUID again, so that the next pod does not find this one's.
    assert brought == ["net1", f"VF 0 of ib0: {PORT_GUID} {PORT_GUID}", "ib1"]
    assert infiniband.calls == [UNBIND, BIND]
    assert guid_of(infiniband.links["ib1"]) == PORT_GUID
    left = journal.read(ATTACHMENT)
    assert left is not None
    assert left.device == ""


def test_uverbs_that_are_gone_after_the_binding_are_an_error(infiniband: Node) -> None:
    def bound() -> None:
        infiniband.links["ib1"] = ipoib("ib1", VF0, GUID, index=30)
        (infiniband.paths.sys / "class/infiniband_verbs/uverbs1").unlink()

    infiniband.rebound = bound  # type: ignore[method-assign]
    with pytest.raises(CNIError, match="before: uverbs1, now: no uverbs device"):
        _placed(infiniband, guid=GUID)


def test_vf_of_vfio_gets_its_guid_from_the_pf_alone(infiniband: Node) -> None:  # B8
    _, record = _planned(infiniband, VF1, guid=GUID)
    assert record.applied is not None
    assert record.applied.port_guid == GUID
    placed = _placed(infiniband, VF1, guid=GUID)
    assert infiniband.calls == []
    assert placed == Placed(mac="", mtu=2044, bdf=VF1, answer=Result())


@pytest.mark.parametrize(
    ("mac", "told"), [("02:11:22:33:aa:bc", "02:11:22:33:aa:bc"), ("00:00:00:00:00:00", "")]
)
def test_vf_of_vfio_on_ethernet_has_the_address_that_its_pf_shows(
    ethernet: Node, mac: str, told: str
) -> None:  # SC19, SC20, SM11
    ethernet.tree.bound(VF1, "vfio-pci")
    ethernet.links["enp175s0f1"] = link("enp175s0f1", PF, mtu=9000)
    ethernet.vfs[1] = vf(1, mac=mac)
    assert _placed(ethernet, VF1) == Placed(mac=told, mtu=9000, bdf=VF1, answer=Result())
    assert _placed(ethernet, VF1, mac="02:00:00:00:00:01").mac == "02:00:00:00:00:01"  # SC17
    assert ethernet.calls == []


def test_rdma_device_of_ethernet_moves_after_the_interface(ethernet: Node) -> None:
    _placed(ethernet, rdmaIsolation=True)
    assert ethernet.calls == [
        "interface enp175s6, index 10, to the pod as net1",
        "net1 up",
        "RDMA device mlx5_2 to the pod",
    ]
    assert ethernet.rdma_in_pod == {2: "mlx5_2"}


def test_rdma_device_that_has_gone_is_named_and_the_interface_stays(infiniband: Node) -> None:
    plan, record = _planned(infiniband, rdmaIsolation=True)
    del infiniband.rdma[1]
    with pytest.raises(HostError, match="RDMA device mlx5_1 has gone from the host"):
        interface.place(HOST, POD, NAMESPACE, infiniband.paths, ATTACHMENT, plan, record, Result())
    assert infiniband.calls == []


def test_interface_that_does_not_reappear_with_its_rdma_device_is_named(
    infiniband: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guids, "APPEARANCE", 0.05)
    with pytest.raises(HostError, match=f'"ib1" of device {VF0} did not return'):
        _placed(infiniband, rdmaIsolation=True)


def test_address_that_shows_late_is_waited_for(
    ethernet: Node, monkeypatch: pytest.MonkeyPatch
) -> None:  # SU8, SM2
    shown = iter(["02:11:22:33:aa:bb", "02:00:00:00:00:01"])
    monkeypatch.setattr(
        "host.netlink.links.by_index", lambda route, index: link("net1", VF0, mac=next(shown))
    )
    placed = _placed(ethernet, mac="02:00:00:00:00:01")
    assert placed.mac == "02:00:00:00:00:01"
    assert next(shown, None) is None


def test_address_that_never_shows_is_an_error(
    ethernet: Node, monkeypatch: pytest.MonkeyPatch
) -> None:  # SU7, SM3
    monkeypatch.setattr(interface, "MAC_TIME", 0.05)
    with pytest.raises(HostError) as caught:
        _placed(ethernet, mac="02:00:00:00:00:01")
    expected = (
        '"net1" still has MAC address 02:11:22:33:aa:bb, although 02:00:00:00:00:01 was set: '
    )
    assert str(caught.value).startswith(expected)
    assert "net1 up" not in ethernet.calls


def test_node_without_rdma_netlink_is_not_asked_for_it(
    ethernet: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(*arguments: object) -> None:
        raise HostError("opening an RDMA netlink socket: Protocol not supported")

    plan, record = _planned(ethernet)
    bare = msgspec.structs.replace(record, rdma=())
    monkeypatch.setattr(rdma, "rdma", absent)
    interface.place(HOST, POD, NAMESPACE, ethernet.paths, ATTACHMENT, plan, bare, Result())
    assert ethernet.calls[-1] == "net1 up"


def test_settings_are_restored_by_address_if_the_vfs_number_changed(
    ethernet: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VFs that were created again may have other numbers, and this number is another pod's."""
    _, record = _planned(ethernet, vlan=100)
    (ethernet.tree.device(PF) / "virtfn0").rename(ethernet.tree.device(PF) / "virtfn5")
    ethernet.vfs = {5: vf(5, vlan=100), 0: vf(0, vlan=100)}
    written: list[tuple[int, int]] = []
    monkeypatch.setattr(
        vfs, "set_vlan", lambda route, pf, index, vlan, *rest: written.append((index, vlan))
    )
    vf_release.restore_settings(ethernet.paths, HOST, record)
    assert written == [(5, 0)]
