"""The rules of an administrator: each key is read, and the error of a mistake names the key."""

import ipaddress
from pathlib import Path
from typing import Any

import pytest

from base import documents
from base.documents import DocumentError
from host.sysfs.selectors import Selector
from policy import document, rules, value_lists
from policy.document import LabelRequirement, Rule, Subject, rules_of
from policy.value_lists import EVERYTHING, NOTHING, Values

WHOLE = """
- name: team-a
  subjects:
    - namespaces: [team-a, "team-a-*"]
      namespaceSelector:
        matchLabels: {tier: gold}
        matchExpressions: [{key: k, operator: In, values: [v]}, {key: old, operator: DoesNotExist}]
  use:
    devices: [{pfNames: ["ens1f0#0-3"]}, {ifNames: [ib0]}]
    pools: ["rdma/hca_a"]
    pkeys: ["0x8001", "0x8010-0x801f"]
    vlans: [0, "100-199"]
    guids: ["02:00:00:00:00:00:00:00-02:00:00:00:00:00:00:ff"]
    macs: ["02:00:00:00:00:00-02:00:00:00:00:ff"]
    ipamTypes: [podfabric-ipam]
    networkNames: ["team-a-*"]
    ranges: ["10.1.0.0/16", "fd00::/64"]
    addressesPerAttachment: 2
    addressesPerPod: 4
    addressesPerNamespace: 100
  set:
    trust: [true]
    spoofchk: [false]
    mtu: ["72-4092"]
    max_tx_rate: ["0-10000"]
    hostPaths: [/var/log/podfabric]
  fixed: {pkey: "0x8001", vlan: 100, mtu: 4092}
"""


def read(text: str) -> tuple[Rule, ...]:
    return rules_of(documents.decode(text.encode(), "file"), "rules")


def test_every_key_of_a_rule_is_read() -> None:
    (rule,) = read(WHOLE)
    assert rule.name == rule.title == "team-a"
    assert rule.subjects == (
        Subject(
            Values(names=("team-a", "team-a-*")),
            (
                LabelRequirement("tier", "In", ("gold",)),
                LabelRequirement("k", "In", ("v",)),
                LabelRequirement("old", "DoesNotExist"),
            ),
        ),
    )
    mapped = int(ipaddress.IPv6Address("::ffff:10.1.0.0"))
    ipv6 = int(ipaddress.IPv6Address("fd00::"))
    assert rule.devices == (Selector(pfNames=("ens1f0#0-3",)), Selector(ifNames=("ib0",)))
    assert rule.use == {
        "pools": Values(names=("rdma/hca_a",)),
        "pkeys": Values(spans=((0x8001, 0x8001), (0x8010, 0x801F))),
        "vlans": Values(spans=((0, 0), (100, 199))),
        "guids": Values(spans=((2 << 56, (2 << 56) + 255),)),
        "macs": Values(spans=((2 << 40, (2 << 40) + 255),)),
        "ipamTypes": Values(names=("podfabric-ipam",)),
        "networkNames": Values(names=("team-a-*",)),
        "ranges": Values(spans=((mapped, mapped + 0xFFFF), (ipv6, ipv6 + (1 << 64) - 1))),
    }
    counts = {"addressesPerAttachment": 2, "addressesPerPod": 4, "addressesPerNamespace": 100}
    assert rule.counts == counts
    assert rule.allowed == {
        "trust": Values(spans=((1, 1),)),
        "spoofchk": Values(spans=((0, 0),)),
        "mtu": Values(spans=((72, 4092),)),
        "max_tx_rate": Values(spans=((0, 10000),)),
    }
    assert rule.host_paths == ("/var/log/podfabric",)
    assert rule.fixed == {"pkey": 0x8001, "vlan": 100, "mtu": 4092}


def test_a_rule_of_an_object_is_named_with_the_object() -> None:
    (rule,) = rules_of([{"name": "a", "subjects": [{"namespaces": ["*"]}]}], "spec.rules", "gold")
    assert rule.title == "gold/a"
    assert rule.use == {} and rule.allowed == {} and rule.fixed == {}
    assert rule.subjects == (Subject(EVERYTHING),)


def test_no_list_is_no_rule() -> None:
    assert rules_of(None, "rules") == rules_of([], "rules") == ()


