"""Rules where only the device can tell: its VLAN, P_Key and MTU, and what is put in."""

import json
import os
from typing import Any

import msgspec
import pytest

from base.pod import Pod
from cni.attachments.journal import Journal
from cni.attachments.matching import Match
from cni.spec.config import decode
from cni.spec.errors import CNIError
from cni.spec.request import Request
from cni.sriov import options, vf_policy
from cni.sriov.claim import ClaimedDevice, Claimer
from deviceplugin.pod_devices import PodHoldings
from host.namespaces import NetworkNamespace
from policy.allowance import NotAllowed, of_pod
from policy.document import rules_of
from policy.rules import Policy
from tests.unit.sriov.node import HOST, VF0, VF1, Node, link

pytestmark = pytest.mark.root

SF, WHOLE = "mlx5_core.sf.6", "0000:05:00.0"  # the latter is a PF without VFs
GUID = "02:00:00:00:00:00:00:01"


def claim(node: Node, *rules: dict[str, Any], **config: Any) -> ClaimedDevice:  # noqa: ANN401
    """The device that an ADD gets under these rules for its namespace."""
    named = [
        {"name": f"r{index}", "subjects": [{"namespaces": ["*"]}], **rule}
        for index, rule in enumerate(rules)
    ]
    policy = Policy(rules=rules_of(named, "rules"))
    netns = f"/proc/{os.getpid()}/ns/net"
    request = Request(
        command="ADD",
        container_id="c1",
        netns=netns,
        ifname="net1",
        network="fabric",
        config=decode(json.dumps({"type": "sriov", "deviceID": VF0, **config}).encode()),
    )
    wanted = options.read(request)
    allowance = vf_policy.by_options(wanted, of_pod(policy, Pod("a", "p")))
    match = Match(node.paths, PodHoldings(Pod()), "fabric/net1", allowance)
    with NetworkNamespace.open(netns) as namespace:
        claimer = Claimer(Journal(node.paths), node.paths, request, namespace, HOST, match)
        claimed = claimer.claim(wanted)
    Journal(node.paths).remove(claimed.entry.attachment)
    return claimed


def refused(node: Node, *rules: dict[str, Any], **config: Any) -> NotAllowed:  # noqa: ANN401
    with pytest.raises(NotAllowed) as caught:
        claim(node, *rules, **config)
    assert list(Journal(node.paths).entries()) == []
    return caught.value


ANY = {"devices": ["*"]}


def test_vf_keeps_its_vlan_only_if_a_rule_has_it(ethernet: Node) -> None:
    assert refused(ethernet, {"use": ANY}).key == f"vlan of {VF0}"
    assert claim(ethernet, {"use": ANY | {"vlans": [0]}}).record.applied == ethernet.vfs[0]
    ethernet.vfs[0] = msgspec.structs.replace(ethernet.vfs[0], vlan=7)
    assert refused(ethernet, {"use": ANY | {"vlans": [0]}}).value == "7"


@pytest.mark.parametrize("config", [{"deviceID": SF}, {"deviceID": WHOLE, "pfOnly": True}], ids=str)
def test_device_whose_frames_no_pf_tags_may_send_every_vlan(
    ethernet: Node, config: dict[str, Any]
) -> None:
    ethernet.with_a_scalable_function()
    ethernet.links["ens1"] = link("ens1", WHOLE)
    rule = {"use": ANY | {"vlans": ["100-109"]}, "set": {"pfOnly": [True]}}
    error = refused(ethernet, rule, **config)
    assert (error.key, error.value) == (f"vlan of {config['deviceID']}", "0")
    claimed = claim(ethernet, rule | {"use": ANY | {"vlans": [0]}}, **config)
    assert claimed.record.device == config["deviceID"]


def test_vf_of_a_master_that_has_another_vlan_is_passed_over(ethernet: Node) -> None:
    ethernet.vfs[0] = msgspec.structs.replace(ethernet.vfs[0], vlan=7)
    claimed = claim(ethernet, {"use": ANY | {"vlans": [0]}}, deviceID=None, master="enp175s0f1")
    assert claimed.record.device == VF1


def test_interface_of_infiniband_is_in_a_partition_that_a_rule_has(infiniband: Node) -> None:
    before = infiniband.links["ib1"]
    infiniband.links["ib1"] = msgspec.structs.replace(before, pkey=0x8005)
    error = refused(infiniband, {"use": ANY | {"pkeys": ["0x8001"]}})
    assert (error.key, error.value) == (f"pkey of {VF0}", "0x8005")
    assert claim(infiniband, {"use": ANY | {"pkeys": ["0x8005"]}}).record.pkey == 0x8005


@pytest.mark.parametrize(
    ("rule", "config"),
    [
        ({"use": ANY | {"pkeys": ["0x8001"]}}, {"pkey": "0x8001"}),
        ({"use": ANY, "fixed": {"pkey": "0x8001"}}, {}),
    ],
    ids=["definition", "rule"],
)
def test_pkey_that_is_written_does_not_hide_the_partition_of_the_interface(
    infiniband: Node, rule: dict[str, Any], config: dict[str, Any]
) -> None:
    before = infiniband.links["ib1"]
    infiniband.links["ib1"] = msgspec.structs.replace(before, pkey=0x8005)
    error = refused(infiniband, rule, **config)
    assert (error.key, error.value) == (f"pkey of {VF0}", "0x8005")
    infiniband.links["ib1"] = msgspec.structs.replace(before, pkey=0x8001)
    assert claim(infiniband, rule, **config).record.pkey == 0x8001


