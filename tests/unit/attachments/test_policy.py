"""Rules as a filter of candidates: an attachment gets a device that one rule has with the rest."""

from typing import Any

import pytest

from policy.allowance import NotAllowed
from policy.document import rules_of
from policy.rules import Policy
from tests.unit.attachments.choosing import OTHER, POD, ipoib, refusal, sriov
from tests.unit.deviceplugin.holding import Holding
from tests.unit.host import servers

A, B = servers.DGX_HCAS[:2]
VFS = servers.VFS_ETHERNET
MASTER = "enp59s0f1np0"


def policy(*uses: dict[str, Any], **options: Any) -> Policy:  # noqa: ANN401
    """A rule for the pod's namespace with each `use`; the first one has the options."""
    rules = [
        {"name": f"r{index}", "subjects": [{"namespaces": ["ml"]}], "use": use}
        for index, use in enumerate(uses)
    ]
    return Policy(rules=rules_of([rules[0] | options, *rules[1:]], "rules"))


def parents(*names: str, pkeys: tuple[str, ...] = ("0xffff",)) -> dict[str, Any]:
    return {"devices": [{"ifNames": list(names)}], "pkeys": list(pkeys)}


def test_auto_chooses_the_parent_that_a_rule_has(server: Holding) -> None:
    server.give(POD, {f"{A}-0": [A], f"{B}-0": [B]})
    assert ipoib(server, policy=policy(parents("ib1"))) == "ib1"


def test_parent_that_no_rule_has_is_refused_by_its_name(server: Holding) -> None:
    server.give(POD, {f"{A}-0": [A]})
    refused = refusal(ipoib, server, master="ib0", policy=policy(parents("ib1")))
    assert isinstance(refused, NotAllowed)
    assert (refused.code, refused.key, refused.value) == (121, "master", "ib0")
    assert refused.rules == ("r0",)


def test_pool_by_which_the_pod_holds_the_hca_is_as_good_as_a_selector(server: Holding) -> None:
    server.give(POD, {f"{A}-0": [A]}, resource="rdma/hca_a")
    use = {"pools": ["rdma/hca_?"], "pkeys": ["*"]}
    assert ipoib(server, policy=policy(use)) == "ib0"
    other = refusal(ipoib, server, policy=policy(use | {"pools": ["rdma/hca_b"]}))
    assert (other.code, '"use.devices"' in other.message) == (121, True)


def test_pkey_counts_only_on_the_parents_beside_it(server: Holding) -> None:
    server.give(POD, {f"{A}-0": [A], f"{B}-0": [B]})
    both = policy(parents("ib0", pkeys=("0x8001",)), parents("ib1"))
    assert ipoib(server, policy=both) == "ib1"  # silent: the parent's own, 0xffff
    refused = refusal(ipoib, server, policy=both, pkey="0x8001", master="ib1")
    assert isinstance(refused, NotAllowed)
    assert (refused.key, refused.rules) == ("master", ("r0",))
    refused = refusal(ipoib, server, policy=both, pkey="0x8009")
    assert isinstance(refused, NotAllowed) and refused.key == "pkey"


def test_fixed_pkey_is_asked_of_the_port(server: Holding) -> None:
    server.give(POD, {f"{A}-0": [A]})
    fixed = policy({"devices": ["*"]}, fixed={"pkey": "0x8123"})
    refused = refusal(ipoib, server, policy=fixed)
    assert refused.code == 7 and '"pkey": 0x8123 is not in the P_Key table' in refused.message
    full = policy({"devices": ["*"]}, fixed={"pkey": "0x7fff"})
    assert ipoib(server, policy=full) == "ib0"


def test_a_rule_fixes_values_of_its_own_parents_alone(server: Holding) -> None:
    """As of two rails, each with a partition of its own. The ports are members of 0xffff only."""
    server.give(POD, {f"{A}-0": [A], f"{B}-0": [B]})
    rails = [{"devices": [{"ifNames": [name]}]} for name in ("ib0", "ib1")]
    named = [
        {"name": f"r{index}", "subjects": [{"namespaces": ["ml"]}], "use": use, "fixed": fixed}
        for index, (use, fixed) in enumerate(
            zip(rails, ({"pkey": "0x8123"}, {"pkey": "0x7fff"}), strict=True)
        )
    ]
    both = Policy(rules=rules_of(named, "rules"))
    assert ipoib(server, policy=both, master="ib1") == "ib1"
    refused = refusal(ipoib, server, policy=both, master="ib0")
    assert refused.code == 7 and '"pkey": 0x8123 is' in refused.message
    assert ipoib(server, policy=both) == "ib1"


@pytest.mark.parametrize(("mtu", "code"), [(2044, 0), (2000, 0), (1999, 121)])
def test_mtu_of_the_parent_needs_no_rule(server: Holding, mtu: int, code: int) -> None:
    server.give(POD, {f"{A}-0": [A]})
    rules = policy(parents("ib0"), set={"mtu": ["2000-2043"]})
    if code:
        refused = refusal(ipoib, server, policy=rules, mtu=mtu)
        assert (refused.code, '"mtu": 1999 is not allowed' in refused.message) == (121, True)
    else:
        assert ipoib(server, policy=rules, mtu=mtu) == "ib0"


