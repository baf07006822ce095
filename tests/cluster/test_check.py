"""`podfabric check` on the cluster: partitions of IPoIB, a transfer over Soft-RoCE, `helm test`.

There is one node, so two pods of each network run on this node.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.cluster import PATIENCE, Cluster, Namespace
from tests.cluster.configurations import ipoib
from tests.cluster.installation import (
    NAMESPACE,
    await_agent,
    configured,
    helm,
    upgrade,
)
from tests.kernel.vm import layout

RXE, DEVICE = "rdma/rxe", "rxe8"


def check(namespace: Namespace, network: str, *words: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the document of a check with two pods on the node."""
    command = [sys.executable, "-c", "from cli.main import main; main()", "check", "-o", "json"]
    command += ["--kubeconfig", str(namespace.cluster.plane.kubeconfig("admin"))]
    command += ["--network", f"{namespace.name}/{network}", "--pods-per-node", "2"]
    command += ["--timeout", str(int(PATIENCE)), "--nodes", "kubernetes.io/os=linux", *words]
    done = subprocess.run(command, cwd=layout.CHECKOUT, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    assert done.stderr == ""
    assert namespace.pods() == [] or all(it.metadata.deletion_timestamp for it in namespace.pods())
    document: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, document


def results(document: dict[str, Any]) -> dict[bool, list[str]]:
    """The results of the pairs, by whether the pairs must be separate."""
    return {
        apart: [it["result"] for it in document["pairs"] if it["apart"] is apart]
        for apart in (False, True)
    }


@pytest.mark.long
def test_partitions_are_proved_separate_and_a_breach_is_reported(
    cluster: Cluster, namespace: Namespace
) -> None:
    pkeys = {"a": "0x8001", "b": "0x8002", "breach": "0x8001"}
    for number, (name, pkey) in enumerate(pkeys.items(), 97):
        namespace.network(name, ipoib(f"10.{number}.0.0/24", master="ib0", pkey=pkey))
    code, document = check(namespace, "a", "--isolated-from", f"{namespace.name}/b")
    assert (code, document["failures"]) == (0, [])
    assert results(document) == {False: ["ok"] * 4, True: ["ok"] * 8}
    seen = [rail["pkey"] for pod in document["pods"] for rail in pod["report"]["rails"]]
    assert seen == ["0x8001", "0x8001", "0x8002", "0x8002"]

    code, document = check(namespace, "a", "--isolated-from", f"{namespace.name}/breach")
    assert code == 1
    assert results(document) == {False: ["ok"] * 4, True: ["isolation"] * 8}
    assert all("10.9" in it["cause"] and " answers " in it["cause"] for it in document["failures"])


@pytest.mark.long
def test_helm_test_runs_with_its_own_rights(cluster: Cluster, namespace: Namespace) -> None:
    namespace.network("a", ipoib("10.97.0.0/24", master="ib0", pkey="0x8001"))
    upgrade(cluster, {}, check={"network": f"{namespace.name}/a", "resource": "rdma/hca"})
    try:
        with pytest.raises(subprocess.CalledProcessError):
            helm(cluster, "test", "podfabric")
        log = cluster.core.read_namespaced_pod_log("podfabric-check", NAMESPACE)
        assert "FAILED start: node-1: there is no second pod to test" in log
    finally:
        Namespace(cluster, NAMESPACE).delete("podfabric-check")
        upgrade(cluster, {})
        await_agent(cluster)


@pytest.fixture
def soft_roce(cluster: Cluster) -> Iterator[None]:
    """A pool of a Soft-RoCE device that two pods can share."""
    command = f"cd {layout.CHECKOUT} && {layout.PYTHON} -m tests.kernel.verbs"
    cluster.node.run(f"{command} {DEVICE}")
    pool = {"name": RXE, "mode": "shared", "slots": 2, "selectors": {"drivers": ["rdma_rxe"]}}
    try:
        # The interface is on another HCA than the pod's.
        policy = {"set": {"match_device": [False]}}
        with configured(cluster, {"pools": [pool], "policy": policy}, {RXE: 2}):
            yield
    finally:
        cluster.node.run(f"ip link delete {DEVICE}-net")


@pytest.mark.long
@pytest.mark.usefixtures("soft_roce")
def test_pods_without_privileges_transfer_over_verbs(
    cluster: Cluster, namespace: Namespace
) -> None:
    options = {"master": "ib0", "match_device": False, "pkey": "0x8001"}
    namespace.network("a", ipoib("10.97.0.0/24", **options))
    code, document = check(namespace, "a", "--resource", RXE)
    assert (code, document["failures"]) == (0, [])
    devices = {rail["device"] for pod in document["pods"] for rail in pod["report"]["rails"]}
    assert devices == {DEVICE}
