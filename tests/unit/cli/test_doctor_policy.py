"""Doctor looks at the rules in config.yaml, and at those of the cluster."""

import json
from pathlib import Path
from typing import Any

import pytest

from base.paths import Paths
from cli import doctor
from cli.checks import Finding
from cli.this_node import ThisNode
from cni.attachments.journal import Journal, JournalEntry, Phase
from cni.policy.cluster import ClusterPolicies, StoredPolicy, save
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


def test_rules_that_only_the_api_server_can_match_fail_on_a_node_that_does_not_ask_it(
    paths: Paths,
) -> None:
    (finding,) = found(paths, rule(namespaces=["a"], serviceAccounts=["x"]))
    assert finding.status == "failed"
    assert "policy.rules[0].subjects[0].serviceAccounts: only the API server" in finding.seen


def test_rules_that_cannot_be_read_fail(paths: Paths) -> None:
    (finding,) = found(paths, {"name": "r"})
    assert finding.status == "failed"
    assert "policy.rules[0].subjects: is missing" in finding.seen


def attached(paths: Paths, pod: str, boot: str = BOOT, **config: Any) -> None:  # noqa: ANN401
    """Put an attachment of a pod of namespace a into the journal."""
    written = {"cniVersion": "1.0.0", "name": "fabric", "type": "ipoib", "master": "ib0", **config}
    Journal(paths).write(
        JournalEntry(
            plugin="ipoib",
            network="fabric",
            container_id=pod,
            ifname="net1",
            netns="/nowhere",
            netns_identity="cookie:0",
            boot_id=boot,
            phase=Phase.ATTACHED,
            pod_namespace="a",
            pod_name=pod,
            config=json.dumps(written),
        )
    )


def test_attachments_that_the_rules_would_refuse_now_are_told(paths: Paths) -> None:
    boot_id = paths.proc / "sys/kernel/random/boot_id"
    boot_id.parent.mkdir(parents=True, exist_ok=True)
    boot_id.write_text(f"{BOOT}\n")
    attached(paths, "fits", pkey="0x8001")
    attached(paths, "differs", pkey="0x8002")
    attached(paths, "gone", "another boot", pkey="0x8002")
    mine = rule(namespaces=["a"]) | {"use": {"pkeys": ["0x8001"]}}
    _, finding = found(paths, mine)
    assert finding.status == "warning"
    assert finding.seen.startswith(
        '1 attachment would be refused now: a/differs net1: "pkey": 0x8002'
    )
    of_trainers = rule(namespaces=["a"], serviceAccounts=["trainer"])
    trainers = of_trainers | {"name": "s", "use": {"pkeys": ["0x8002"]}}
    stored = StoredPolicy(name="t", uid="u", generation=1, rules=[mine, trainers])
    save(paths.cluster_policies, ClusterPolicies(policies=(stored,), namespaces=None))
    (finding,) = found(paths, cluster=True)  # the pod may be of that service account
    assert finding.status == "ok"


def test_policies_of_the_cluster_are_named_or_missed(paths: Paths) -> None:
    (finding,) = found(paths, cluster=True)
    assert finding.status == "failed" and "cluster_policies.json is missing" in finding.seen
    stored = StoredPolicy(name="tenants", uid="u", generation=1, rules=[rule(namespaces=["a"])])
    save(paths.cluster_policies, ClusterPolicies(policies=(stored,), namespaces=None))
    (finding,) = found(paths, cluster=True)
    assert (finding.status, finding.seen) == ("ok", "rules of the cluster: tenants/r")
    save(paths.cluster_policies, ClusterPolicies(policies=(), namespaces=None))
    of_cluster, own = found(paths, rule(serviceAccounts=["x"]), cluster=True)
    assert "none" in of_cluster.seen
    assert own.seen == "rules in config.yaml: r"
