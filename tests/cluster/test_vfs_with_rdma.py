"""VFs with RDMA devices: HCAs that only their pod sees."""

from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster.cluster import Cluster, Namespace
from tests.cluster.installation import (
    await_nothing_left,
    with_pools_of_vfs,
)
from tests.cluster.seen import pings, uverbs

VF = "rdma/vf"
NAMES = ("one", "two")
IPAM = {"type": "podfabric-ipam", "range": "10.21.0.0/16"}


def rdma_in(namespace: Namespace, name: str) -> set[str]:
    """The RDMA devices that a pod sees; all of them in shared mode."""
    return set(namespace.run(name, "ls", "/sys/class/infiniband").split())


def of_node(cluster: Cluster) -> set[str]:
    """The RDMA devices that the node itself sees."""
    return set(cluster.node.run("ls /sys/class/infiniband").split())


@pytest.fixture
def isolated(cluster: Cluster) -> Iterator[None]:
    """An HCA on each of two VFs, in the RDMA subsystem's exclusive mode."""
    with with_pools_of_vfs(cluster, "isolated", {VF: ""}):
        yield


@pytest.mark.long
@pytest.mark.usefixtures("isolated")
def test_a_pod_sees_its_own_rdma_device_only(cluster: Cluster, namespace: Namespace) -> None:
    before = of_node(cluster)
    assert len(before) == len(NAMES)
    isolated = {"type": "sriov", "rdmaIsolation": True, "ipam": IPAM}
    namespace.network("isolated", isolated, resource=VF)
    for name in NAMES:
        namespace.pod(name, networks="isolated", devices={VF: 1})
    namespace.running(*NAMES)
    seen = [rdma_in(namespace, name) for name in NAMES]
    assert sorted(seen, key=sorted) == [{name} for name in sorted(before)]
    assert not of_node(cluster)
    for name, devices in zip(NAMES, seen, strict=True):
        (device,) = uverbs(namespace, name)
        inside = f"/sys/class/infiniband_verbs/{device}/ibdev"
        assert {namespace.run(name, "cat", inside).strip()} == devices
    assert pings(namespace, "one", namespace.address("two"))
    metrics = cluster.node.run("busybox wget -q -O - http://127.0.0.1:9810/metrics")
    samples = {
        (sample.name, sample.labels.get("pod"), sample.labels.get("counter")): sample.value
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
    }
    for name in NAMES:
        assert ("podfabric_pod_port_counter_total", name, "sent_pkts") in samples
    assert samples["podfabric_pod_ports_unreadable", None, None] == 0
    namespace.delete(*NAMES)
    await_nothing_left(cluster)
    assert of_node(cluster) == before
