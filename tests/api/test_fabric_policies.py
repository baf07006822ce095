"""The API server refuses FabricPolicies that an agent could not use, and its message names the
key."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from base.documents import DocumentError
from policy import document
from tests.api.server import ApiServer, Document
from tests.runtime import CHECKOUT
from tests.waiting import until

EXAMPLES = sorted((CHECKOUT / "netattach-examples/policy").glob("*.yaml"))
KIND = "/apis/fabric.podfabric.io/v1alpha1/fabricpolicies"
RULE: Document = {
    "name": "team-a",
    "subjects": [
        {
            "namespaces": ["team-a", "team-a-*"],
            "namespaceSelector": {
                "matchLabels": {"tier": "gold"},
                "matchExpressions": [{"key": "k", "operator": "In", "values": ["v"]}],
            },
        }
    ],
    "use": {
        "devices": [{"pfNames": ["ens1f0#0-3"]}, {"ifNames": ["ib0"]}, {}],
        "pools": ["rdma/hca_a"],
        "pkeys": ["0x8001", "0x8010-0x801f", 32769],
        "vlans": [0, "100-199"],
        "guids": ["02:00:00:00:00:00:00:00-02:00:00:00:00:00:00:ff"],
        "macs": ["02:00:00:00:00:00-02:00:00:00:00:FF"],
        "ipamTypes": ["podfabric-ipam"],
        "networkNames": ["team-a-*"],
        "ranges": ["10.1.0.0/16", "2001:db8::/64", "10.9.9.9"],
        "addressesPerAttachment": 2,
        "addressesPerPod": 4,
        "addressesPerNamespace": 100,
    },
    "set": {
        "trust": [True],
        "spoofchk": ["*"],
        "mtu": ["72-4092", 9000],
        "max_tx_rate": ["0-10000"],
        "link_state": ["auto"],
        "hostPaths": ["/var/log/podfabric"],
    },
    "fixed": {"pkey": "0x8001", "vlan": 100, "mtu": 4092, "trust": True},
}


def policy(*rules: object) -> Document:
    return {
        "apiVersion": "fabric.podfabric.io/v1alpha1",
        "kind": "FabricPolicy",
        "metadata": {"name": "kinds"},
        "spec": {"rules": list(rules)},
    }


def changed(path: str, value: object) -> Document:
    """The rule with another value at a path such as "use.pkeys.0"."""
    rule = copy.deepcopy(RULE)
    *parents, last = (int(each) if each.isdecimal() else each for each in path.split("."))
    inner: Any = rule
    for parent in parents:
        inner = inner[parent]
    inner[last] = value
    return rule


def create(server: ApiServer, *rules: object) -> tuple[int, str]:
    """The status and message of a create with dry-run."""
    query = "?dryRun=All&fieldValidation=Strict"
    status, answer = server.send("POST", f"{KIND}{query}", policy(*rules))
    return status, answer.get("message", "")


@pytest.fixture(scope="module", autouse=True)
def _in_force(server: ApiServer) -> None:
    """Wait until the server applies the policy of ranges, some time after it is stored."""
    backwards = changed("use.vlans", ["9-1"])
    until(lambda: create(server, backwards)[0] == 422, what="refusal of a range", pause=0.2)


def test_a_policy_with_every_key_is_admitted_and_stored_as_it_is(server: ApiServer) -> None:
    stored = server.make(KIND, policy(RULE, changed("name", "team-b")))
    server.send("DELETE", f"{KIND}/kinds")
    assert stored["spec"] == policy(RULE, changed("name", "team-b"))["spec"]
    assert document.rules_of([RULE], "here", "kinds")[0].title == "kinds/team-a"


def test_the_schema_has_every_key_that_the_agent_reads(server: ApiServer) -> None:
    everything = copy.deepcopy(RULE)
    of_kind = {"switch": ["*"], "number": ["1-2"], "name": ["n"]}
    everything["set"] = {key: of_kind[kind] for key, kind in document.SETTABLE.items()}
    one = {"switch": True, "number": 1, "name": "n", "pkey": "0x8001", "vlan": 1}
    everything["fixed"] = {key: one[kind] for key, kind in document.FIXABLE.items()}
    assert create(server, everything)[0] == 201


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: str(path.stem))
def test_the_policies_of_the_examples_are_admitted(server: ApiServer, example: Path) -> None:
    (found,) = [
        each for each in yaml.safe_load_all(example.read_text()) if each["kind"] == "FabricPolicy"
    ]
    assert create(server, *found["spec"]["rules"]) == (201, "")


MISTAKES = [
    ("name", "a b", "name"),
    ("name", "-a", "name"),
    ("name", "n" * 64, "name"),
    ("subjects", [], "subjects"),
    ("subjects", [{}], "subjects[0]"),
    ("subjects.0.namespaces", [], "namespaces"),
    ("subjects.0.namespaces", [""], "namespaces[0]"),
    ("subjects.0.namespaces", ["a "], "namespaces[0]"),
    ("subjects.0.namespaces", "team-a", "namespaces"),
    ("subjects.0.accounts", ["a"], "accounts"),
    ("subjects.0.namespaceSelector.matchExpressions.0.operator", "Is", "operator"),
    ("subjects.0.namespaceSelector.matchExpressions.0.operator", "Exists", "values"),
    ("subjects.0.namespaceSelector.matchExpressions.0.values", [], "values"),
    ("subjects.0.namespaceSelector.matchExpressions.0.key", "", "key"),
    ("use.devices.0.pfNames", [], "pfNames"),
    ("use.devices.0.pfNames", ["ens1f0#x"], "pfNames[0]"),
    ("use.devices.0.pfNames", ["ens1f0#3-1"], "pfNames"),
    ("use.devices.0.pfNames", ["ens1f0#70000"], "pfNames"),
    ("use.devices.0.pfNames", ["ens*"], "pfNames[0]"),
    ("use.devices.0.rootDevices", ["0000:86:00.0#3-1"], "rootDevices"),
    ("use.devices.0.vendors", ["mellanox"], "vendors[0]"),
    ("use.devices.0.pciAddresses", ["86:0"], "pciAddresses[0]"),
    ("use.devices.0.linkTypes", ["ib"], "linkTypes[0]"),
    ("use.devices.0.pKeys", ["0x8000"], "pKeys[0]"),
    ("use.devices.0.parents", ["ib0"], "parents"),
    ("use.pkeys", ["0x0"], "pkeys[0]"),
    ("use.pkeys", ["0x8000"], "pkeys[0]"),
    ("use.pkeys", [32768], "pkeys[0]"),
    ("use.pkeys", [65536], "pkeys[0]"),
    ("use.pkeys", [0], "pkeys[0]"),
    ("use.pkeys", ["0x12345"], "pkeys[0]"),
    ("use.pkeys", ["0x801f-0x8010"], "use.pkeys"),
    ("use.pkeys", ["0x8001-0x7"], "use.pkeys"),
    ("use.vlans", [4095], "vlans[0]"),
    ("use.vlans", ["1-4095"], "vlans[0]"),
    ("use.vlans", [-1], "vlans[0]"),
    ("use.vlans", [True], "vlans[0]"),
    ("use.vlans", [1.5], "vlans[0]"),
    ("use.vlans", ["199-100"], "use.vlans"),
    ("use.guids", ["02:00:00:00:00:00:00"], "guids[0]"),
    (
        "use.guids",
        ["02:00:00:00:00:00:00:ff-02:00:00:00:00:00:00:0A"],
        "use.guids",
    ),
    ("use.macs", ["02-00-00-00-00-00"], "macs[0]"),
    ("use.macs", ["02:00:00:00:00:01-02:00:00:00:00:00"], "use.macs"),
    ("use.ipamTypes", [""], "ipamTypes[0]"),
    ("use.ranges", ["10.1.0.1/16"], "ranges[0]"),
    ("use.ranges", ["10.1.0.0/33"], "ranges[0]"),
    ("use.ranges", ["10.1.0.0-10.1.0.9"], "ranges[0]"),
    ("use.addressesPerAttachment", -1, "addressesPerAttachment"),
    ("use.addressesPerPod", -1, "addressesPerPod"),
    ("use.addressesPerNamespace", "9", "addressesPerNamespace"),
    ("use.addressesPerNamespace", (1 << 24) + 1, "addressesPerNamespace"),
    ("use.parents", ["ib0"], "parents"),
    ("set.trsut", [True], "trsut"),
    ("set.trust", ["on"], "trust[0]"),
    ("set.trust", True, "trust"),
    ("set.mtu", ["9000-1500"], "set.mtu"),
    ("set.mtu", ["many"], "mtu[0]"),
    ("set.mtu", [-1], "mtu[0]"),
    ("set.hostPaths", ["var/log"], "hostPaths[0]"),
    ("set.hostPaths", ["/var/../etc"], "hostPaths[0]"),
    ("fixed.pkey", "0x8000", "fixed.pkey"),
    ("fixed.pkey", "0x8001-0x8002", "fixed.pkey"),
    ("fixed.vlan", 4095, "fixed.vlan"),
    ("fixed.mtu", "1-2", "fixed.mtu"),
    ("fixed.trust", "*", "fixed.trust"),
    ("fixed.link_state", "*", "fixed.link_state"),
    ("fixed.pfOnly", True, "pfOnly"),
    ("fixed", {"vlanQoS": 3}, "vlanQoS"),
    ("fixed", {"vlanProto": "802.1ad"}, "vlanProto"),
]


@pytest.mark.parametrize(("path", "value", "key"), MISTAKES)
def test_a_mistake_is_refused_by_the_server_and_by_the_agent(
    server: ApiServer, path: str, value: object, key: str
) -> None:
    rule = changed(path, value)
    with pytest.raises(DocumentError):
        document.rules_of([rule], "here")
    status, message = create(server, rule)
    assert status in (400, 422), message
    assert key in message


def test_two_rules_of_one_name_are_refused(server: ApiServer) -> None:
    status, message = create(server, RULE, RULE)
    assert (status, "rules[1]" in message, "team-a" in message) == (422, True, True)


@pytest.mark.parametrize("key", ["name", "subjects"])
def test_a_rule_without_a_name_or_subjects_is_refused(server: ApiServer, key: str) -> None:
    rule = {name: value for name, value in RULE.items() if name != key}
    status, message = create(server, rule)
    assert (status, f"rules[0].{key}" in message) == (422, True)


_TEXTS = st.text(st.sampled_from("*?-,#/.:0189afxX ~é"), max_size=12)
_ITEMS = st.one_of(
    st.integers(-1, 70000),
    st.booleans(),
    _TEXTS,
    st.sampled_from(["*", "1-2", "2-1", "0x8001", "0x1-0x8001", "10.0.0.0/8", "::/0", "/x"]),
)
_LISTS = st.lists(_ITEMS, max_size=3)


def _objects(keys: Callable[[], list[str]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(keys()), _LISTS, max_size=3)


_USES = ["pools", "pkeys", "vlans", "guids", "macs", "ipamTypes", "networkNames", "ranges"]
_SELECTED = ["vendors", "drivers", "pciAddresses", "pfNames", "rootDevices", "ifNames", "pKeys"]
_RULES = st.fixed_dictionaries(
    {
        "name": st.one_of(st.just("r"), _TEXTS),
        "subjects": st.lists(_objects(lambda: ["namespaces"]), max_size=2),
    },
    optional={
        "use": st.one_of(
            _objects(lambda: _USES),
            st.builds(lambda each: {"devices": [each]}, _objects(lambda: _SELECTED)),
        ),
        "set": _objects(lambda: [*document.SETTABLE, "hostPaths"]),
        "fixed": st.dictionaries(st.sampled_from(sorted(document.FIXABLE)), _ITEMS, max_size=2),
    },
)


@settings(
    max_examples=400,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(rule=_RULES)
def test_agent_reads_every_policy_that_the_server_admits(server: ApiServer, rule: Document) -> None:
    status, message = create(server, rule)
    try:
        document.rules_of([rule], "here")
    except DocumentError as error:
        assert status != 201, f"the agent: {error}"
    assert status in (201, 400, 422), message
