"""Addresses of the whole cluster: two nodes, one definition, and no address twice."""

import ipaddress
from concurrent.futures import ThreadPoolExecutor

from tests.cluster.cluster import PATIENCE, Cluster, Document, Namespace, is_ready
from tests.cluster.control_plane import NODE
from tests.cluster.second_node import NAME, second_node
from tests.cluster.test_examples import documents
from tests.waiting import until

EXAMPLE = "jarvice-ipoib"
POOL = "192.168.0.0-24"
RANGE = ipaddress.ip_network("192.168.0.0/24")


def objects(cluster: Cluster, kind: str) -> list[Document]:
    """Every object of a kind of podfabric's."""
    resource = cluster.objects.resources.get(api_version="ipam.podfabric.io/v1alpha1", kind=kind)
    found: list[Document] = resource.get().to_dict()["items"]
    return found


def is_pool_ready(cluster: Cluster) -> bool:
    """Whether the controller has made the pool, and nodes may lease from it."""
    for pool in objects(cluster, "AddressPool"):
        if pool["metadata"]["name"] == POOL:
            conditions = pool.get("status", {}).get("conditions", [])
            return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
    return False


def test_two_nodes_with_one_definition_give_each_pod_its_own_address(
    cluster: Cluster, namespace: Namespace, scaling: tuple[int, int]
) -> None:
    """By default 50 pods of each node: 100 pods, 100 addresses. The definition is that of
    netattach-examples, unchanged on both."""
    replicas, times = scaling
    network, example = documents(EXAMPLE)
    namespace.apply(network)
    until(lambda: is_pool_ready(cluster), PATIENCE, f"pool {POOL}", pause=0.5)
    names = [f"job-{number}" for number in range(replicas * times // 2)]
    for name in names:
        namespace.apply({**example, "metadata": {**example["metadata"], "name": name}})
    with second_node(cluster) as other, ThreadPoolExecutor(1) as beside:
        until(lambda: any(is_ready(pod) for pod in namespace.pods()), PATIENCE, "first pod")
        elsewhere = beside.submit(other.add, network, names)
        namespace.running(*names, patience=2 * PATIENCE)
        addresses = [*(namespace.address(name) for name in names), *elsewhere.result()]
        assert len(set(addresses)) == 2 * len(names)
        assert all(ipaddress.ip_address(address) in RANGE for address in addresses)
        blocks = [each for each in objects(cluster, "AddressBlock") if each["spec"]["pool"] == POOL]
        assert {each["spec"]["holder"]["node"] for each in blocks} == {NODE, NAME}
        other.delete(network, names)
        namespace.delete(*names)
