"""An agent as a process, launchers that call it, and FabricPolicies on a real API server."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from agent.leasing import KUBECONFIG, NODE_NAME
from agent.policies import DENIED
from kube.transport import KubernetesApi
from tests.api.conftest import NODE_A
from tests.api.server import ApiServer, Document
from tests.api.test_policies_on_nodes import Tenant, put, title
from tests.plugins.service import Service, install_launchers
from tests.waiting import PATIENCE, until

__all__ = ["title"]  # the fixture

PODFABRIC = Path(sys.executable).with_name("podfabric")
OWN, THEIRS = "10.61.0.0/24", "10.62.0.0/24"


class AgentNode:
    """A node whose agent is a process with the rights of the agent of `node`."""

    def __init__(self, server: ApiServer, root: Path, stack: ExitStack, node: str = NODE_A) -> None:
        self.root = root
        self._stack = stack
        kubeconfig = server.plane.directory / f"{node}.kubeconfig"
        self._environ = {KUBECONFIG: str(kubeconfig), NODE_NAME: node} | {
            f"PODFABRIC_{name.upper()}": str(root / name) for name in ("kubelet", "cni_bin", "sys")
        }
        install_launchers(root / "cni_bin", ["podfabric-ipam"])
        self.configure(cluster=True)

    def configure(self, *, cluster: bool) -> None:
        (self.root / "etc").mkdir(parents=True, exist_ok=True)
        document = {"agent": {"listen": ""}, "policy": {"cluster": cluster}}
        (self.root / "etc/config.yaml").write_text(json.dumps(document))

    def start(self) -> Service:
        agent = Service(self.root, environ=self._environ, command=[str(PODFABRIC), "agent"])
        self._stack.callback(agent.process.kill)
        agent.wait_until_ready()
        return agent

    def call(self, tenant: Tenant, range_: str, verb: str = "ADD") -> Document:
        """The answer to a launcher."""
        pod = tenant.anyone()
        config = {
            "cniVersion": "1.0.0",
            "name": "n",
            "type": "podfabric-ipam",
            "ipam": {"type": "podfabric-ipam", "range": range_},
        }
        environ = {
            "CNI_COMMAND": verb,
            "CNI_CONTAINERID": f"c-{range_[:5]}",
            "CNI_NETNS": "/none",
            "CNI_IFNAME": "net1",
            "CNI_PATH": str(self.root / "cni_bin"),
            "CNI_ARGS": f"K8S_POD_NAMESPACE={pod.namespace};K8S_POD_NAME={pod.name}",
            "PODFABRIC_SOCKET": str(self.root / "run/agent.sock"),
        }
        done = subprocess.run(
            [self.root / "cni_bin/podfabric-ipam"],
            input=json.dumps(config).encode(),
            env=environ,
            check=False,
            capture_output=True,
            timeout=PATIENCE,
        )
        answer: dict[str, Any] = json.loads(done.stdout or b"{}")
        return answer

    def code(self, tenant: Tenant, range_: str) -> int:
        """The error code of an ADD, 0 for success."""
        code: int = self.call(tenant, range_).get("code", 0)
        return code


@pytest.fixture
def node(server: ApiServer, node_a: KubernetesApi, tmp_path: Path) -> Iterator[AgentNode]:
    with ExitStack() as stack:
        yield AgentNode(server, tmp_path / "node", stack)


def allow(server: ApiServer, title: str, tenant: Tenant) -> None:
    """Add a rule that lets the tenant use its own range."""
    use = {"ipamTypes": ["podfabric-ipam"], "ranges": [OWN]}
    put(server, title, {"subjects": [{"namespaces": [tenant.namespace]}], "use": use})


def test_an_agent_that_is_killed_while_the_api_server_is_away_enforces_what_it_saw(
    server: ApiServer, node: AgentNode, title: str
) -> None:
    tenant = Tenant(server)
    agent = node.start()
    until(lambda: node.code(tenant, THEIRS) == 0, what="ADD without a rule", pause=0.1)
    node.call(tenant, THEIRS, "DEL")
    allow(server, title, tenant)
    until(lambda: node.code(tenant, THEIRS) == 121, what="refusal", pause=0.1)
    assert node.code(tenant, OWN) == 0
    node.call(tenant, OWN, "DEL")
    until(tenant.events, what="event")
    event = tenant.events()[-1]
    assert event["reason"] == DENIED
    for word in ("ipam.range", "10.62.0.", f"{title}/r"):
        assert word in event["message"]
    path = node.root / "state/cluster_policies.json"
    until(lambda: title in path.read_text(), what="file")
    server.plane.stop_api_server()
    try:
        agent.process.kill()
        agent.process.wait(PATIENCE)
        node.start()
        assert node.code(tenant, THEIRS) == 121
        assert node.code(tenant, OWN) == 0
        node.call(tenant, OWN, "DEL")
        path.unlink()
        assert node.code(tenant, THEIRS) == 121  # the active policies are in memory too
    finally:
        server.plane.start_api_server()


def test_an_agent_without_the_policies_attaches_nothing_until_it_has_seen_them(
    server: ApiServer, node: AgentNode, title: str
) -> None:
    tenant = Tenant(server)
    allow(server, title, tenant)
    server.plane.stop_api_server()
    try:
        node.start()
        assert (node.code(tenant, OWN), node.code(tenant, THEIRS)) == (11, 11)
    finally:
        server.plane.start_api_server()
    until(lambda: node.code(tenant, OWN) == 0, what="ADD", pause=0.1)
    assert node.code(tenant, THEIRS) == 121
    node.call(tenant, OWN, "DEL")


def test_running_agent_follows_policies_after_a_configuration_change(
    server: ApiServer, node: AgentNode, title: str
) -> None:
    tenant = Tenant(server)
    allow(server, title, tenant)
    node.configure(cluster=False)
    node.start()
    assert node.code(tenant, THEIRS) == 0
    node.call(tenant, THEIRS, "DEL")
    node.configure(cluster=True)
    until(lambda: node.code(tenant, THEIRS) == 121, what="refusal", pause=0.1)
    assert node.code(tenant, OWN) == 0
    node.call(tenant, OWN, "DEL")
