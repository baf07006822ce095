"""Holes of sriov-cni and related plugins, by their ids in sriov-rows.md."""

import json
from pathlib import Path
from typing import Any

import pytest
from pyroute2.netlink.rtnl.ifinfmsg import IFF_RUNNING

from cni.attachments.journal import Journal
from cni.attachments.orphans import sweep
from cni.spec.attachment import Attachment
from cni.sriov.plugin import Sriov
from host import netdev_move
from host.errors import HostError
from host.namespaces import NetworkNamespace
from host.netlink import link_changes, links, vfs
from host.netlink.sockets import Rtnetlink, netlink
from policy import rules
from tests.kernel import cards, igb
from tests.kernel.cards import Card
from tests.kernel.pods import IP, NETWORK, SriovNode, ipam, link_in, pod, run
from tests.waiting import until

MAC = "02:ab:cd:00:00:07"


def test_hole_a_setting_that_fails_takes_the_earlier_ones_back(
    sriov: SriovNode, pods: list[str], card: Card
) -> None:
    """igb has no link state of VFs: VLAN, address and trust were already set."""
    before = cards.snapshot()
    config: dict[str, Any] = {"vlan": 100, "mac": MAC, "trust": "on", "link_state": "enable"}
    reply = sriov.refused("c1", pods[0], deviceID=card.vfs[0], **config, ipam=ipam("10.3.0.0/24"))
    assert (reply.document["code"], "link_state enable of VF 0" in reply.text) == (100, True)
    assert cards.snapshot() == before


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ({"vlanProto": "802.1ad"}, "the PF's driver has no 802.1ad, only 802.1q"),
        ({"min_tx_rate": 10}, "many drivers, such as Intel's, have no min_tx_rate"),
    ],
)
def test_hole_a_what_the_driver_cannot_do_is_named(
    sriov: SriovNode, pods: list[str], card: Card, option: dict[str, Any], named: str
) -> None:
    before = cards.snapshot()
    config: dict[str, Any] = {"deviceID": card.vfs[0], "vlan": 100, **option}
    assert named in sriov.refused("c1", pods[0], **config).text
    assert cards.snapshot() == before


def test_hole_b_interface_that_has_the_name_is_left_alone(
    sriov: SriovNode, pods: list[str], card: Card
) -> None:
    """A bridge without ports has no carrier; the kernel reports that a moment after it is up."""
    run(IP, "-n", pods[0], "link", "add", "net1", "address", MAC, "type", "bridge")
    run(IP, "-n", pods[0], "link", "set", "net1", "up", "mtu", "1234")
    until(lambda: (link := link_in(pods[0])) is not None and not link.flags & IFF_RUNNING)
    before, foreign = cards.snapshot(), link_in(pods[0])
    reply = sriov.refused("c1", pods[0], deviceID=card.vfs[0], vlan=100)
    assert 'already has a link of kind bridge named "net1"' in reply.text
    assert (cards.snapshot(), link_in(pods[0])) == (before, foreign)