def test_a_star_allows_every_value_of_its_kind() -> None:
    (rule,) = read(
        '[{name: a, subjects: [{namespaces: ["*"]}], use: {pkeys: [1, "*"], '
        'devices: ["*"], ranges: ["*"]}, set: {trust: ["*"], hostPaths: ["*"]}}]'
    )
    assert rule.use["pkeys"] == rule.use["ranges"] == EVERYTHING
    assert rule.allowed["trust"] == EVERYTHING
    assert rule.devices == (Selector(),)
    assert rule.host_paths == ("/",)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"nam": "b"}, 'rules[0].nam: unknown key: did you mean "name"?'),
        ({"name": "a b"}, "rules[0].name: 'a b': write at most 63 letters"),
        ({"name": 7}, "rules[0].name: 7: expected str"),
        ({"subjects": []}, "rules[0].subjects: is empty"),
        ({"subjects": [{}]}, "rules[0].subjects[0]: is empty"),
        ({"subjects": [{"namespaces": []}]}, "rules[0].subjects[0].namespaces: is empty"),
        ({"subjects": [{"pods": ["a"]}]}, "rules[0].subjects[0].pods: unknown key"),
        ({"subjects": None}, "rules[0].subjects: is empty"),
        ({"use": {"vlan": [1]}}, 'rules[0].use.vlan: unknown key: did you mean "vlans"?'),
        ({"use": {"vlans": 5}}, "rules[0].use.vlans: 5: expected a list"),
        ({"use": {"vlans": [4095]}}, "rules[0].use.vlans[0]: 4095: write a VLAN"),
        ({"use": {"vlans": [True]}}, "rules[0].use.vlans[0]: True: write a VLAN"),
        ({"use": {"vlans": ["9-7"]}}, "rules[0].use.vlans[0]: '9-7': ends before it begins"),
        ({"use": {"pkeys": ["0x8000"]}}, "rules[0].use.pkeys[0]: '0x8000': 0x8000 is out of"),
        ({"use": {"pkeys": ["0x18001"]}}, "rules[0].use.pkeys[0]"),
        ({"use": {"pkeys": ["8001"]}}, 'write "0x8001" if the digits are hexadecimal, "0x1f41" if'),
        ({"use": {"pkeys": ["8001-0x8002"]}}, 'write "0x8001" if'),
        ({"use": {"guids": ["02:00"]}}, "rules[0].use.guids[0]: '02:00': write a GUID"),
        ({"use": {"macs": ["x"]}}, "rules[0].use.macs[0]: 'x': write a MAC"),
        ({"use": {"ranges": ["10.0.0.1/8"]}}, "rules[0].use.ranges[0]: '10.0.0.1/8': "),
        ({"use": {"ranges": ["all"]}}, "rules[0].use.ranges[0]: 'all'"),
        ({"use": {"ipamTypes": [" x"]}}, "rules[0].use.ipamTypes[0]: ' x': write a name"),
        ({"use": {"ipamTypes": ["x" * 300]}}, "expected 1 to 256 characters"),
        ({"use": {"devices": [{"pfNames": ["a*"]}]}}, "rules[0].use.devices[0].pfNames[0]"),
        ({"use": {"devices": [{"pf": ["a"]}]}}, "rules[0].use.devices[0].pf: unknown key"),
        ({"use": {"addressesPerAttachment": -1}}, "rules[0].use.addressesPerAttachment: -1: "),
        ({"use": {"addressesPerNamespace": True}}, "rules[0].use.addressesPerNamespace: True"),
        ({"set": {"trusted": [True]}}, 'rules[0].set.trusted: unknown key: did you mean "trust"?'),
        ({"set": {"trust": ["on"]}}, "rules[0].set.trust[0]: 'on': write true or false"),
        ({"set": {"mtu": ["big"]}}, "rules[0].set.mtu[0]: 'big': write a number"),
        ({"set": {"hostPaths": ["logs"]}}, "rules[0].set.hostPaths[0]: 'logs': write an abs"),
        ({"set": {"hostPaths": ["/a/../b"]}}, "rules[0].set.hostPaths[0]: '/a/../b': write"),
        ({"fixed": {"pkey": "0x8001-0x8002"}}, "rules[0].fixed.pkey: '0x8001-0x8002': write one"),
        ({"fixed": {"link_state": "*"}}, "rules[0].fixed.link_state: '*': write one value"),
        ({"fixed": {"pfOnly": True}}, "rules[0].fixed.pfOnly: unknown key"),
        ({"use": {"vlans": list(range(257))}}, "rules[0].use.vlans: has 257 items, at most 256"),
    ],
)
def test_a_mistake_is_told_by_its_key(change: dict[str, Any], said: str) -> None:
    rule = {"name": "a", "subjects": [{"namespaces": ["x"]}], **change}
    with pytest.raises(DocumentError) as refused:
        rules_of([rule], "rules")
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ({"key": "k", "operator": "Near"}, ".operator: "),
        ({"operator": "Exists"}, ": "),
        ({"key": "k", "operator": "In"}, ".values: operator In needs 1 to 256 values"),
        (
            {"key": "k", "operator": "Exists", "values": ["v"]},
            ".values: operator Exists takes no values",
        ),
    ],
)
def test_a_mistake_in_a_label_selector_is_told(expression: dict[str, Any], said: str) -> None:
    subject = {"namespaceSelector": {"matchExpressions": [expression]}}
    with pytest.raises(DocumentError) as refused:
        rules_of([{"name": "a", "subjects": [subject]}], "rules")
    assert f"rules[0].subjects[0].namespaceSelector.matchExpressions[0]{said}" in str(refused.value)


