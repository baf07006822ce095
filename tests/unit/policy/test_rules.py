"""The rules of a node: safe without a file, changed by one, and never half read."""

from pathlib import Path

import pytest
import yaml

from agent import settings
from base.documents import DocumentError
from base.pod import Pod
from cni.spec.config import SERVED
from cni.spec.errors import CNIError, Code
from policy import allowance, document, rules
from policy.allowance import NotAllowed
from policy.rules import Policy


def write(tmp_path: Path, content: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(content)
    return path


def test_a_node_without_a_file_allows_nothing_that_is_unsafe(tmp_path: Path) -> None:
    assert rules.load(tmp_path / "config.yaml") == Policy()
    mine = allowance.of_pod(Policy(), Pod("a", "p"))
    assert mine.host_paths == ()
    assert mine.has_every_device
    for ipam_type in (*SERVED, "dhcp", "host-local", "static"):
        mine.using("ipamTypes", ipam_type, "ipam.type", ipam_type)
    with pytest.raises(NotAllowed):
        mine.using("ipamTypes", "bridge", "ipam.type", "bridge")
    for key in ("pfOnly", "unassigned_devices", "private_ranges"):
        assert not mine.may(key, True)
    assert mine.may("match_device", True) and not mine.may("match_device", False)
    assert mine.may("trust", True)


def test_the_file_changes_single_keys(tmp_path: Path) -> None:
    text = "policy: {set: {pfOnly: [true], hostPaths: [/x]}, fixed: {mtu: 9000}}\nagent: {}\n"
    path = write(tmp_path, text)
    mine = allowance.of_pod(rules.load(path), Pod("a", "p"))
    assert mine.may("pfOnly", True) and not mine.may("unassigned_devices", True)
    assert (mine.host_paths, mine.fixed("mtu")) == (("/x",), 9000)
    mine.using("ipamTypes", "static", "ipam.type", "static")
    assert settings.load(path).settings.policy == rules.load(path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("policy: {sets: {}}", 'policy.sets: unknown key: did you mean "set"?'),
        ("policy: {set: {pfOnly: 1}}", "policy.set.pfOnly: 1: expected"),
        ("policy: {set: {hostPaths: [logs]}}", "policy.set.hostPaths[0]: 'logs': write an abs"),
        ("policy: {use: [pkeys]}", "policy.use: expected keys with values"),
        ("policy: [set]", "policy: expected keys with values"),
    ],
)
def test_a_mistake_is_told_by_its_key(tmp_path: Path, content: str, said: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(DocumentError) as refused:
        rules.load(path)
    assert said in str(refused.value)
    assert said in settings.load(path).mistakes["policy"]


def test_a_node_takes_no_rule_that_only_the_api_server_can_match() -> None:
    subject = {"namespaceSelector": {}, "namespaces": ["a"]}
    rule = {"name": "r", "subjects": [{"namespaces": ["b"]}, subject]}
    with pytest.raises(DocumentError) as refused:
        rules.of({"rules": [rule]}, "config.yaml")
    assert "policy.rules: namespaceSelector works only in a FabricPolicy" in str(refused.value)


def test_a_call_by_itself_is_not_made_under_rules_that_cannot_be_read(tmp_path: Path) -> None:
    path = write(tmp_path, "policy: {set: perhaps}")
    with pytest.raises(CNIError) as refused:
        rules.on_node(path)()
    assert refused.value.code == Code.IO_FAILURE
    assert "nothing was done" in refused.value.message


def test_the_documentation_has_every_key_whose_default_is_not_all() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs/operate/security.md").read_text()
    table = text.partition("## The rule of a node")[2].partition("## ")[0]
    cells = [[cell.strip() for cell in line.split("|")] for line in table.splitlines()]
    told = {row[1].strip("`"): row[2].strip("`") for row in cells if len(row) > 4 and "`" in row[1]}
    assert told.pop("cluster") == "false"
    assert {key: yaml.safe_load(default) for key, default in told.items()} == {
        f"{part}.{key}": items
        for part, keys in document._OF_NODE.items()
        for key, items in keys.items()
        if items != ["*"]
    }
