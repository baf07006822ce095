"""A node follows FabricPolicies of a real API server, with the rights of its agent."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agent.leasing import KUBECONFIG, NODE_NAME
from agent.policies import DENIED, AgentPolicies
from base.paths import Paths
from base.pod import Pod
from cni.spec.errors import CNIError, Code
from cni.spec.request import Request
from ipam.controller.whereabouts_objects import AnnotatedPod
from kube.resources import Meta, Refused
from kube.transport import KubernetesApi
from policy import allowance, stored_policies
from policy.allowance import NotAllowed
from policy.follower import FabricPolicy
from policy.rules import Policy
from tests.api.conftest import NODE_A
from tests.api.server import ACCOUNT, ApiServer, Document, name
from tests.api.test_fabric_policies import KIND
from tests.waiting import until
from tools.manifests import NAMESPACE

MINE, THEIRS = 0x8001, 0x8002


class Node:
    """The policies of one node's agent."""

    def __init__(self, server: ApiServer, directory: Path) -> None:
        self.paths = Paths(state=directory / "state", etc=directory / "etc")
        kubeconfig = server.plane.directory / f"{NODE_A}.kubeconfig"
        self.policies = AgentPolicies(
            self.paths,
            lambda: Policy(cluster=True),
            {KUBECONFIG: str(kubeconfig), NODE_NAME: NODE_A},
        )
        self.policies.start()

    def asks(self, pod: Pod, pkey: int) -> None:
        """Request a partition, as a plugin does. Raises NotAllowed, or CNIError 11."""
        allowed = allowance.of_pod(self.policies.source(), pod)
        allowed.using("pkeys", pkey, "pkey", f"{pkey:#06x}")
        if allowed.titles() == ("config.yaml",):
            raise AssertionError("no rule is for the pod")

    def outcome(self, pod: Pod, pkey: int) -> str:
        try:
            self.asks(pod, pkey)
        except NotAllowed:
            return "denied"
        except CNIError as error:
            assert error.code == Code.TRY_AGAIN
            return error.message
        except AssertionError:
            return "no rule"
        return "allowed"

    def await_outcome(self, pod: Pod, pkey: int, wanted: str) -> None:
        until(lambda: wanted in self.outcome(pod, pkey), what=f"{wanted} for {pod}", pause=0.1)

    def await_file(self) -> None:
        """Wait until the active policies are on disk."""

        def same() -> bool:
            try:
                return stored_policies.load(self.paths.cluster_policies).rules == (
                    self.policies.source().rules
                )
            except CNIError:
                return False

        until(same, what="file")


@pytest.fixture
def node(server: ApiServer, node_a: KubernetesApi, tmp_path: Path) -> Iterator[Node]:
    node = Node(server, tmp_path)
    with closing(node.policies):
        yield node


class Tenant:
    """A namespace, and a policy for it."""

    def __init__(self, server: ApiServer, **labels: str) -> None:
        self.server = server
        self.namespace = name("tenant")
        meta: Document = {"name": self.namespace, "labels": labels}
        server.make(
            "/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": meta}
        )

    def pod(self) -> Pod:
        pods = f"/api/v1/namespaces/{self.namespace}/pods"
        accounts = f"/api/v1/namespaces/{self.namespace}/serviceaccounts"
        meta: Document = {"name": "default"}
        account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta}
        self.server.make(accounts, account)
        spec = {
            "nodeName": NODE_A,
            "containers": [{"name": "c", "image": "i"}],
        }
        made = self.server.make(
            pods, {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name("p")}, "spec": spec}
        )
        meta = made["metadata"]
        return Pod(namespace=self.namespace, name=meta["name"], uid=meta["uid"])

    def anyone(self) -> Pod:
        return Pod(namespace=self.namespace, name="p", uid="u")

    def events(self) -> list[Document]:
        _, found = self.server.send("GET", f"/api/v1/namespaces/{self.namespace}/events")
        items: list[Document] = found["items"]
        return items


