"""A VF of a real PF in a pod: every option that igb has, read back, and the host restored."""

from typing import Any

import pytest
from pyroute2.netlink.rtnl.ifinfmsg import IFF_ALLMULTI, IFF_PROMISC

from host.netlink import links
from host.netlink.sockets import netlink
from policy import rules
from policy.rules import Policy
from tests.kernel import cards, igb
from tests.kernel.cards import Card
from tests.kernel.igb import RDMA
from tests.kernel.pods import IP, SriovNode, ipam, link_in, link_names, pod, run

MAC = "02:ab:cd:00:00:01"


def test_device_goes_into_the_pod_and_comes_back_as_it_was(
    sriov: SriovNode, pods: list[str], card: Card
) -> None:
    before = cards.snapshot()
    name = card.netdev(0)
    reply = sriov.add("c1", pods[0], deviceID=card.vfs[0], ipam=ipam("10.3.0.0/24"))
    link = link_in(pods[0])
    assert link is not None
    assert reply.interface == {
        "name": "net1",
        "mac": link.mac,
        "mtu": 1500,
        "sandbox": f"/var/run/netns/{pods[0]}",
        "pciID": card.vfs[0],
    }
    assert reply.addresses == ["10.3.0.1"]
    assert (link.device, link.up) == (card.vfs[0], True)
    assert name not in link_names()
    assert sriov.call("CHECK", "c1", pods[0], deviceID=card.vfs[0], previous=reply).exit_code == 0
    sriov.delete("c1", pods[0], deviceID=card.vfs[0], ipam=ipam("10.3.0.0/24"))
    assert cards.snapshot() == before
    assert sriov.leftovers() == []


@pytest.mark.parametrize(
    ("config", "shown"),
    [
        ({"vlan": 100}, {"vlan_list": [{"vlan": 100}]}),
        ({"vlan": 100, "vlanQoS": 5}, {"vlan_list": [{"vlan": 100, "qos": 5}]}),
        ({"vlan": 4094, "vlanProto": "802.1Q"}, {"vlan_list": [{"vlan": 4094}]}),
        ({"mac": MAC}, {"mac": MAC}),
        ({"MAC": MAC.upper()}, {"mac": MAC}),
        ({"spoofchk": "off"}, {"spoofchk": False}),
        ({"spoofchk": "on"}, {"spoofchk": True}),
        ({"trust": "on"}, {"trust": True}),
        ({"trust": "off"}, {"trust": False}),
        ({"max_tx_rate": 100}, {"rate": {"max_tx": 100, "min_tx": 0}}),
        ({"runtimeConfig": {"mac": MAC}}, {"mac": MAC}),
        ({}, {"spoofchk": True, "trust": False}),
    ],
    ids=str,
)
def test_option_reaches_the_pf_and_goes_again(
    sriov: SriovNode, pods: list[str], card: Card, config: dict[str, Any], shown: dict[str, Any]
) -> None:
    before = cards.snapshot()
    reply = sriov.add("c1", pods[0], deviceID=card.vfs[1], **config)
    found = cards.shown(card.pf, 1)
    assert {key: found.get(key, found.get("address")) for key in shown} == shown
    if shown.get("mac") == MAC:
        link = link_in(pods[0])
        assert link is not None
        assert (link.mac, reply.interface["mac"]) == (MAC, MAC)
    assert (
        sriov.call("CHECK", "c1", pods[0], deviceID=card.vfs[1], previous=reply, **config).exit_code
        == 0
    )
    sriov.delete("c1", pods[0], deviceID=card.vfs[1], **config)
    assert cards.snapshot() == before


def test_options_of_the_interface_reach_the_kernel_and_go_again(
    sriov: SriovNode, pods: list[str], card: Card
) -> None:
    before = cards.snapshot()
    config: dict[str, Any] = {
        "deviceID": card.vfs[0],
        "mtu": 1400,
        "allmulti": True,
        "promisc": True,
    }
    reply = sriov.add("c1", pods[0], **config)
    link = link_in(pods[0])
    assert link is not None
    assert (link.mtu, reply.interface["mtu"]) == (1400, 1400)
    assert link.flags & (IFF_ALLMULTI | IFF_PROMISC) == IFF_ALLMULTI | IFF_PROMISC
    sriov.delete("c1", pods[0], **config)
    assert cards.snapshot() == before


