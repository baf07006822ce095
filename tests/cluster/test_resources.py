"""Further pools: VFs with Multus' deviceID, rails by resourceName, CDI."""

from collections.abc import Iterator

import pytest

from tests.cluster.cluster import Cluster, Namespace
from tests.cluster.configurations import ipoib
from tests.cluster.installation import await_nothing_left, configured, with_vfs
from tests.cluster.seen import guid_of, pings, rdma_of, uverbs

VF = "example.com/eth_vf"
VARIABLE = "PCIDEVICE_EXAMPLE_COM_ETH_VF"
RAILS = ("rdma/rail0", "rdma/rail1")
CDI = "rdma/cdi"


@pytest.fixture
def vfs(cluster: Cluster) -> Iterator[int]:
    """Three VFs without RDMA devices, in a pool of the other device plugin's form."""
    with with_vfs(cluster, 3) as pf:
        entry = {
            "resourceName": "eth_vf",
            "resourcePrefix": "example.com",
            "selectors": {"pfNames": [pf]},
        }
        with configured(cluster, {"resourceList": [entry]}, {VF: 3}):
            yield 3


@pytest.mark.long
def test_a_pods_vf_is_the_one_that_multus_passes_and_reports(
    vfs: int, cluster: Cluster, namespace: Namespace
) -> None:
    ipam = {"type": "podfabric-ipam", "range": "10.20.0.0/16"}
    namespace.network("vlan", {"type": "sriov", "vlan": 100, "ipam": ipam}, resource=VF)
    names = ("one", "two")
    for name in names:
        namespace.pod(name, networks="vlan", devices={VF: 1})
    namespace.running(*names)
    given = [namespace.run(name, "/bin/sh", "-c", f"echo ${VARIABLE}").strip() for name in names]
    assert len(set(given)) == len(names)
    for name, address in zip(names, given, strict=True):
        reported = namespace.networks(name)["net1"]["device-info"]
        assert reported["type"] == "pci"
        assert reported["pci"]["pci-address"] == address
        own = namespace.run(name, "readlink", "/sys/class/net/net1/device")
        assert own.strip().rpartition("/")[2] == address
    assert pings(namespace, "one", namespace.address("two"))
    namespace.delete(*names)
    await_nothing_left(cluster)
    shown = cluster.node.run("ip -d link show")
    assert "vlan 100" not in shown


@pytest.fixture
def rails(cluster: Cluster) -> Iterator[None]:
    """A pool for each of two fabrics."""
    pools = [
        {"name": name, "slots": 4, "selectors": {"ifNames": [f"ib{number}"]}}
        for number, name in enumerate(RAILS)
    ]
    with configured(cluster, {"pools": pools}, dict.fromkeys(RAILS, 4)):
        yield


@pytest.mark.usefixtures("rails")
@pytest.mark.long
def test_each_of_two_rails_is_on_the_hca_of_its_resource(
    cluster: Cluster, namespace: Namespace
) -> None:
    for number, resource in enumerate(RAILS):
        subnet = f"10.{57 + number}.0.0/16"
        namespace.network(f"rail-{number}", ipoib(subnet), resource=resource)
    namespace.pod("worker", networks="rail-0, rail-1", devices=dict.fromkeys(RAILS, 1))
    namespace.running("worker")
    for number in range(2):
        address = namespace.run("worker", "cat", f"/sys/class/net/net{number + 1}/address")
        parent = cluster.node.run(f"cat /sys/class/net/ib{number}/address")
        assert address.strip()[-23:] == parent.strip()[-23:]


@pytest.fixture
def cdi(cluster: Cluster) -> Iterator[None]:
    """A pool that answers with CDI names."""
    with configured(cluster, {"pools": [{"name": CDI, "slots": 4, "cdi": True}]}, {CDI: 8}):
        yield


@pytest.mark.usefixtures("cdi")
def test_containerd_gives_a_pod_the_devices_of_our_cdi_names(
    cluster: Cluster, namespace: Namespace
) -> None:
    namespace.network("fabric", ipoib("10.56.0.0/16"))
    namespace.pod("worker", networks="fabric", devices={CDI: 1})
    namespace.running("worker")
    (device,) = uverbs(namespace, "worker")
    address = namespace.run("worker", "cat", "/sys/class/net/net1/address").strip()
    assert address.replace(":", "")[-16:] == guid_of(cluster, rdma_of(cluster, device))
