"""DEL removes everything of an attachment that ipoib-cni, sriov-cni or ib-sriov-cni made."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kernel import cards, infiniband_vfs
from tests.kernel.cards import Card
from tests.kernel.pods import IP, Node, Reply, SriovNode, link_in, link_names, pod, run
from tests.waiting import until

OLD = "02:00:00:00:be:ef"  # a tenant's address
TENANT = ("vlan", "100", "spoofchk", "off", "trust", "on", "max_tx_rate", "100", "mac", OLD)
SETTINGS: dict[str, Any] = {
    "vlan": 100,
    "vlanQoS": 0,
    "vlanProto": "802.1q",
    "spoofchk": "off",
    "trust": "on",
    "max_tx_rate": 100,
    "MAC": OLD,
}


def _result(netns: str, mac: str = "") -> Reply:
    """The result of these plugins, as a runtime passes it to the DEL."""
    interface = {"name": "net1", "mac": mac, "sandbox": f"/var/run/netns/{netns}"}
    return Reply(0, {"cniVersion": "1.1.0", "interfaces": [interface]})


def _inside(netns: str, *arguments: str) -> None:
    run(IP, "-n", netns, "link", *arguments)


def _made_by_ipoib_cni(netns: str, name: str = "net1") -> str:
    """Make a child of ib0 in the pod, as ipoib-cni does; returns its address."""
    run(IP, "link", "add", "veth12345678", "link", "ib0", "type", "ipoib", "pkey", "0x7fff")
    run(IP, "link", "set", "veth12345678", "netns", netns)
    _inside(netns, "set", "veth12345678", "name", name, "up")
    link = link_in(netns, name)
    assert link is not None
    return link.mac


@pytest.fixture
def fabric() -> Iterator[None]:
    before = link_names()
    yield
    until(lambda: link_names() == before, what="no stray interface")


def test_child_of_ipoib_cni_is_deleted_in_the_pod(
    node: Node, pods: list[str], fabric: None
) -> None:
    mac = _made_by_ipoib_cni(pods[0])
    _inside(pods[0], "set", "net1", "down")
    _inside(pods[0], "set", "net1", "name", "renamed")
    node.delete("c1", pods[0], previous=_result(pods[0], mac))
    assert link_names(pods[0]) == {"lo"}
    assert node.leftovers() == []
    node.delete("c1", pods[0], previous=_result(pods[0], mac))


def test_child_of_ipoib_cni_is_deleted_by_name_in_versions_without_results(
    node: Node, pods: list[str], fabric: None
) -> None:
    for version, expected in (("1.1.0", {"lo", "net1"}), ("0.3.1", {"lo"})):
        if version == "1.1.0":  # without a result there was no ADD
            _made_by_ipoib_cni(pods[0])
        node.delete("c1", pods[0], cniVersion=version)
        assert link_names(pods[0]) == expected


@pytest.mark.parametrize("path", ["pod", ""])
def test_child_of_ipoib_cni_that_came_back_from_a_dead_namespace_is_deleted(
    node: Node, fabric: None, path: str
) -> None:
    before = link_names()
    with pod("dies") as netns:
        mac = _made_by_ipoib_cni(netns)
    if not path:  # containerd passes no path later
        until(lambda: link_names() - before, what="the child on the host")
    node.delete("c1", "dies" if path else "", previous=_result("dies", mac))
    assert link_names() == before
    assert node.leftovers() == []


def test_children_that_ipoib_cni_did_not_make_for_this_pod_stay(
    node: Node, pods: list[str], fabric: None
) -> None:
    ours = node.add("c2", pods[1])
    _inside(pods[1], "set", "net1", "alias", "erased")
    mac = _made_by_ipoib_cni(pods[1], "net2")
    for previous in (_result(pods[1], str(ours.interface["mac"])), None):
        node.delete("c1", pods[1], previous=previous, cniVersion="1.1.0" if previous else "0.3.1")
    node.delete("c1", pods[0], previous=_result(pods[0], mac))
    assert link_names(pods[1]) == {"lo", "net1", "net2"}
    node.delete("c2", pods[1])


@pytest.fixture
def move(sriov: SriovNode, tmp_path: Path) -> SriovNode:
    """The plugin on a node that has files of sriov-cni and ib-sriov-cni."""
    sriov.paths = type(sriov.paths)(
        run=tmp_path / "run", state=tmp_path / "state", cni_state=tmp_path / "cni"
    )
    for directory in ("sriov/pci", "ib-sriov"):
        (tmp_path / "cni" / directory).mkdir(parents=True)
    return sriov


def _kept(node: SriovNode) -> list[str]:
    return sorted(path.name for path in node.paths.cni_state.rglob("*") if path.is_file())


def _made_by_sriov_cni(node: SriovNode, card: Card, netns: str, container: str = "c1") -> None:
    """Move VF 0 into the pod with a tenant's settings, and write the files, as sriov-cni does."""
    name = card.netdev(0)
    shown = cards.shown(card.pf, 0)
    link = Path("/sys/class/net", name)
    origin = {
        "HostIFName": name,
        "SpoofChk": shown["spoofchk"],
        "Trust": shown["trust"],
        "AdminMAC": shown["address"],
        "EffectiveMAC": (link / "address").read_text().strip(),
        "Vlan": 0,
        "VlanQoS": 0,
        "VlanProto": 0x8100,
        "MinTxRate": 0,
        "MaxTxRate": 0,
        "LinkState": 0,
        "MTU": int((link / "mtu").read_text()),
    }
    written = {"OrigVfState": origin, "Master": card.pf, "MTU": 1500, "VFID": 0}
    written |= {"deviceID": card.vfs[0], "type": "sriov", "name": "fabric"} | SETTINGS
    (node.paths.cni_state / "sriov" / f"{container}-net1").write_text(json.dumps(written))
    in_use = node.paths.cni_state / "sriov/pci" / card.vfs[0]
    in_use.write_text(f"/var/run/netns/{netns}")
    run(IP, "link", "set", card.pf, "vf", "0", *TENANT)
    run(IP, "link", "set", name, "netns", netns)
    _inside(netns, "set", name, "name", "net1")
    _inside(netns, "set", "net1", "address", OLD)
    _inside(netns, "set", "net1", "mtu", "1400", "promisc", "on", "txqueuelen", "500", "up")


