"""`podfabric policy check`: what rules would deny, for which namespace, and by which rule."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.cli.commands import Shell
from tests.unit.host import servers


@pytest.fixture
def shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Shell:
    return Shell(servers.dgx(tmp_path), monkeypatch, capsys)


def definition(namespace: str = "team-a", name: str = "net", **config: Any) -> dict[str, Any]:  # noqa: ANN401
    return {
        "apiVersion": "k8s.cni.cncf.io/v1",
        "kind": "NetworkAttachmentDefinition",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"config": json.dumps({"cniVersion": "1.0.0", "name": name, **config})},
    }


def policy(*rules: dict[str, Any], name: str = "gold") -> dict[str, Any]:
    return {"kind": "FabricPolicy", "metadata": {"name": name}, "spec": {"rules": list(rules)}}


def rule(name: str, namespace: str, **more: Any) -> dict[str, Any]:  # noqa: ANN401
    return {"name": name, "subjects": [{"namespaces": [namespace]}], **more}


IPOIB = {"type": "ipoib", "master": "ib0"}
OF_RAILS = [{"network_name": "own"}, {"type": "static"}]
A = rule("a", "team-a", use={"pkeys": ["0x8001-0x8003"], "ipamTypes": ["podfabric-ipam"]})
B = rule("b", "team-b", use={"pkeys": ["0x8003"]}, fixed={"pkey": "0x0009"})


def write(tmp_path: Path, *documents: dict[str, Any], name: str = "all.yaml") -> str:
    path = tmp_path / name
    path.write_text(yaml.safe_dump_all(documents))
    return str(path)


def test_the_document_shows_what_is_printed(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    use = {"ipamTypes": ["podfabric-ipam"]}
    rules = [
        rule("team-a", "team-a", use={**use, "pkeys": ["0x8001", "0x8003"]}),
        rule("team-b", "team-b", use={**use, "pkeys": ["0x8002-0x8003"]}),
    ]
    namespaces = [
        {"kind": "Namespace", "metadata": {"name": name}} for name in ("default", "kube-system")
    ]
    training = [
        definition(team, "training", **IPOIB, pkey="0x8001") for team in ("team-a", "team-b")
    ]
    write(tmp_path, *training, *namespaces, name="definitions.yaml")
    write(tmp_path, policy(*rules), name="policies.yaml")
    shell.as_shown("podfabric policy check definitions.yaml policies.yaml")


def test_what_is_refused_is_told_with_key_value_and_rules(shell: Shell, tmp_path: Path) -> None:
    file = write(
        tmp_path,
        policy(A, B),
        definition(**IPOIB, pkey="0x8002"),
        definition(name="other", **IPOIB, pkey="0x8009"),
    )
    printed = shell("policy", "check", file, "--output", "json")
    assert printed.code == 1
    first, second = printed.document()
    assert (first["allowed"], first["rules"]) == (True, ["gold/a"])
    assert (second["definition"], second["namespace"]) == ("team-a/other", "team-a")
    assert (second["allowed"], second["key"], second["value"]) == (False, "pkey", "0x8009")
    assert second["rules"] == ["gold/a"]
    text = shell("policy", "check", file).out
    assert "refused" in text and '"pkey": 0x8009 is not allowed' in text


def test_a_definition_is_judged_for_other_namespaces_too(shell: Shell, tmp_path: Path) -> None:
    file = write(tmp_path, policy(A, B), definition(**IPOIB, pkey="0x8001"))
    printed = shell("policy", "check", file, "-n", "team-b", "-n", "free", "-o", "json")
    judged = {each["namespace"]: each for each in printed.document()}
    assert {name: each["allowed"] for name, each in judged.items()} == {
        "team-a": True,
        "team-b": False,
        "free": True,
    }
    assert judged["free"]["rules"] == ["config.yaml"]


def test_labels_come_from_namespaces_in_the_files(shell: Shell, tmp_path: Path) -> None:
    gold = {"namespaceSelector": {"matchLabels": {"tier": "gold"}}}
    file = write(
        tmp_path,
        policy({"name": "r", "subjects": [gold], "use": {"pkeys": ["0x8001"]}}),
        {"kind": "Namespace", "metadata": {"name": "team-a", "labels": {"tier": "gold"}}},
        {"kind": "Namespace", "metadata": {"name": "team-b"}},
        definition("team-a", **IPOIB, pkey="0x8002"),
        definition("team-b", **IPOIB, pkey="0x8002"),
    )
    judged = shell("policy", "check", file, "-o", "json").document()
    assert [each["allowed"] for each in judged] == [False, True]


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"type": "sriov", "trust": "on"}, "trust"),
        ({"type": "sriov", "vlan": 3}, "vlan"),
        ({"type": "ib-sriov", "guid": "02:00:00:00:00:00:00:01"}, "guid"),
        ({"plugins": [{"type": "sriov", "spoofchk": "off"}, {"type": "rdma"}]}, "spoofchk"),
        ({**IPOIB, "ipam": {"type": "static"}}, "ipam.type"),
        ({**IPOIB, "ipam": {"type": "podfabric-ipam", "range": "10.0.0.0/8"}}, "ipam.range"),
        ({**IPOIB, "ipam": {"type": "nv-ipam", "poolName": "theirs"}}, "ipam.poolName"),
        (
            {**IPOIB, "rails": "all", "ipam": {"type": "podfabric-ipam", "rails": OF_RAILS}},
            "ipam.type",
        ),
        ({"type": "macvlan", "ipam": {"type": "podfabric-ipam", "range": "10.0.0.0/8"}}, "ipam.r"),
    ],
)
def test_every_plugin_is_judged(
    shell: Shell, tmp_path: Path, config: dict[str, Any], key: str
) -> None:
    types = ["podfabric-ipam", "nv-ipam"]
    rules = policy(A | {"use": {**A["use"], "ipamTypes": types, "networkNames": ["own"]}})
    file = write(tmp_path, rules, definition(**config))
    judged = shell("policy", "check", file, "-o", "json").document()
    assert judged[-1]["allowed"] is False and judged[-1]["key"].startswith(key)


def test_a_config_yaml_has_the_rule_for_pods_of_no_other_rule(shell: Shell, tmp_path: Path) -> None:
    file = write(tmp_path, definition(**IPOIB, match_device=False))
    assert shell("policy", "check", file).code == 1
    own = write(tmp_path, {"policy": {"set": {"match_device": [False]}}}, name="config.yaml")
    assert shell("policy", "check", file, own).code == 0


def test_a_list_of_kubectl_is_read(shell: Shell, tmp_path: Path) -> None:
    listed = {"kind": "List", "items": [policy(A), definition(**IPOIB, pkey="0x8009")]}
    assert shell("policy", "check", write(tmp_path, listed)).code == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("kind: FabricPolicy\nspec: {rules: [{name: a}]}", "spec.rules[0].subjects: is missing"),
        ("a: [", "neither YAML nor JSON"),
        ("- 5", "expected keys with values"),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error(
    shell: Shell, tmp_path: Path, content: str, said: str
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    printed = shell("policy", "check", str(path))
    assert (printed.code, said in printed.err) == (1, True), printed.err
    assert shell("policy", "check", str(tmp_path / "missing.yaml")).code == 1


def test_a_definition_that_is_wrong_in_itself_is_refused_with_its_error(
    shell: Shell, tmp_path: Path
) -> None:
    file = write(tmp_path, definition(**IPOIB, pkey="wrong"))
    (judged,) = shell("policy", "check", file, "-o", "json").document()
    assert (judged["allowed"], '"pkey": "wrong"' in judged["said"]) == (False, True)
