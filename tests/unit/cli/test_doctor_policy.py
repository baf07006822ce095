"""Doctor looks at the rules in config.yaml, and at those of the cluster."""

import json
from pathlib import Path
from typing import Any

import pytest

from base.paths import Paths
from cli import doctor
from cli.checks import Finding
from node.state import ThisNode
from policy.stored_policies import ClusterPolicies, StoredPolicy, save
from tests.unit.host import servers

BOOT = "this boot"


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    made = servers.dgx(tmp_path)
    made.etc.mkdir(exist_ok=True)
    return made


def found(paths: Paths, *rules: dict[str, Any], cluster: bool = False) -> list[Finding]:
    paths.config.write_text(json.dumps({"policy": {"rules": rules, "cluster": cluster}}))
    checks = [check for check in doctor.CHECKS if check[0] == "policy"]
    return doctor.examine(ThisNode(paths, tolerant=True), checks)


def rule(**subject: Any) -> dict[str, Any]:  # noqa: ANN401
    return {"name": "r", "subjects": [subject]}


def test_a_node_without_rules_needs_none(paths: Paths) -> None:
    assert [finding.status for finding in found(paths)] == ["not applicable"]


def test_rules_are_counted_and_named(paths: Paths) -> None:
    (finding,) = found(paths, rule(namespaces=["a"]))
    assert (finding.status, finding.seen) == ("ok", "rules in config.yaml: r")


def test_rules_that_only_the_api_server_can_match_fail(
    paths: Paths,
) -> None:
    (finding,) = found(paths, rule(namespaces=["a"], namespaceSelector={}))
    assert finding.status == "failed"
    assert "policy.rules: namespaceSelector works only in a FabricPolicy" in finding.seen


def test_rules_that_cannot_be_read_fail(paths: Paths) -> None:
    (finding,) = found(paths, {"name": "r"})
    assert finding.status == "failed"
    assert "policy.rules[0].subjects: is missing" in finding.seen


def test_policies_of_the_cluster_are_named_or_missed(paths: Paths) -> None:
    (finding,) = found(paths, cluster=True)
    assert finding.status == "failed" and "cluster_policies.json is missing" in finding.seen
    stored = StoredPolicy(name="tenants", uid="u", generation=1, rules=[rule(namespaces=["a"])])
    save(paths.cluster_policies, ClusterPolicies(policies=(stored,), namespaces=None))
    (finding,) = found(paths, cluster=True)
    assert (finding.status, finding.seen) == ("ok", "rules of the cluster: tenants/r")
    save(paths.cluster_policies, ClusterPolicies(policies=(), namespaces=None))
    of_cluster, own = found(paths, rule(namespaces=["x"]), cluster=True)
    assert "none" in of_cluster.seen
    assert own.seen == "rules in config.yaml: r"