def test_what_the_pod_changed_is_undone(sriov: SriovNode, pods: list[str], card: Card) -> None:
    """Changes by DPDK programs and users: address, MTU, name, and down (sriov #397, #417)."""
    name = card.netdev(0)
    run(IP, "link", "property", "add", "dev", name, "altname", f"{name}-of-old")
    before = cards.snapshot()
    sriov.add("c1", pods[0], deviceID=card.vfs[0], trust="on")
    inside = [IP, "-n", pods[0], "link"]
    run(*inside, "set", "net1", "down")
    run(*inside, "set", "net1", "address", "02:ee:ee:ee:ee:ee", "mtu", "1300")
    run(*inside, "set", "net1", "name", "renamed0")
    run(*inside, "property", "add", "dev", "renamed0", "altname", "pods-own")
    sriov.delete("c1", pods[0], deviceID=card.vfs[0])
    assert cards.snapshot() == before
    run(IP, "link", "property", "del", "dev", name, "altname", f"{name}-of-old")


def test_alternative_names_that_clash_are_taken_off_and_put_back(
    sriov: SriovNode, pods: list[str], card: Card
) -> None:
    """sriov #250, #445: an altname equals the pod's name, another one exists in the pod already."""
    name = card.netdev(0)
    for altname in ("net1", "taken0"):
        run(IP, "link", "property", "add", "dev", name, "altname", altname)
    run(IP, "-n", pods[0], "link", "add", "taken0", "type", "bridge")
    before = cards.snapshot()
    sriov.add("c1", pods[0], deviceID=card.vfs[0])
    assert link_in(pods[0]) is not None
    sriov.delete("c1", pods[0], deviceID=card.vfs[0])
    assert cards.snapshot() == before
    for altname in ("net1", "taken0"):
        run(IP, "link", "property", "del", "dev", name, "altname", altname)


def test_master_gives_a_free_vf(sriov: SriovNode, pods: list[str], card: Card) -> None:
    before = cards.snapshot()
    first = sriov.add("c1", pods[0], master=card.pf)
    second = sriov.add("c2", pods[1], master=["nowhere0", card.pf][1:])
    assert [first.interface["pciID"], second.interface["pciID"]] == list(card.vfs[:2])
    sriov.delete("c1", pods[0], master=card.pf)
    sriov.delete("c2", pods[1], master=card.pf)
    assert cards.snapshot() == before


def test_pf_itself_goes_into_the_pod_if_it_has_no_vfs(
    sriov: SriovNode, pods: list[str], card: Card
) -> None:
    reply = sriov.refused("c1", pods[0], deviceID=card.address, pfOnly=True)
    assert (reply.document["code"], '"set.pfOnly"' in reply.text) == (121, True)
    sriov.policy = rules.of({"set": {"pfOnly": [True]}}, "config.yaml")
    reply = sriov.call("ADD", "c1", pods[0], deviceID=card.address, pfOnly=True)
    assert reply.exit_code == 1
    assert "sriov_numvfs" in reply.text
    other = cards.cards()[1]
    before = cards.snapshot()
    sriov.add("c1", pods[0], master=other.pf, pfOnly=True)
    assert other.pf not in link_names()
    sriov.policy = Policy()  # an attachment that was allowed can always be detached
    sriov.delete("c1", pods[0], master=other.pf, pfOnly=True)
    assert cards.snapshot() == before