def test_partition_of_a_new_guid_is_asked_once_the_vf_has_it(infiniband: Node) -> None:
    infiniband.links["ib1"] = msgspec.structs.replace(infiniband.links["ib1"], pkey=0x8005)
    use = ANY | {"pkeys": ["0x8001"], "guids": [GUID]}
    for config in ({}, {"pkey": "0x8001"}):
        claimed = claim(infiniband, {"use": use}, guid=GUID, **config)
        with pytest.raises(NotAllowed):
            vf_policy.in_partition(claimed.plan, claimed.allowance)


def test_mtu_of_the_device_needs_no_rule(ethernet: Node) -> None:
    use = {"use": ANY | {"vlans": ["*"]}}
    assert claim(ethernet, use, mtu=1500).wanted.mtu == 1500
    assert refused(ethernet, use, mtu=1400).key == "mtu"
    assert claim(ethernet, use | {"set": {"mtu": ["1000-1400"]}}, mtu=1400).record.mtu == 1400


def test_a_rule_puts_the_vlan_into_an_ethernet_vf_and_the_pkey_into_none(ethernet: Node) -> None:
    rule = {"use": ANY, "fixed": {"vlan": 100, "vlanQoS": 3, "pkey": "0x8001", "trust": False}}
    claimed = claim(ethernet, rule)
    assert claimed.record.applied is not None
    assert (claimed.record.applied.vlan, claimed.record.applied.qos) == (100, 3)
    assert claimed.wanted.pkey is None and claimed.wanted.vf["trust"] is False


def test_device_that_cannot_have_a_fixed_value_says_that_a_rule_puts_it_in(ethernet: Node) -> None:
    ethernet.with_a_scalable_function()
    rule = {"use": ANY | {"vlans": [0]}, "fixed": {"max_tx_rate": 100, "mtu": 1500}}
    with pytest.raises(CNIError, match=r"a FabricPolicy rule .* option, but device mlx5_core"):
        claim(ethernet, rule, deviceID=SF)
    assert claim(ethernet, rule | {"fixed": {"mtu": 1400}}, deviceID=SF).record.mtu == 1400


def test_a_rule_fixes_values_of_its_own_devices_alone(ethernet: Node) -> None:
    rules = [
        {"use": {"devices": [{"pciAddresses": [address]}]}, "fixed": {"vlan": vlan}}
        for address, vlan in ((VF0, 100), (VF1, 200))
    ]
    for address, vlan in ((VF0, 100), (VF1, 200)):
        applied = claim(ethernet, *rules, deviceID=address).record.applied
        assert applied is not None and applied.vlan == vlan


def test_a_rule_puts_the_pkey_into_an_infiniband_vf_and_the_vlan_into_none(
    infiniband: Node,
) -> None:
    claimed = claim(infiniband, {"use": ANY, "fixed": {"vlan": 100, "pkey": "0x8001"}})
    assert claimed.wanted.pkey == 0x8001 and "vlan" not in claimed.wanted.vf


def test_what_the_definition_says_is_not_replaced(ethernet: Node) -> None:
    rule = {"use": ANY | {"vlans": [5]}, "fixed": {"vlan": 100, "vlanQoS": 3}}
    claimed = claim(ethernet, rule, VLAN=5)
    assert (claimed.wanted.vf["vlan"], claimed.wanted.vf["vlanQoS"]) == (5, 0)


def test_a_key_in_two_spellings_does_not_keep_a_fixed_value_out(ethernet: Node) -> None:
    rule = {"use": ANY | {"vlans": [0]}, "fixed": {"max_tx_rate": 100, "vlan": 100}}
    twice = {"MAX_TX_RATE": 7, "max_tx_rate": None, "VLAN": 0, "vlan": None}
    claimed = claim(ethernet, rule, **twice)
    assert claimed.wanted.vf["max_tx_rate"] == 100
    assert claimed.wanted.vf["vlan"] == 100


@pytest.mark.parametrize("option", [{"pkey": "0x8001"}, {"guid": GUID}], ids=str)
def test_option_of_infiniband_does_not_keep_fixed_values_from_a_vf_without_interface(
    ethernet: Node, option: dict[str, Any]
) -> None:
    ethernet.tree.bound(VF0, "vfio-pci")
    use = ANY | {"vlans": [0], "pkeys": ["*"], "guids": ["*"]}
    claimed = claim(ethernet, {"use": use, "fixed": {"max_tx_rate": 100}}, **option)
    assert claimed.wanted.vf["max_tx_rate"] == 100
    with pytest.raises(CNIError, match=r'"vlan": this is an Ethernet option'):
        claim(ethernet, {"use": use, "fixed": {"vlan": 100}}, **option)


def test_fixed_values_of_interfaces_are_not_for_a_vf_without_one(ethernet: Node) -> None:
    ethernet.tree.bound(VF0, "vfio-pci")
    rule = {"use": ANY | {"vlans": [0]}, "fixed": {"mtu": 1400, "promisc": False, "trust": False}}
    claimed = claim(ethernet, rule)
    assert claimed.wanted.mtu is None and claimed.wanted.vf["trust"] is False


def test_of_the_rules_left_the_first_that_fixes_a_key_counts(ethernet: Node) -> None:
    rules = (
        {"use": ANY, "fixed": {"vlan": 1}},
        {"use": ANY | {"macs": ["02:00:00:00:00:01"]}, "fixed": {"vlan": 2}},
    )
    claimed = claim(ethernet, *rules, mac="02:00:00:00:00:01")
    assert claimed.wanted.vf["vlan"] == 2
