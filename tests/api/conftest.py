"""One API server for all tests of this folder, separate from the cluster's."""

from collections.abc import Iterator

import pytest

from kube.resources import Node
from kube.transport import KubernetesApi
from tests.api.server import ApiServer, api_server

NODE_A, NODE_B = "node-a", "node-b"


@pytest.fixture(scope="package")
def server() -> Iterator[ApiServer]:
    with api_server() as server:
        yield server


@pytest.fixture(scope="package")
def node_a(server: ApiServer) -> KubernetesApi:
    """The client of a node's agent. The server applies the policies already."""
    node = server.node(NODE_A, machineID="m-a", systemUUID="s-a", bootID="b-a")
    server.await_policy(node, NODE_A)
    return node


@pytest.fixture(scope="package")
def node_b(server: ApiServer) -> KubernetesApi:
    """The client of another node's agent."""
    return server.node(NODE_B)


@pytest.fixture(scope="module", autouse=True)
def _other_nodes(server: ApiServer) -> Iterator[None]:
    """Delete the Node objects of a module at its end: their number decides the size of blocks."""
    yield
    names = [
        node.name for node in server.admin.list(Node).items if node.name not in (NODE_A, NODE_B)
    ]
    if names:
        server.kubectl("delete", "node", *names)
