"""Random rules and definitions against a plain model, through the plugins' own options."""

import ipaddress
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli.policy import WrittenDefinition, verdicts
from policy.document import rules_of
from policy.rules import Policy

PKEYS = st.sampled_from(["0x8001", "0x8002", "0x0001", "0x8005"])
NETWORKS = st.sampled_from(["10.1.0.0/24", "10.1.0.0/16", "10.2.0.0/24", "10.0.0.0/8"])
NAMES = st.sampled_from(["a-1", "a-2", "b-1"])
TYPES = st.sampled_from(["podfabric-ipam", "whereabouts", "static", "host-local"])
MACS = st.sampled_from(["02:00:00:00:00:01", "02:00:00:00:00:02", "02:00:00:00:01:00"])
SWITCHES = {"trust": (True, False), "spoofchk": (False, True), "promisc": (True, False)}
"""By option: the value that needs a rule, and the safe one."""


def some(values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(st.one_of(values, values, values, st.just("*")), max_size=2)


RULE = st.fixed_dictionaries(
    {
        "use": st.fixed_dictionaries(
            {},
            optional={
                "pkeys": some(st.one_of(PKEYS, st.just("0x8001-0x8003"))),
                "vlans": some(st.sampled_from([0, 5, "5-7"])),
                "macs": some(st.one_of(MACS, st.just("02:00:00:00:00:00-02:00:00:00:00:ff"))),
                "ipamTypes": st.one_of(st.just(["*"]), some(TYPES)),
                "networkNames": st.one_of(st.just(["*"]), some(st.one_of(NAMES, st.just("a-?")))),
                "ranges": some(NETWORKS),
                "addressesPerAttachment": st.integers(0, 2),
            },
        )
    },
    optional={
        "set": st.fixed_dictionaries({}, optional={key: some(st.booleans()) for key in SWITCHES}),
        "fixed": st.fixed_dictionaries({}, optional={"pkey": PKEYS}),
    },
)
IPAM = st.fixed_dictionaries(
    {"type": TYPES, "range": NETWORKS},
    optional={"network_name": NAMES, "second": NETWORKS},
)
DEFINITIONS = st.one_of(
    st.fixed_dictionaries(
        {"type": st.just("ipoib"), "master": st.just("ib0")}, optional={"pkey": PKEYS, "ipam": IPAM}
    ),
    st.fixed_dictionaries({"type": st.just("sriov")}, optional={"pkey": PKEYS, "ipam": IPAM}),
    st.fixed_dictionaries(
        {"type": st.just("sriov")},
        optional={
            "vlan": st.sampled_from([0, 5, 6, 8]),
            "mac": MACS,
            "ipam": IPAM,
            **{key: st.booleans() for key in SWITCHES},
        },
    ),
)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(st.lists(RULE, min_size=1, max_size=4), DEFINITIONS)
def test_random_definitions_are_judged_as_by_the_plain_model(
    rules: list[dict[str, Any]], definition: dict[str, Any]
) -> None:
    named = [
        {"name": f"r{index}", "subjects": [{"namespaces": ["ns"]}], **rule}
        for index, rule in enumerate(rules)
    ]
    policy = Policy(rules=rules_of(named, "rules"))
    written = WrittenDefinition("ns", "net", json.dumps({"name": "net", **_config(definition)}))
    (verdict,) = verdicts([written], policy, {})
    assert verdict.allowed or verdict.key, verdict  # no error but of the rules
    expected = [f"r{index}" for index, rule in enumerate(rules) if _has_all(rule, definition)]
    assert verdict.allowed == (bool(expected) and _may_set(rules, definition)), verdict
    if verdict.allowed:
        assert set(verdict.rules) <= set(expected)


def _config(definition: dict[str, Any]) -> dict[str, Any]:
    ipam = dict(definition.get("ipam", {}))
    if "second" in ipam:
        ipam["ipRanges"] = [{"range": ipam.pop("second")}]
    if ipam and ipam["type"] in ("static", "host-local"):
        ipam = {"type": ipam["type"]}  # their options are theirs
    return {**definition, "ipam": ipam} if ipam else definition


def _has_all(rule: dict[str, Any], definition: dict[str, Any]) -> bool:
    """Whether one rule has everything that the definition is on."""
    use = rule["use"]
    if "pkey" in definition:
        full = 0x8000 if definition["type"] == "ipoib" else 0
        pkey = int(definition["pkey"], 16) | full
        fixed = rule.get("fixed", {}).get("pkey")
        own = fixed is not None and pkey in (int(fixed, 16), int(fixed, 16) | 0x8000)
        if not own and not _has_number(use.get("pkeys", ()), pkey):
            return False
    if "vlan" in definition and not _has_number(use.get("vlans", ()), definition["vlan"]):
        return False
    if "mac" in definition and not _has_mac(use.get("macs", ()), definition["mac"]):
        return False
    return "ipam" not in definition or _has_addresses(use, definition["ipam"])


def _has_addresses(use: dict[str, Any], ipam: dict[str, Any]) -> bool:
    types = use.get("ipamTypes", ())
    if ipam["type"] not in types and "*" not in types:
        return False
    if ipam["type"] in ("static", "host-local"):
        return True
    name, names = ipam.get("network_name", ""), use.get("networkNames", ())
    fits = name in names or "*" in names or ("a-?" in names and name.startswith("a-"))
    if name and not fits:
        return False
    ranges = [ipam["range"], *([ipam["second"]] if "second" in ipam else [])]
    if len(ranges) > use.get("addressesPerAttachment", 9):
        return False
    listed = use.get("ranges", ())
    return "*" in listed or all(
        any(_network(each).subnet_of(_network(item)) for item in listed) for each in ranges
    )


def _network(text: str) -> ipaddress.IPv4Network:
    return ipaddress.IPv4Network(text)


def _has_number(items: list[Any], number: int) -> bool:
    for item in items:
        first, _, last = str(item).partition("-")
        if item == "*" or int(first, 0) <= number <= int(last or first, 0):
            return True
    return False


def _has_mac(items: list[str], mac: str) -> bool:
    return any(
        item in ("*", mac) or ("-" in item and mac.startswith("02:00:00:00:00:")) for item in items
    )


def _may_set(rules: list[dict[str, Any]], definition: dict[str, Any]) -> bool:
    """Whether every unsafe option is in `set` of some rule."""
    for key, (unsafe, _) in SWITCHES.items():
        if definition.get(key) is unsafe:
            listed = [item for rule in rules for item in rule.get("set", {}).get(key, ())]
            if "*" not in listed and not any(item is unsafe for item in listed):
                return False
    return True