def test_proxy_arp_accept_ra_and_match_device_need_rules(server: Holding) -> None:
    server.give(POD, {f"{A}-0": [A]})
    rules = policy(parents("ib0"), set={"match_device": ["*"]})
    assert ipoib(server, policy=rules, master="ib0", match_device=False) == "ib0"
    assert refusal(ipoib, server, policy=rules, proxy_arp=True).code == 121
    assert refusal(ipoib, server, policy=rules, accept_ra=True).code == 121
    rules = policy(parents("ib0"), set={"accept_ra": [True]})
    assert ipoib(server, policy=rules, master="ib0", accept_ra=True) == "ib0"
    assert refusal(ipoib, server, policy=policy({}), match_device=False).code == 121


def test_vfs_of_a_master_are_those_that_a_rule_has(card: Holding) -> None:
    index = 1  # of the second VF at its PF
    rules = policy({"devices": [{"pfNames": [f"{MASTER}#{index}"]}]})
    assert sriov(card, master=MASTER, policy=rules) == VFS[1]
    refused = refusal(sriov, card, deviceID=VFS[0], policy=rules)
    assert isinstance(refused, NotAllowed)
    assert (refused.key, refused.value) == ("deviceID", VFS[0])


def test_vf_of_another_pod_stays_refused_where_a_rule_has_it(card: Holding) -> None:
    card.give(OTHER, {VFS[0]: [VFS[0]]})
    assert refusal(sriov, card, deviceID=VFS[0], policy=policy({"devices": ["*"]})).code == 120


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("trust", "on", {"trust": [True]}),
        ("spoofchk", "off", {"spoofchk": [False]}),
        ("promisc", True, {"promisc": [True]}),
        ("accept_ra", True, {"accept_ra": [True]}),
        ("allmulti", True, {"allmulti": ["*"]}),
        ("link_state", "enable", {"link_state": ["enable"]}),
        ("max_tx_rate", 0, {"max_tx_rate": [0]}),
        ("min_tx_rate", 10, {"min_tx_rate": ["0-10"], "max_tx_rate": [0]}),
        ("pfOnly", True, {"pfOnly": [True]}),
        ("match_device", False, {"match_device": [False]}),
    ],
)
def test_option_of_sriov_needs_a_rule(
    card: Holding, option: str, value: object, allowed: dict[str, Any]
) -> None:
    device = servers.VFS_ETHERNET_PF if option == "pfOnly" else VFS[0]
    config: dict[str, Any] = {"deviceID": device, option: value}
    refused = refusal(sriov, card, policy=policy({"devices": ["*"]}), **config)
    assert (refused.code, option in refused.message) == (121, True)
    assert sriov(card, policy=policy({"devices": ["*"]}, set=allowed), **config) == device


@pytest.mark.parametrize(
    ("option", "value"),
    [("trust", "off"), ("spoofchk", "on"), ("promisc", False), ("link_state", "auto")],
)
def test_safe_value_needs_no_rule(card: Holding, option: str, value: object) -> None:
    rules = policy({"devices": ["*"]})
    config: dict[str, Any] = {option: value}
    assert sriov(card, policy=rules, deviceID=VFS[0], **config) == VFS[0]


@pytest.mark.parametrize(
    ("config", "use", "key"),
    [
        ({"vlan": 5}, {"vlans": ["5-6"]}, "vlan"),
        ({"vlan": 5, "vlanQoS": 3}, {"vlans": ["5-6"]}, "vlanQoS"),
        ({"vlan": 5, "vlanProto": "802.1ad"}, {"vlans": ["5-6"]}, "vlanProto"),
        ({"mac": "02:00:00:00:00:01"}, {"macs": ["02:00:00:00:00:01"]}, "mac"),
        (
            {"runtimeConfig": {"mac": "02:00:00:00:00:01"}},
            {"macs": ["02:00:00:00:00:00-02:00:00:00:00:ff"]},
            "mac",
        ),
        ({"args": {"cni": {"mac": "02:00:00:00:00:01"}}}, {"macs": ["*"]}, "mac"),
        ({"guid": "02:00:00:00:00:00:00:01"}, {"guids": ["*"]}, "guid"),
        ({"args": {"cni": {"guid": "02:00:00:00:00:00:00:01"}}}, {"guids": ["*"]}, "guid"),
        (
            {"runtimeConfig": {"infinibandGUID": "02:00:00:00:00:00:00:01"}},
            {"guids": ["02:00:00:00:00:00:00:00-02:00:00:00:00:00:00:ff"]},
            "guid",
        ),
        ({"pkey": "0x8005"}, {"pkeys": ["0x8005"]}, "pkey"),
    ],
)
def test_what_an_attachment_is_on_needs_a_rule_wherever_it_is_written(
    card: Holding, config: dict[str, Any], use: dict[str, Any], key: str
) -> None:
    refused = refusal(sriov, card, deviceID=VFS[0], policy=policy({"devices": ["*"]}), **config)
    assert isinstance(refused, NotAllowed)
    options = {"set": {"vlanQoS": [3], "vlanProto": ["802.1ad"]}}
    rules = policy({"devices": ["*"]} | use, **options)
    assert sriov(card, deviceID=VFS[0], policy=rules, **config) == VFS[0]
    if key in ("vlanQoS", "vlanProto"):
        refused = refusal(
            sriov, card, deviceID=VFS[0], policy=policy({"devices": ["*"]} | use), **config
        )
        assert isinstance(refused, NotAllowed) and refused.key == key


def test_namespace_without_a_rule_has_the_settings_of_the_node(card: Holding) -> None:
    others = rules_of([{"name": "r", "subjects": [{"namespaces": ["x"]}]}], "rules")
    assert sriov(card, policy=Policy(rules=others), deviceID=VFS[0], trust="on") == VFS[0]