def test_vf_of_a_program_is_configured_and_left_where_it_is(
    sriov: SriovNode, pods: list[str], card: Card
) -> None:
    """vfio-pci: the PF's settings, no interface; DEL works (hole E) and restores."""
    with cards.at_vfio(card.vfs[2]):
        before = cards.snapshot()
        config: dict[str, Any] = {
            "deviceID": card.vfs[2],
            "vlan": 7,
            "mac": MAC,
            "vfioPciMode": True,
        }
        config["ipam"] = ipam("10.3.1.0/24")
        reply = sriov.add("c1", pods[0], **config)
        assert (reply.interface["mac"], reply.interface["mtu"]) == (MAC, 1500)
        assert reply.addresses == ["10.3.1.1"]
        assert cards.shown(card.pf, 2)["vlan_list"] == [{"vlan": 7}]
        assert link_names(pods[0]) == {"lo"}
        checked = sriov.call("CHECK", "c1", pods[0], previous=reply, **config)
        assert checked.exit_code == 0, checked
        sriov.delete("c1", pods[0], **config)
        assert cards.snapshot() == before
        assert sriov.leftovers() == []


def test_private_range_over_the_addresses_of_another_network_on_the_vlan_is_refused(
    sriov: SriovNode, pods: list[str], card: Card
) -> None:
    before = cards.snapshot()
    theirs: dict[str, Any] = {
        "name": "theirs",
        "deviceID": card.vfs[0],
        "vlan": 100,
        "ipam": ipam("10.3.0.0/24"),
    }
    evil: dict[str, Any] = {"name": "mine", "ipam": ipam("10.3.0.0/24", network_name="evil")}
    sriov.add("c1", pods[0], **theirs)
    reply = sriov.call("ADD", "c2", pods[1], **evil, deviceID=card.vfs[1], vlan=100)
    assert reply.document["code"] == 121
    assert "vlan 100" in reply.text
    mine = {**evil, "deviceID": card.vfs[1], "vlan": 101}
    assert sriov.add("c2", pods[1], **mine).addresses == ["10.3.0.1"]
    sriov.delete("c2", pods[1], **mine)
    sriov.delete("c1", pods[0], **theirs)
    assert cards.snapshot() == before


def test_runtime_that_died_with_the_device_at_vfio_gets_it_back(
    sriov: SriovNode, pods: list[str], card: Card
) -> None:
    """kata #8646: the driver is part of the state to restore."""
    before = cards.snapshot()
    sriov.add("c1", pods[0], deviceID=card.vfs[2], vlan=7)
    with cards.at_vfio(card.vfs[2], back=False):
        pass
    sriov.delete("c1", pods[0], deviceID=card.vfs[2])
    assert cards.driver_of(card.vfs[2]) == "igbvf"
    assert cards.snapshot() == before


def test_check_names_what_differs(sriov: SriovNode, pods: list[str], card: Card) -> None:
    config: dict[str, Any] = {
        "deviceID": card.vfs[0],
        "vlan": 100,
        "trust": "on",
        "mtu": 1400,
        "allmulti": True,
    }
    reply = sriov.add("c1", pods[0], **config)

    def difference() -> str:
        checked = sriov.call("CHECK", "c1", pods[0], previous=reply, **config)
        assert checked.document.get("code") == 102, checked
        return checked.text

    pf_side = [IP, "link", "set", card.pf, "vf", "0"]
    run(*pf_side, "vlan", "0")
    assert "vlan" in difference()
    run(*pf_side, "vlan", "100")
    run(*pf_side, "trust", "off")
    assert "trust" in difference()
    run(*pf_side, "trust", "on")
    run(IP, "-n", pods[0], "link", "set", "net1", "mtu", "1300")
    assert "mtu" in difference()
    run(IP, "-n", pods[0], "link", "set", "net1", "mtu", "1400", "allmulticast", "off")
    assert "allmulti" in difference()
    run(IP, "-n", pods[0], "link", "set", "net1", "allmulticast", "on", "down")
    assert "administrative state" in difference()
    run(IP, "-n", pods[0], "link", "set", "net1", "up")
    assert sriov.call("CHECK", "c1", pods[0], previous=reply, **config).exit_code == 0
    sriov.delete("c1", pods[0], **config)