@pytest.fixture
def unchanged(card: Card) -> Iterator[None]:
    run(IP, "link", "set", card.netdev(0), "down")
    before = cards.snapshot()
    yield
    assert cards.snapshot() == before


Ending = Callable[[str], object]


def _nothing(netns: str) -> None:
    pass


def _renames(netns: str) -> None:
    _inside(netns, "set", "net1", "down")
    _inside(netns, "set", "net1", "name", "hidden", "alias", "podfabric:" + 32 * "0")


def _dies(netns: str) -> None:
    run(IP, "netns", "delete", netns)


@pytest.mark.parametrize(
    ("ending", "path"), [(_nothing, "pod"), (_renames, "pod"), (_dies, "pod"), (_dies, "")]
)
def test_vf_of_sriov_cni_is_restored(
    move: SriovNode, card: Card, unchanged: None, ending: Ending, path: str
) -> None:
    with pod("former") as netns:
        _made_by_sriov_cni(move, card, netns)
        ending(netns)
        move.delete("c1", netns if path else "", deviceID=card.vfs[0])
        assert move.leftovers() == []
        assert _kept(move) == []
        run(IP, "link", "set", card.netdev(0), "txqueuelen", "1000")


def test_vf_of_sriov_cni_without_a_file_is_reset_to_defaults(
    move: SriovNode, pods: list[str], card: Card, unchanged: None
) -> None:
    """sriov-cni removes its file even if its DEL fails. Name and MTU are unknown then."""
    name = card.netdev(0)
    _made_by_sriov_cni(move, card, pods[0])
    (move.paths.cni_state / "sriov/c1-net1").write_text("{")
    config = SETTINGS | {"mac": None, "MAC": None, "deviceID": card.vfs[0]}
    move.delete("c1", pods[0], **config)  # without a result there was no ADD
    assert link_names(pods[0]) == {"lo", "net1"}
    move.delete("c1", pods[0], previous=_result(pods[0], OLD), **config)
    assert link_names(pods[0]) == {"lo"}
    run(IP, "link", "set", card.pf, "vf", "0", "mac", f"02:1b:10:01:{card.address[5:7]}:00")
    made = cards.netdev_of(card.vfs[0])
    run(
        IP, "link", "set", made, "name", name, "mtu", "1500", "txqueuelen", "1000", "promisc", "off"
    )
    run(IP, "link", "set", name, "address", f"02:1b:10:01:{card.address[5:7]}:00")


