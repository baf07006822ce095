"""A second node of the cluster: an agent of this machine with a store and a Node object of its own.

It has no kubelet. Its calls are those that `ipoib` makes for its IPAM part, with the definition as
it stands on the API server.
"""

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kubernetes import client

from tests.cluster.cluster import PATIENCE, Cluster, Document, Namespace, is_ready
from tests.cluster.installation import NAMESPACE, agents
from tests.plugins.service import Service
from tests.runtime import Runtime
from tests.waiting import until

NAME = "node-2"
PODFABRIC = str(Path(sys.executable).with_name("podfabric"))
ACCOUNT = "podfabric"
OURS = "podfabric-ipam"
_AT_ONCE = 8


@dataclass
class SecondNode:
    """A node whose pods have nothing but addresses."""

    runtime: Runtime

    def add(self, network: Document, pods: Sequence[str]) -> list[str]:
        """The address of each of these pods, all at once, as a kubelet starts them."""
        with ThreadPoolExecutor(_AT_ONCE) as executor:
            return list(executor.map(lambda pod: self._add(network, pod), pods))

    def delete(self, network: Document, pods: Sequence[str]) -> None:
        """Releases the addresses of these pods."""
        for pod in pods:
            outcome = self._call("DEL", network, pod)
            assert outcome.exit_code == 0, outcome

    def _add(self, network: Document, pod: str) -> str:
        outcome = self._call("ADD", network, pod)
        assert outcome.exit_code == 0, outcome
        result = json.loads(outcome.stdout)
        address: str = result["ips"][0]["address"].partition("/")[0]
        return address

    def _call(self, command: str, network: Document, pod: str) -> Any:  # noqa: ANN401
        config = json.loads(network["spec"]["config"])
        config = {"name": network["metadata"]["name"], **config, "type": OURS}
        return self.runtime.call(
            command,
            config,
            container_id=f"{NAME}-{pod}",
            netns="/proc/self/ns/net" if command == "ADD" else "",
            args=f"K8S_POD_NAMESPACE=elsewhere;K8S_POD_NAME={pod};K8S_POD_INFRA_CONTAINER_ID=0",
        )


@contextmanager
def second_node(cluster: Cluster) -> Iterator[SecondNode]:
    """The node for the block. Its agent has the token that a kubelet would give to its pod."""
    first = {pod.metadata.name for pod in agents(cluster)}
    cluster.core.create_node(
        {"metadata": {"name": NAME, "labels": {"kubernetes.io/hostname": NAME}}}
    )
    try:
        room = {"cpu": "2", "memory": "4Gi", "pods": "250"}
        cluster.core.patch_node_status(NAME, {"status": {"capacity": room, "allocatable": room}})
        with tempfile.TemporaryDirectory(prefix="pf", dir="/dev/shm") as directory:
            root = Path(directory)
            kubeconfig = root / "kubeconfig"
            kubeconfig.write_text(json.dumps(_kubeconfig(cluster, first)))
            (root / "etc").mkdir()
            configuration = {"agent": {"listen": ""}, "ipam": {"scope": "cluster"}}
            (root / "etc/config.yaml").write_text(json.dumps(configuration))
            environ = {"NODE_NAME": NAME, "PODFABRIC_KUBECONFIG": str(kubeconfig)}
            service = Service(root, environ=environ, command=(PODFABRIC, "agent"))
            try:
                service.wait_until_ready()
                socket = {"PODFABRIC_SOCKET": str(service.socket)}
                yield SecondNode(Runtime(environ=os.environ | socket))
            finally:
                service.stop()
    finally:
        cluster.core.delete_node(NAME)
        _delete_pods_there(cluster, first)


def _kubeconfig(cluster: Cluster, first: set[str]) -> Document:
    """An administrator's, with the token of the pod that the DaemonSet has on this node."""
    until(lambda: _own_pods(cluster, first), PATIENCE, f"the agent's pod on {NAME}", pause=0.5)
    (pod,) = _own_pods(cluster, first)
    reference = {
        "apiVersion": "v1",
        "kind": "Pod",
        "name": pod.metadata.name,
        "uid": pod.metadata.uid,
    }
    request = {"spec": {"audiences": [], "boundObjectRef": reference}}
    token = cluster.core.create_namespaced_service_account_token(ACCOUNT, NAMESPACE, request)
    document: Document = json.loads(cluster.plane.kubeconfig("admin").read_text())
    document["users"] = [
        {**user, "user": {"token": token.status.token}} for user in document["users"]
    ]
    return document


def _own_pods(cluster: Cluster, first: set[str]) -> list[client.V1Pod]:
    return [
        pod
        for pod in agents(cluster)
        if pod.metadata.name not in first and pod.spec.node_name == NAME
    ]


def _delete_pods_there(cluster: Cluster, first: set[str]) -> None:
    for pod in _own_pods(cluster, first):
        cluster.core.delete_namespaced_pod(pod.metadata.name, NAMESPACE, grace_period_seconds=0)
    until(
        lambda: (
            {each.metadata.name for each in agents(cluster) if is_ready(each)} == first
            and not _own_pods(cluster, first)
        ),
        PATIENCE,
        "agents of the first node alone",
        pause=0.5,
    )
    assert Namespace(cluster, NAMESPACE).pods()