def test_hole_b_name_that_is_taken_meanwhile_leaves_the_other_alone(
    sriov: SriovNode, pods: list[str], card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another interface takes the name after the check and before the move."""
    before = cards.snapshot()

    def too_early(pod: Rtnetlink, name: str) -> None:
        run(IP, "-n", pods[0], "link", "add", "net1", "address", MAC, "type", "bridge")

    monkeypatch.setattr(netdev_move, "require_free", too_early)
    assert sriov.call("ADD", "c1", pods[0], deviceID=card.vfs[0], vlan=100).exit_code == 1
    foreign = link_in(pods[0])
    assert foreign is not None
    assert (foreign.kind, foreign.mac) == ("bridge", MAC)
    assert cards.snapshot() == before
    assert sriov.leftovers() == []


@pytest.mark.parametrize("version", ["0.1.0", "0.2.0", None])
def test_hole_c_result_that_cannot_be_printed_is_refused_first(
    sriov: SriovNode, pods: list[str], card: Card, version: str | None
) -> None:
    before = cards.snapshot()
    reply = sriov.refused("c1", pods[0], deviceID=card.vfs[0], vlan=100, cniVersion=version)
    assert "ipam" in reply.text
    assert cards.snapshot() == before


def test_hole_d_delete_goes_on_after_one_that_failed(
    sriov: SriovNode, pods: list[str], card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = cards.snapshot()
    config: dict[str, Any] = {"deviceID": card.vfs[0], "vlan": 100, "trust": "on"}
    sriov.add("c1", pods[0], **config)

    def busy(*arguments: object) -> None:
        raise HostError("setting vlan 0 of VF 0: the card is busy")

    with monkeypatch.context() as broken:
        broken.setattr(vfs, "set_vlan", busy)
        for _ in range(2):
            reply = sriov.call("DEL", "c1", pods[0], **config)
            assert (reply.document["code"], "the card is busy" in reply.text) == (104, True)
            assert sriov.journal_file("c1").exists()
    sriov.delete("c1", pods[0], **config)
    assert cards.snapshot() == before
    assert sriov.leftovers() == []


def test_hole_s1_only_what_differs_is_restored(
    sriov: SriovNode, pods: list[str], card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    for name in ("set_mac", "set_vlan", "set_rate", "set_spoofchk", "set_trust", "set_guids"):
        original = getattr(vfs, name)

        def noted(*arguments: Any, name: str = name, original: Any = original) -> None:  # noqa: ANN401
            written.append(name)
            original(*arguments)

        monkeypatch.setattr(vfs, name, noted)
    config: dict[str, Any] = {"deviceID": card.vfs[0], "vlan": 100, "trust": "on"}
    sriov.add("c1", pods[0], **config, spoofchk="on", max_tx_rate=0)
    assert written == ["set_vlan", "set_trust"]
    written.clear()
    sriov.delete("c1", pods[0], **config)
    assert sorted(written) == ["set_trust", "set_vlan"]


def test_hole_s7_second_add_is_told_that_it_is_one(
    sriov: SriovNode, pods: list[str], card: Card
) -> None:
    config: dict[str, Any] = {"deviceID": card.vfs[0]}
    sriov.add("c1", pods[0], **config)
    again = sriov.call("ADD", "c1", pods[0], **config)
    assert again.document["code"] == 103, again
    other = sriov.call("ADD", "c2", pods[1], **config)
    assert other.document["code"] == 11
    assert "another attachment has had it" in other.text
    assert "c1" not in other.text  # the log names it
    assert link_in(pods[0]) is not None
    sriov.delete("c2", pods[1], **config)  # as a runtime does after a failed ADD
    assert link_in(pods[0]) is not None
    sriov.delete("c1", pods[0], **config)
    assert sriov.leftovers() == []


def test_hole_s8_gc_gives_a_device_back(sriov: SriovNode, pods: list[str], card: Card) -> None:
    before = cards.snapshot()
    sriov.add("c1", pods[0], deviceID=card.vfs[0], vlan=100)
    sriov.add("c2", pods[1], deviceID=card.vfs[1], vlan=100)
    valid = {"cni.dev/valid-attachments": [{"containerID": "c2", "ifname": "net1"}]}
    collected = sriov.call("GC", "", "", **valid)  # type: ignore[arg-type]
    assert collected.exit_code == 0, collected
    assert (link_in(pods[0]), link_in(pods[1]) is not None) == (None, True)
    assert cards.netdev_of(card.vfs[0])
    sriov.delete("c2", pods[1], deviceID=card.vfs[1])
    assert cards.snapshot() == before


def test_hole_s11_missing_ipam_plugin_leaves_nothing(
    sriov: SriovNode, pods: list[str], card: Card
) -> None:
    before = cards.snapshot()
    sriov.policy = rules.of({"use": {"ipamTypes": ["absent"]}}, "config.yaml")
    reply = sriov.refused("c1", pods[0], deviceID=card.vfs[0], vlan=100, ipam={"type": "absent"})
    assert "absent" in reply.text
    assert cards.snapshot() == before


def test_hole_n1_index_that_is_taken_in_the_pod(
    sriov: SriovNode, pods: list[str], card: Card
) -> None:
    """The kernel gives the VF another index there; the owner of its old index is not touched."""
    with netlink() as host:
        own = links.require(host, card.netdev(0))
    name = "squatter"
    run(IP, "-n", pods[0], "link", "add", name, "index", str(own.index), "type", "bridge")
    before = link_in(pods[0], name)
    sriov.add("c1", pods[0], deviceID=card.vfs[0], mtu=1400, ipam=ipam("10.3.0.0/24"))
    link = link_in(pods[0])
    assert link is not None
    assert (link.index != own.index, link.device, link.mtu) == (True, card.vfs[0], 1400)
    assert link_in(pods[0], name) == before
    sriov.delete("c1", pods[0], deviceID=card.vfs[0], ipam=ipam("10.3.0.0/24"))
    assert link_in(pods[0], name) == before


def test_hole_n2_queue_length_is_the_drivers(sriov: SriovNode, pods: list[str], card: Card) -> None:
    def length(*where: str) -> int:
        (shown,) = json.loads(run(IP, *where[:-1], "-j", "link", "show", where[-1]))
        return int(shown["txqlen"])

    own = length(card.netdev(0))
    sriov.add("c1", pods[0], deviceID=card.vfs[0])
    assert length("-n", pods[0], "net1") == own > 0
    sriov.delete("c1", pods[0], deviceID=card.vfs[0])


@pytest.mark.parametrize("damage", ["cut", "flipped", "missing"])
def test_damaged_journal_is_named_and_the_device_comes_home(
    sriov: SriovNode, pods: list[str], card: Card, damage: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its name and the earlier settings are lost: sysfs and netlink must be enough."""
    config: dict[str, Any] = {"deviceID": card.vfs[0], "vlan": 100, "trust": "on", "mtu": 1400}
    name = card.netdev(0)
    sriov.add("c1", pods[0], **config)
    file = sriov.journal_file("c1")
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        first = content.splitlines()[0]  # a later line that is cut leaves this one valid
        changed = first[: len(first) // 2] if damage == "cut" else content.replace(b"c1", b"c9")
        file.write_bytes(changed)
    capfd.readouterr()
    sriov.delete("c1", pods[0], **config)
    if damage != "missing":
        assert "is damaged" in capfd.readouterr().err
    netdev = cards.await_netdev(card.vfs[0])
    with netlink() as host:
        link = links.require(host, netdev)
        assert link.alias == ""
        if netdev != name:
            link_changes.rename(host, link, name)
        link_changes.set_mtu(host, link, 1500)
    shown = cards.shown(card.pf, 0)
    assert (shown["vlan_list"], shown["trust"]) == ([{}], False)
    assert sriov.leftovers() in ([], [f"journal {file.stem}.damaged"])


def test_damaged_journal_of_a_late_delete_leaves_the_next_pods_device_alone(
    sriov: SriovNode, pods: list[str], card: Card
) -> None:
    config: dict[str, Any] = {"deviceID": card.vfs[0]}
    sriov.add("c1", pods[0], **config)
    sriov.delete("c1", pods[0], **config)
    reply = sriov.add("c2", pods[1], **config, vlan=55)
    late = Journal(sriov.paths).path_of(Attachment(NETWORK, "c1", "net1"))
    late.write_bytes(b"{")
    sriov.delete("c1", pods[0], **config, vlan=55)
    checked = sriov.call("CHECK", "c2", pods[1], previous=reply, **config, vlan=55)
    assert checked.exit_code == 0, checked
    sriov.delete("c2", pods[1], **config)


def test_restarted_agent_sweeps_dead_attachments_only(
    sriov: SriovNode, pods: list[str], card: Card
) -> None:
    before = cards.snapshot()
    sriov.add("c1", pods[0], deviceID=card.vfs[0], vlan=100)
    sriov.add("c2", pods[1], deviceID=card.vfs[1], vlan=100)
    assert sweep(Sriov(sriov.paths)) == ()
    run(IP, "netns", "delete", pods[0])
    outcomes = sweep(Sriov(sriov.paths))
    assert list(map(str, outcomes)) == ["removed fabric/c1/net1: its sandbox is gone"]
    with NetworkNamespace.open(f"/run/netns/{pods[1]}") as space, netlink(space) as pod:
        assert links.has_name(pod, "net1")
    sriov.delete("c2", pods[1], deviceID=card.vfs[1])
    assert cards.snapshot() == before


def test_mark_that_a_pod_writes_on_another_interface_moves_that_nowhere(
    sriov: SriovNode, pods: list[str], card: Card
) -> None:
    """A pod may write aliases: they must not move its own veth to the host."""
    before = cards.snapshot()
    sriov.add("c1", pods[0], deviceID=card.vfs[0])
    mark = link_in(pods[0])
    assert mark is not None
    inside = [IP, "-n", pods[0], "link"]
    run(*inside, "add", "trojan", "type", "veth", "peer", "name", "other")
    run(*inside, "set", "net1", "alias", "harmless")
    run(*inside, "set", "trojan", "alias", mark.alias)
    sriov.delete("c1", pods[0], deviceID=card.vfs[0])
    assert link_in(pods[0], "trojan") is not None
    assert cards.snapshot() == before


def test_two_vfs_of_a_pod_whose_marks_were_swapped_come_home_each_as_itself(
    sriov: SriovNode, pods: list[str], card: Card
) -> None:
    before = cards.snapshot()
    for number in (0, 1):
        sriov.add("c1", pods[0], ifname=f"net{number}", deviceID=card.vfs[number], mtu=1400)
    links_inside = [link_in(pods[0], f"net{number}") for number in (0, 1)]
    for number in (0, 1):
        other = links_inside[1 - number]
        assert other is not None
        run(IP, "-n", pods[0], "link", "set", f"net{number}", "alias", other.alias)
    for number in (0, 1):
        sriov.delete("c1", pods[0], ifname=f"net{number}", deviceID=card.vfs[number])
    assert cards.snapshot() == before


def test_old_name_that_udev_gives_back_as_an_alternative_one(sriov: SriovNode, card: Card) -> None:
    before, name = cards.snapshot(), card.netdev(0)
    with pod("shortlived") as netns:
        sriov.add("c1", netns, deviceID=card.vfs[0])
    assert cards.await_netdev(card.vfs[0]) == "net1"
    run(IP, "link", "property", "add", "dev", "net1", "altname", name)
    sriov.delete("c1", "shortlived", deviceID=card.vfs[0])
    assert cards.snapshot() == before


def test_name_that_another_interface_has_by_now_leaves_no_setting_behind(
    sriov: SriovNode, pods: list[str], card: Card
) -> None:
    before, name = cards.snapshot(), card.netdev(0)
    sriov.add("c1", pods[0], deviceID=card.vfs[0], vlan=100, trust="on")
    run(IP, "link", "add", name, "type", "bridge")
    reply = sriov.call("DEL", "c1", pods[0], deviceID=card.vfs[0])
    assert (reply.document["code"], "another interface on the host has the name" in reply.text) == (
        104,
        True,
    )
    shown = cards.shown(card.pf, 0)
    assert (shown["vlan_list"], shown["trust"]) == ([{}], False)
    run(IP, "link", "delete", name)
    sriov.delete("c1", pods[0], deviceID=card.vfs[0])
    assert cards.snapshot() == before


def test_pf_without_an_interface_does_not_keep_the_vf_in_the_pod(
    sriov: SriovNode, pods: list[str], card: Card
) -> None:
    """This happens in a reload of its driver's settings, or with the PF in another namespace."""
    before = cards.snapshot()
    sriov.add("c1", pods[0], deviceID=card.vfs[0], vlan=100)
    with pod("elsewhere") as other:
        run(IP, "link", "set", card.pf, "netns", other)
        reply = sriov.call("DEL", "c1", pods[0], deviceID=card.vfs[0])
        assert (reply.document["code"], card.address in reply.text) == (104, True)
        assert link_in(pods[0]) is None
        run(IP, "-n", other, "link", "set", card.pf, "netns", "1")
    run(IP, "link", "set", card.pf, "up")
    igb.await_carrier(card.pf)
    sriov.delete("c1", pods[0], deviceID=card.vfs[0])
    assert cards.snapshot() == before


def test_device_in_use_by_the_host_is_refused(
    sriov: SriovNode, pods: list[str], card: Card
) -> None:
    name = card.netdev(0)
    run(IP, "link", "add", "vrf7", "type", "vrf", "table", "7")
    run(IP, "link", "set", name, "master", "vrf7")
    assert '"vrf7"' in sriov.refused("c1", pods[0], deviceID=card.vfs[0]).text
    run(IP, "link", "delete", "vrf7")
    run(IP, "link", "set", name, "up")
    for what, given in (("address", "10.98.0.1/24"), ("route", "10.97.0.0/24")):
        run(IP, what, "add", given, "dev", name)
        text = sriov.refused("c1", pods[0], deviceID=card.vfs[0]).text
        assert f"({given}): choose" in text
        run(IP, what, "flush", "dev", name)
    sriov.add("c1", pods[0], deviceID=card.vfs[0])
    sriov.delete("c1", pods[0], deviceID=card.vfs[0])
    other = cards.cards()[1].pf
    sriov.policy = rules.of({"set": {"pfOnly": [True]}}, "config.yaml")
    run(IP, "address", "add", "10.99.0.1/24", "dev", other)
    reply = sriov.refused("c1", pods[0], master=other, pfOnly=True)
    assert "(10.99.0.1/24): choose" in reply.text
    run(IP, "address", "delete", "10.99.0.1/24", "dev", other)


def test_dhcp_gets_the_interface_before_it_is_asked(
    sriov: SriovNode, pods: list[str], card: Card
) -> None:
    """dhcp's daemon uses the pod's interface, which must exist and be up."""
    before = cards.snapshot()
    double = Path("/opt/cni/bin/dhcp")
    double.parent.mkdir(parents=True, exist_ok=True)
    double.write_text(DHCP)
    double.chmod(0o755)
    config: dict[str, Any] = {"deviceID": card.vfs[0], "ipam": {"type": "dhcp"}}
    reply = sriov.add("c1", pods[0], **config)
    assert reply.addresses == ["10.11.0.7"]
    assert "10.11.0.7/24" in run(IP, "-n", pods[0], "address", "show", "dev", "net1")
    assert "10.12.0.0/16 via 10.11.0.1" in run(IP, "-n", pods[0], "route")
    # An attachment that was allowed still works.
    sriov.policy = rules.of({"use": {"ipamTypes": []}}, "config.yaml")
    assert sriov.call("CHECK", "c1", pods[0], previous=reply, **config).document == {}
    sriov.delete("c1", pods[0], **config)
    refused = sriov.refused("c1", pods[0], **config)
    assert (refused.document["code"], '"use.ipamTypes"' in refused.text) == (121, True)
    assert cards.snapshot() == before


DHCP = """#!/bin/sh
[ "$CNI_COMMAND" = ADD ] || exit 0
case $(/usr/sbin/ip -n "${CNI_NETNS##*/}" -brief link show "$CNI_IFNAME") in
*[\\<,]UP[,\\>]*) ;;
*) echo '{"cniVersion":"1.0.0","code":101,"msg":"no interface to ask through"}'; exit 1 ;;
esac
echo '{"cniVersion":"1.0.0","ips":[{"address":"10.11.0.7/24","gateway":"10.11.0.1"}],
"routes":[{"dst":"10.12.0.0/16"}]}'
"""