def test_status_says_what_is_missing(sriov: SriovNode) -> None:
    assert sriov.call("STATUS", "", "").exit_code == 0
    other = cards.cards()[1].pf
    reply = sriov.call("STATUS", "", "", master=other)
    assert (reply.document["code"], "has no VFs" in reply.text) == (50, True)
    if cards.rdma_mode() == "shared":
        reply = sriov.call("STATUS", "", "", rdmaIsolation=True)
        assert (reply.document["code"], "rdma system set netns exclusive" in reply.text) == (
            50,
            True,
        )


def test_vf_that_the_pf_gave_no_address(sriov: SriovNode, pods: list[str], card: Card) -> None:
    """Its driver invents an address, and the PF shows it once the VF is up: nothing is set."""
    run(IP, "link", "set", card.pf, "vf", "2", "mac", "00:00:00:00:00:00")
    config: dict[str, Any] = {"deviceID": card.vfs[2]}
    reply = sriov.add("c1", pods[0], **config)
    assert sriov.call("CHECK", "c1", pods[0], previous=reply, **config).exit_code == 0
    link = link_in(pods[0])
    sriov.delete("c1", pods[0], **config)
    assert link is not None
    assert cards.shown(card.pf, 2)["address"] in ("00:00:00:00:00:00", link.mac)


def test_address_that_the_pf_set_is_the_vfs_afterwards(
    sriov: SriovNode, pods: list[str], card: Card
) -> None:
    """The driver takes the new address at its next reset, and may not return to the old one."""
    mac = "02:1b:10:99:00:01"
    run(IP, "link", "set", card.pf, "vf", "0", "mac", mac)
    name = card.netdev(0)
    sriov.add("c1", pods[0], deviceID=card.vfs[0], mac=MAC)
    sriov.delete("c1", pods[0], deviceID=card.vfs[0])
    with netlink() as host:
        link = links.find(host, name)
    assert link is not None
    assert link.mac == mac
    assert cards.shown(card.pf, 0)["address"] == mac


def test_shared_mode_is_refused_with_the_needed_setting(
    sriov: SriovNode, pods: list[str], card: Card
) -> None:
    assert cards.rdma_mode() == "shared"
    reply = sriov.refused("c1", pods[0], deviceID=card.vfs[0], rdmaIsolation=True)
    assert "rdma system set netns exclusive" in reply.text
    assert "netns_mode=0" in reply.text


def test_isolated_device_that_gets_another_number_is_refused_and_then_keeps_it(
    sriov: SriovNode, card: Card
) -> None:
    """The kernel gives a moving device the lowest free number: here that of an unplugged one."""
    vf = card.vfs[0]
    run("/sbin/modprobe", "rdma_rxe")
    with igb.ibloop_unloaded():
        run(RDMA, "link", "add", "rxe9", "type", "rxe", "netdev", card.pf)
    with igb.with_hcas(vf):
        run(RDMA, "link", "delete", "rxe9")
        with igb.exclusive_rdma(), pod("isolated") as netns:
            reply = sriov.refused("c1", netns, deviceID=vf, rdmaIsolation=True)
            assert reply.document["code"] == 100
            for named in ("ibloop0", "uverbs1 (231:193)", "uverbs0 (231:192)", "delete the pod"):
                assert named in reply.text
            assert "ibloop0" in run(RDMA, "dev")
            sriov.add("c1", netns, deviceID=vf, rdmaIsolation=True)
            sriov.delete("c1", netns, deviceID=vf, rdmaIsolation=True)
    assert sriov.leftovers() == []


def test_soft_roce_which_a_move_would_destroy_is_in_the_way(
    sriov: SriovNode, pods: list[str], card: Card
) -> None:
    run("/sbin/modprobe", "rdma_rxe")
    run(RDMA, "link", "add", "rxe0", "type", "rxe", "netdev", card.netdev(0))
    before = cards.snapshot()
    try:
        assert "rdma link delete rxe0" in sriov.refused("c1", pods[0], deviceID=card.vfs[0]).text
        assert cards.snapshot() == before
    finally:
        run(RDMA, "link", "delete", "rxe0")