def put(server: ApiServer, title: str, rule: Document, *, pkey: int = MINE) -> None:
    """Write a policy of one rule, as kubectl does."""
    document: dict[str, Any] = {
        "apiVersion": "fabric.podfabric.io/v1alpha1",
        "kind": "FabricPolicy",
        "metadata": {"name": title},
        "spec": {"rules": [{"name": "r", "use": {"pkeys": [f"{pkey:#06x}"]}, **rule}]},
    }
    status, stored = server.send("GET", f"{KIND}/{title}")
    if status == 404:
        server.make(KIND, document)
        return
    document["metadata"] = stored["metadata"]
    status, answer = server.send("PUT", f"{KIND}/{title}", document)
    assert status == 200, answer


@pytest.fixture
def title(server: ApiServer) -> Iterator[str]:
    """The name of a policy, which is deleted after the test."""
    title = name("policy")
    yield title
    server.send("DELETE", f"{KIND}/{title}")


def for_namespace(tenant: Tenant) -> Document:
    return {"subjects": [{"namespaces": [tenant.namespace]}]}


def test_policy_is_applied_changed_and_removed(server: ApiServer, node: Node, title: str) -> None:
    tenant = Tenant(server)
    node.await_outcome(tenant.anyone(), MINE, "no rule")
    put(server, title, for_namespace(tenant))
    node.await_outcome(tenant.anyone(), MINE, "allowed")
    assert node.outcome(tenant.anyone(), THEIRS) == "denied"
    put(server, title, for_namespace(tenant), pkey=THEIRS)
    node.await_outcome(tenant.anyone(), THEIRS, "allowed")
    assert node.outcome(tenant.anyone(), MINE) == "denied"
    node.await_file()
    server.send("DELETE", f"{KIND}/{title}")
    node.await_outcome(tenant.anyone(), MINE, "no rule")


def test_labels_of_namespaces_decide_as_they_change(
    server: ApiServer, node: Node, title: str
) -> None:
    gold, iron = Tenant(server, tier="gold"), Tenant(server)
    selector = {"matchExpressions": [{"key": "tier", "operator": "In", "values": ["gold"]}]}
    put(server, title, {"subjects": [{"namespaceSelector": selector}]})
    node.await_outcome(gold.anyone(), MINE, "allowed")
    node.await_outcome(iron.anyone(), MINE, "no rule")
    server.kubectl("label", "namespace", iron.namespace, "tier=gold")
    node.await_outcome(iron.anyone(), MINE, "allowed")
    missing = Pod(namespace=name("missing"), name="p", uid="u")
    assert "has not read the labels" in node.outcome(missing, MINE)


def test_a_denied_pod_has_an_event_that_names_key_value_and_rule(
    server: ApiServer, node: Node, title: str
) -> None:
    tenant = Tenant(server)
    pod = tenant.pod()
    put(server, title, for_namespace(tenant))
    node.await_outcome(pod, MINE, "allowed")
    args = f"K8S_POD_NAMESPACE={pod.namespace};K8S_POD_NAME={pod.name};K8S_POD_UID={pod.uid}"
    for _ in range(2):
        with pytest.raises(NotAllowed) as denied:
            node.asks(pod, THEIRS)
        node.policies.failed(Request(command="ADD", args=args), denied.value)
    until(tenant.events, what="event")
    (event,) = tenant.events()
    assert event["reason"] == DENIED
    assert event["involvedObject"]["uid"] == pod.uid
    for word in ("pkey", "0x8002", f"{title}/r"):
        assert word in event["message"]
    assert node.policies.denials() == {("pkey", f"{title}/r"): 2}


def test_an_agent_writes_no_policy_and_reads_no_pod(
    server: ApiServer, node_a: KubernetesApi, title: str
) -> None:
    tenant = Tenant(server)
    put(server, title, for_namespace(tenant))
    stored = server.admin.get(FabricPolicy, title)
    assert node_a.list(FabricPolicy).items
    acts = (
        lambda: node_a.create(FabricPolicy(metadata=Meta(name=title), spec={"rules": []})),
        lambda: node_a.update(stored),
        lambda: node_a.delete(stored),
        lambda: node_a.get(AnnotatedPod, f"agent-{NODE_A}", NAMESPACE),
    )
    for act in acts:
        with pytest.raises(Refused) as raised:
            act()
        assert f"system:serviceaccount:{NAMESPACE}:{ACCOUNT}" in str(raised.value)
