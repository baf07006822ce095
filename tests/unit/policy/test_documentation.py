"""option-rows.md has a row for every option of every plugin: its rule and its test.

docs/use/policy.md has every key of a rule.
"""

import re
from collections import defaultdict

import msgspec
import pytest
import yaml

from cni.ipoib.options import KNOWN as IPOIB
from cni.macvlan.options import KNOWN as MACVLAN
from cni.sriov.options import KNOWN as SRIOV
from cni.sriov.options import _SriovRuntimeConfig
from ipam.config.options import ArgumentIPs, IpamKeys, RuntimeIPs
from ipam.nv_ipam.translate import _PodWishes, _PoolNames
from policy import document, value_lists
from policy.document import rules_of
from tests.runtime import CHECKOUT

TEXT = (CHECKOUT / "docs/use/policy.md").read_text()
TABLE = [
    [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    for line in (CHECKOUT / "tests/unit/policy/option-rows.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| plugin")
]


def written(struct: type[msgspec.Struct], where: str = "") -> set[str]:
    """The keys of a struct as users write them."""
    return {f"{where}{field.encode_name}" for field in msgspec.structs.fields(struct)}


OPTIONS = {
    "ipoib": set(IPOIB),
    "macvlan": {*MACVLAN, "runtimeConfig.mac"},
    "sriov": set(SRIOV) | written(_SriovRuntimeConfig, "runtimeConfig."),
    "podfabric-ipam": written(IpamKeys)
    | written(RuntimeIPs, "runtimeConfig.")
    | written(ArgumentIPs, "args.cni."),
    "nv-ipam": written(_PoolNames) | written(_PodWishes, "args.cni.") | {"runtimeConfig.ips"},
}


@pytest.mark.parametrize("plugin", OPTIONS)
def test_every_option_of_every_plugin_has_one_row(plugin: str) -> None:
    told = [key for row in TABLE if row[0] == plugin for key in re.findall(r"`(.+?)`", row[1])]
    assert sorted(told) == sorted(OPTIONS[plugin])


def test_every_key_of_a_rule_is_in_a_row() -> None:
    told: dict[str, set[str]] = defaultdict(set)
    for row in TABLE:
        for part, key in re.findall(r"`(use|set|fixed)\.(\w+)`", row[3]):
            told[part].add(key)
    assert told["set"] == {*document.SETTABLE, "hostPaths"}
    assert told["fixed"] == set(document.FIXABLE)
    assert told["use"] == {"devices", *document.USE, *document.COUNTS}


def keys_of_page(heading: str) -> dict[str, str]:
    """The rows and list items below a heading, by the keys that they begin with."""
    lines = re.split(r"\n###? ", TEXT.partition(f"\n### {heading}\n")[2])[0].splitlines()
    found = [re.match(r"[|-] ((?:`\w+`(?:, )?)+)", line) for line in lines]
    return {key: each.string for each in found if each for key in re.findall(r"`(\w+)`", each[1])}


def test_the_page_has_every_key_of_a_rule() -> None:
    assert set(keys_of_page("Use")) == {"devices", *document.USE, *document.COUNTS}
    told = keys_of_page("Set and fixed")
    assert set(told) == {*document.SETTABLE, "hostPaths"}
    fixed = {key for key, line in told.items() if line.endswith("| yes |")}
    assert fixed | {"pkey", "vlan"} == set(document.FIXABLE)
    assert "`fixed` also has `pkey` and `vlan`" in TEXT


def test_every_option_with_authority_names_a_test_that_exists() -> None:
    for row in TABLE:
        if row[3].startswith("none"):
            continue
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row[4])
        assert named, row
        for file, name in named:
            assert f"def {name}(" in (CHECKOUT / file).read_text(), row


def test_every_line_of_the_threat_model_names_its_rule_and_a_test_that_exists() -> None:
    text = (CHECKOUT / "docs/operate/security.md").read_text()
    section = text.partition("### What rules keep from a tenant")[2].partition("### ")[0]
    rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("| ")][1:]
    assert rows
    for _, rule, test in rows:
        assert rule.strip()
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", test)
        assert named, rule
        for file, name in named:
            assert f"def {name}(" in (CHECKOUT / file).read_text(), test


def test_the_limits_are_those_of_the_code() -> None:
    assert (
        f"at most {document.RULES} rules, a rule {document.SUBJECTS} subjects, a list "
        f"{value_lists.ITEMS} items, an item {value_lists.LONGEST} characters"
    ) in TEXT


def test_the_examples_are_valid() -> None:
    (first,) = re.findall(r"```yaml\n( +apiVersion: fabric.*?)```", TEXT, re.DOTALL)
    assert rules_of(yaml.safe_load(first)["spec"]["rules"], "rules")
    blocks = re.findall(r"```yaml\n(policy:\n.*?)```", TEXT, re.DOTALL)
    assert blocks
    for block in blocks:
        assert rules_of(yaml.safe_load(block)["policy"]["rules"], "rules")