@pytest.mark.parametrize("key", ["name", "subjects"])
def test_what_every_rule_needs_is_asked_for(key: str) -> None:
    rule: dict[str, Any] = {"name": "a", "subjects": [{"namespaces": ["x"]}]}
    del rule[key]
    with pytest.raises(DocumentError, match=rf"rules\[0\]\.{key}: is missing"):
        rules_of([rule], "rules")


def test_names_are_unique_and_lists_are_bounded() -> None:
    rule = {"name": "a", "subjects": [{"namespaces": ["x"]}]}
    with pytest.raises(DocumentError, match=r"rules\[1\]\.name: 'a': another rule has this name"):
        rules_of([rule, rule], "rules")
    with pytest.raises(DocumentError, match="has 257 items, at most 256 are allowed"):
        rules_of([rule | {"name": f"a{index}"} for index in range(257)], "rules")
    many = rule | {"subjects": [{"namespaces": ["x"]}] * (document.SUBJECTS + 1)}
    with pytest.raises(DocumentError, match=r"rules\[0\]\.subjects: has 65 items"):
        rules_of([many], "rules")


@pytest.mark.parametrize(
    ("selector", "labels", "selected"),
    [
        ({}, {}, True),
        ({"matchLabels": {"a": "1"}}, {"a": "1", "b": "2"}, True),
        ({"matchLabels": {"a": "1"}}, {"a": "2"}, False),
        ({"matchLabels": {"a": "1"}}, {}, False),
        ({"matchExpressions": [{"key": "a", "operator": "NotIn", "values": ["1"]}]}, {}, True),
        ({"matchExpressions": [{"key": "a", "operator": "Exists"}]}, {"a": ""}, True),
        ({"matchExpressions": [{"key": "a", "operator": "DoesNotExist"}]}, {"a": ""}, False),
    ],
)
def test_labels_are_selected_as_in_kubernetes(
    selector: dict[str, Any], labels: dict[str, str], selected: bool
) -> None:
    subject = {"namespaceSelector": selector}
    (rule,) = rules_of([{"name": "a", "subjects": [subject]}], "rules")
    requirements = rule.subjects[0].namespace_selector
    assert requirements is not None
    assert all(each.met_by(labels) for each in requirements) is selected


@pytest.mark.parametrize(
    ("pattern", "text", "same"),
    [
        ("team-a", "team-a", True),
        ("team-a", "team-ab", False),
        ("team-?", "team-a", True),
        ("team-?", "team-", False),
        ("*", "", True),
        ("a*b*c", "axxbyybc", True),
        ("a*b*c", "axxbyyb", False),
        ("[ab]", "a", False),
        (".*", "x", False),
    ],
)
def test_a_pattern_has_two_wildcards_and_nothing_else(pattern: str, text: str, same: bool) -> None:
    assert value_lists.fits(pattern, text) is same


def test_a_pattern_of_many_stars_takes_no_exponential_time() -> None:
    assert not value_lists.fits("a*" * 127 + "b", "a" * 253)


def test_spans_that_meet_are_one_and_a_run_must_lie_within_one() -> None:
    read_list = value_lists.read(["10-20", "21-30", 40], "number", "x")
    assert read_list.spans == ((10, 30), (40, 40))
    assert read_list.allows_all(15, 30) and not read_list.allows_all(30, 40)
    assert read_list.allows(40) and not read_list.allows(35) and not NOTHING.allows(40)


def test_a_network_is_of_one_family() -> None:
    ipv4 = int(ipaddress.IPv6Address("::ffff:10.0.0.1"))
    ipv6 = int(ipaddress.IPv6Address("fd00::1"))
    both = {"0.0.0.0/0": (True, False), "::/0": (False, True), "::ffff:0:0/96": (True, False)}
    both |= {"::/80": (False, False), "::8000:0:0/81": (False, False)}
    for text, expected in both.items():
        listed = value_lists.read([text], "network", "x")
        assert (listed.allows(ipv4), listed.allows(ipv6)) == expected, text


def test_the_part_of_the_nodes_file_has_the_same_rules(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    text = "[{name: a, subjects: [{namespaces: [x]}], use: {vlans: [1]}}]"
    path.write_text(f"policy: {{rules: {text}}}")
    assert rules.load(path).rules == read(text)
    path.write_text("policy: {rules: [{name: a}]}")
    with pytest.raises(DocumentError) as refused:
        rules.load(path)
    assert "config.yaml: policy.rules[0].subjects: is missing" in str(refused.value)
