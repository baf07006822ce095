"""VFs with RDMA devices: Soft-RoCE that goes with its interface, and HCAs that only a pod sees."""

from collections.abc import Iterator

import pytest

from tests.cluster.cluster import PATIENCE, Cluster, Namespace
from tests.cluster.installation import (
    await_nothing_left,
    configured,
    with_pools_of_vfs,
    with_vfs,
)
from tests.cluster.seen import pings, rdma_of, uverbs
from tests.waiting import until

VF = "rdma/vf"
NAMES = ("one", "two")
IPAM = {"type": "podfabric-ipam", "range": "10.21.0.0/16"}


def rdma_in(namespace: Namespace, name: str) -> set[str]:
    """The RDMA devices that a pod sees: in shared mode, all."""
    return set(namespace.run(name, "ls", "/sys/class/infiniband").split())


def of_node(cluster: Cluster) -> set[str]:
    """The RDMA devices that the node itself sees."""
    return set(cluster.node.run("ls /sys/class/infiniband").split())


@pytest.fixture
def soft(cluster: Cluster) -> Iterator[None]:
    """A Soft-RoCE device on each of two VFs."""
    pool = {"name": VF, "mode": "exclusive", "selectors": {"rdmaDevices": ["rxe0", "rxe1"]}}
    with (
        with_vfs(cluster, len(NAMES), "soft"),
        configured(cluster, {"pools": [pool]}, {VF: len(NAMES)}),
    ):
        yield


@pytest.mark.long
@pytest.mark.usefixtures("soft")
def test_a_pods_soft_roce_is_on_its_interface_and_returns_to_the_node(
    cluster: Cluster, namespace: Namespace
) -> None:
    before = of_node(cluster)
    namespace.network("roce", {"type": "sriov", "ipam": IPAM}, resource=VF)
    isolated = {"type": "sriov", "rdmaIsolation": True, "ipam": IPAM}
    namespace.network("isolated", isolated, resource=VF)
    for name in NAMES:
        namespace.pod(name, networks="roce", devices={VF: 1})
    namespace.running(*NAMES)
    for name in NAMES:
        (device,) = uverbs(namespace, name)
        rdma = rdma_of(cluster, device)
        netdev = f"/sys/class/infiniband/{rdma}/ports/1/gid_attrs/ndevs/0"
        assert namespace.run(name, "cat", netdev).strip() == "net1"
    assert pings(namespace, "one", namespace.address("two"))
    namespace.delete(*NAMES)
    await_nothing_left(cluster)
    assert of_node(cluster) == before
    # Linux gives a Soft-RoCE device that is made in a pod to the host: it cannot be isolated.
    namespace.pod("refused", networks="isolated", devices={VF: 1})
    until(
        lambda: any("rdmaIsolation" in event for event in namespace.events("refused")),
        PATIENCE,
        "event with the reason",
        pause=1,
    )
    namespace.delete("refused")


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
    namespace.delete(*NAMES)
    await_nothing_left(cluster)
    assert of_node(cluster) == before
