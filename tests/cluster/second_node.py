"""A second node of the cluster: an agent with a store and a Node object of its own.

It has no kubelet: a runtime's calls come from here, with the definition as it stands on the API
server. It shares the HCAs of the first node's machine, and nothing else: the emulation of a second
machine would take the CPU that both need.
"""

import json
import shlex
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kubernetes import client

from tests.cluster.cluster import PATIENCE, Cluster, Document, Namespace, is_ready
from tests.cluster.control_plane import HOST_OF_NODE
from tests.cluster.installation import NAMESPACE, agents
from tests.cluster.node import CNI_BIN, Node, NodeError
from tests.kernel.vm import layout
from tests.waiting import until

NAME = "node-2"
ACCOUNT = "podfabric"
_SERVICE = f"agent-of-{NAME}"
_ROOT = Path("/run") / NAME
_ROOTS = ("run", "state", "etc", "kubelet", "cdi", "devinfo")
_AT_ONCE = 8


@dataclass
class SecondNode:
    """A node whose runtime calls the plugins that are installed on the first one's machine."""

    node: Node

    def add(self, network: Document, pods: Sequence[str]) -> list[str]:
        """The address of each of these pods, all at once, as a kubelet starts them."""
        self._in_each_namespace("add", pods)
        with ThreadPoolExecutor(_AT_ONCE) as executor:
            return list(executor.map(lambda pod: self._add(network, pod), pods))

    def delete(self, network: Document, pods: Sequence[str]) -> None:
        """Detaches these pods."""
        for pod in pods:
            self._call("DEL", network, pod)
        self._in_each_namespace("delete", pods)

    def _add(self, network: Document, pod: str) -> str:
        result = json.loads(until(lambda: self._added(network, pod), PATIENCE, f"{pod}", pause=1))
        (interface,) = result["interfaces"]
        name, namespace = interface["name"], _namespace(pod)
        shown = self.node.run(f"ip netns exec {namespace} ip -o -4 address show dev {name}")
        address: str = result["ips"][0]["address"]
        assert f" {address} " in shown, f"{pod} has {shown}, not {address}"
        return address.partition("/")[0]

    def _added(self, network: Document, pod: str) -> str:
        """The result of an ADD; "" if its block was not there in time: a runtime calls again."""
        try:
            return self._call("ADD", network, pod)
        except NodeError as error:
            if '"code":11' not in str(error).replace(" ", ""):
                raise
            return ""

    def _call(self, command: str, network: Document, pod: str) -> str:
        config = json.loads(network["spec"]["config"])
        environ = {
            "PODFABRIC_SOCKET": f"{_ROOT}/run/agent.sock",
            "CNI_COMMAND": command,
            "CNI_CONTAINERID": f"{NAME}-{pod}",
            "CNI_NETNS": f"/run/netns/{_namespace(pod)}",
            "CNI_IFNAME": "net1",
            "CNI_PATH": str(CNI_BIN),
            "CNI_ARGS": f"K8S_POD_NAMESPACE=elsewhere;K8S_POD_NAME={pod}",
        }
        program = [f"{CNI_BIN}/{config['type']}"]
        words = ["env", *(f"{name}={value}" for name, value in environ.items()), *program]
        return self.node.run(shlex.join(words), standard_input=json.dumps(config))

    def _in_each_namespace(self, verb: str, pods: Sequence[str]) -> None:
        self.node.run("set -e; " + "; ".join(f"ip netns {verb} {_namespace(pod)}" for pod in pods))


def _namespace(pod: str) -> str:
    return f"{NAME}-{pod}"


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
        kubeconfig = f"{_ROOT}/kubeconfig"
        cluster.node.write(kubeconfig, json.dumps(_kubeconfig(cluster, first)))
        configuration = {"agent": {"listen": ""}, "ipam": {"scope": "cluster"}}
        cluster.node.write(f"{_ROOT}/etc/config.yaml", json.dumps(configuration))
        cluster.node.run("mkdir -p " + " ".join(f"{_ROOT}/{name}" for name in _ROOTS))
        environ = {f"PODFABRIC_{name.upper()}": f"{_ROOT}/{name}" for name in _ROOTS}
        environ |= {"NODE_NAME": NAME, "PODFABRIC_KUBECONFIG": kubeconfig}
        words = [f"{name}={value}" for name, value in environ.items()]
        program = layout.PYTHON.with_name("podfabric")
        cluster.node.start(_SERVICE, shlex.join([*words, str(program), "agent"]))
        try:
            listens = f"test -S {_ROOT}/run/agent.sock"
            until(lambda: not cluster.node.status_of(listens)[0], PATIENCE, "agent", pause=0.5)
            yield SecondNode(cluster.node)
        finally:
            cluster.node.kill(_SERVICE, signal.SIGTERM)
            cluster.node.run(f"rm -r {_ROOT}")
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
    document: Document = json.loads(cluster.plane.kubeconfig("admin", HOST_OF_NODE).read_text())
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