def test_vf_that_another_attachment_has_by_now_stays(
    move: SriovNode, pods: list[str], card: Card, unchanged: None
) -> None:
    """Files of attachments whose DEL never came, or came after another pod had got the VF."""
    _made_by_sriov_cni(move, card, pods[1], "c2")
    newer, older = (move.paths.cni_state / "sriov" / f"{name}-net1" for name in ("c2", "c1"))
    older.write_bytes(newer.read_bytes())
    newer.touch()
    move.delete("c1", pods[0], deviceID=card.vfs[0])
    assert link_names(pods[1]) == {"lo", "net1"}
    assert not older.exists()
    move.delete("c2", pods[1], deviceID=card.vfs[0])
    run(IP, "link", "set", card.netdev(0), "txqueuelen", "1000")
    move.add("c3", pods[2], deviceID=card.vfs[0], vlan=7)
    older.write_text(json.dumps(SETTINGS | {"deviceID": card.vfs[0]}))
    move.delete("c1", pods[0], deviceID=card.vfs[0])
    assert link_names(pods[2]) == {"lo", "net1"}
    assert not older.exists()
    move.delete("c3", pods[2], deviceID=card.vfs[0])


@pytest.fixture
def infiniband() -> Iterator[Card]:
    with infiniband_vfs.with_infiniband_vfs(1) as card:
        yield card


@pytest.mark.parametrize("dies", [False, True])
def test_vf_of_ib_sriov_cni_is_restored(move: SriovNode, infiniband: Card, dies: bool) -> None:
    card, vf = infiniband, infiniband.vfs[0]
    own = infiniband_vfs.state(card)[f"{vf} port GUID"]
    infiniband_vfs.set_guids(card, 0, own, own)
    infiniband_vfs.rebind(vf)
    before = infiniband_vfs.state(card)
    name, guid = card.netdev(0), "02:00:00:00:00:00:be:ef"
    written = {
        "Master": card.pf,
        "VFID": 0,
        "HostIFNames": name,
        "HostIFGUID": own,
        "ContIFNames": "net1",
        "RdmaNetState": {"version": "", "deviceID": "", "sandboxRdmaDevName": ""},
        "deviceID": vf,
        "link_state": "enable",
        "runtimeConfig": {"infinibandGUID": guid.upper()},
        "args": {"cni": None},
        "type": "ib-sriov",
    }
    (move.paths.cni_state / "ib-sriov/c1-net1").write_text(json.dumps(written))
    infiniband_vfs.set_guids(card, 0, guid, guid)
    run(IP, "link", "set", card.pf, "vf", "0", "state", "enable")
    infiniband_vfs.rebind(vf)
    with pod("former") as netns:
        run(IP, "link", "set", card.netdev(0), "netns", netns, "name", "net1")
        _inside(netns, "set", "net1", "up")
        if dies:
            run(IP, "netns", "delete", netns)
        move.delete("c1", netns, type="ib-sriov", deviceID=vf)
    assert move.leftovers() == []
    assert _kept(move) == []
    assert infiniband_vfs.state(card) == before
