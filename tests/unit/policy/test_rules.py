"""The rules of a node: safe without a file, changed by one, and never half read."""

from pathlib import Path

import msgspec
import pytest

from agent import settings
from base.documents import DocumentError
from cni.policy import rules
from cni.policy.rules import Policy
from cni.spec.errors import CNIError, Code


def write(tmp_path: Path, content: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(content)
    return path


def test_a_node_without_a_file_allows_nothing_that_is_unsafe(tmp_path: Path) -> None:
    assert rules.load(tmp_path / "config.yaml") == Policy()
    assert Policy().log_directories == Policy().resolv_conf_directories == ()
    assert Policy().ipam_directories == ()
    assert Policy().ipam_types == ("dhcp", "host-local", "static", "whereabouts")
    for name in ("unmatched_devices", "whole_pfs", "unassigned_devices", "private_ranges"):
        assert getattr(Policy(), name) is False


def test_the_file_changes_single_rules(tmp_path: Path) -> None:
    path = write(tmp_path, "policy: {whole_pfs: true, log_directories: [/var/log/x]}\nagent: {}\n")
    assert rules.load(path) == Policy(whole_pfs=True, log_directories=("/var/log/x",))
    assert settings.load(path).settings.policy == rules.load(path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("policy: {whole_pf: true}", 'policy.whole_pf: unknown key: did you mean "whole_pfs"?'),
        ("policy: {whole_pfs: 1}", "policy.whole_pfs"),
        ("policy: {log_directories: [logs]}", "policy.log_directories[0]: 'logs': write an abs"),
        ("policy: [whole_pfs]", "policy: expected keys with values"),
    ],
)
def test_a_mistake_is_told_by_its_key(tmp_path: Path, content: str, said: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(DocumentError) as refused:
        rules.load(path)
    assert said in str(refused.value)
    assert said in settings.load(path).mistakes["policy"]


@pytest.mark.parametrize("key", ["namespaceSelector", "serviceAccounts"])
def test_a_node_that_does_not_ask_the_api_server_takes_no_rule_that_only_it_can_match(
    tmp_path: Path, key: str
) -> None:
    subject = {key: {} if key == "namespaceSelector" else ["x"], "namespaces": ["a"]}
    rule = {"name": "r", "subjects": [{"namespaces": ["b"]}, subject]}
    with pytest.raises(DocumentError) as refused:
        rules.of({"rules": [rule]}, "config.yaml")
    assert f"policy.rules[0].subjects[1].{key}: only the API server knows" in str(refused.value)
    assert rules.of({"rules": [rule], "cluster": True}, "config.yaml").rules


def test_a_call_by_itself_is_not_made_under_rules_that_cannot_be_read(tmp_path: Path) -> None:
    path = write(tmp_path, "policy: {whole_pfs: perhaps}")
    with pytest.raises(CNIError) as refused:
        rules.on_node(path)()
    assert refused.value.code == Code.IO_FAILURE
    assert "nothing was done" in refused.value.message


def test_what_is_not_allowed_names_the_key_and_the_setting() -> None:
    error = rules.not_allowed('"pfOnly": true', "whole_pfs")
    assert error.code == Code.NOT_ALLOWED
    assert '"pfOnly": true is not allowed' in error.message
    assert '"policy.whole_pfs"' in error.message


def test_the_documentation_has_every_rule_with_its_default() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs/security.md").read_text()
    table = text.partition("## The rules of a node")[2].partition("## ")[0]
    cells = [[cell.strip() for cell in line.split("|")] for line in table.splitlines()]
    told = {row[1].strip("`"): row[2].strip("`") for row in cells if len(row) > 4 and "`" in row[1]}
    assert told == {
        key: "false" if value is False else f"[{', '.join(value)}]"
        for key, value in msgspec.structs.asdict(Policy()).items()
        if key != "rules"
    }
