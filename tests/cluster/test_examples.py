"""Every file of the examples, applied to the API server: its pod runs, or we say why it cannot."""

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.cluster import images
from tests.cluster.cluster import NETWORKS_ANNOTATION, Cluster, Namespace
from tests.cluster.installation import configured, with_vfs
from tests.runtime import CHECKOUT

EXAMPLES = CHECKOUT / "netattach-examples"
IPOIB = {
    "pools": [
        {"name": "rdma/hca", "slots": 16},
        {"name": "rdma/rail0", "slots": 16, "overlap": True, "selectors": {"ifNames": ["ib0"]}},
        {"name": "rdma/rail1", "slots": 16, "overlap": True, "selectors": {"ifNames": ["ib1"]}},
    ]
}
IPOIB_OFFERED = {"rdma/hca": 32, "rdma/rail0": 16, "rdma/rail1": 16}
VF = "example.com/eth_vf"
CANNOT = {
    "nccl": "the machine has no GPU",
    "sriov-dpdk": "the machine's CPU has no pages of 1 GiB",
    "sriov-vlan": "max_tx_rate is more than the emulated card's 1000 Mbit/s",
    "sriov-dual-rail": "rdmaIsolation: the emulated card's VFs have no RDMA devices",
    "sriov-infiniband": "rdmaIsolation: the emulated card's VFs have no RDMA devices",
    "sriov-matched": "rdmaIsolation: the emulated card's VFs have no RDMA devices",
    "sriov-roce": "rdmaIsolation: the emulated card's VFs have no RDMA devices",
    "sriov-whole-pf": "rdmaIsolation: the emulated card has no RDMA device",
}
FILES = sorted(EXAMPLES.glob("*.yaml"))
OF_VFS = [file.stem for file in FILES if file.stem.startswith("sriov-")]
OF_HCAS = [file.stem for file in FILES if file.stem not in OF_VFS]


def documents(name: str) -> list[dict[str, Any]]:
    """The objects of an example, with an image that is there and a pod that ends at once."""
    found: list[dict[str, Any]] = list(yaml.safe_load_all((EXAMPLES / f"{name}.yaml").read_text()))
    for each in found:
        if each["kind"] == "Pod":
            each["spec"]["terminationGracePeriodSeconds"] = 0
            for container in each["spec"]["containers"]:
                container["image"] = images.WORKLOAD
    return found


@pytest.fixture(scope="module")
def hcas(cluster: Cluster) -> Iterator[None]:
    """The pools that the examples with HCAs name."""
    with configured(cluster, IPOIB, IPOIB_OFFERED):
        yield


@pytest.fixture(scope="module")
def vfs(cluster: Cluster) -> Iterator[None]:
    """The pool that the examples with VFs name."""
    with with_vfs(cluster, 2) as pf:
        selectors = {"pfNames": [pf]}
        entry = {"resourceName": "eth_vf", "resourcePrefix": "example.com", "selectors": selectors}
        with configured(cluster, {"resourceList": [entry]}, {VF: 2}):
            yield


def applied(namespace: Namespace, name: str) -> None:
    """Applies an example; its pod runs with an interface for each network that it names."""
    objects = documents(name)
    pods = [each for each in objects if each["kind"] == "Pod"]
    for each in objects:
        namespace.apply(each)
    if reason := CANNOT.get(name):
        pytest.skip(reason)
    for pod in pods:
        own = pod["metadata"]["name"]
        namespace.running(own)
        asked = pod["metadata"]["annotations"][NETWORKS_ANNOTATION].split(",")
        attached = namespace.networks(own)
        assert set(attached) == {"eth0", *(f"net{n + 1}" for n in range(len(asked)))}
        for interface in attached:
            namespace.run(own, "ip", "link", "show", interface)


@pytest.mark.usefixtures("hcas")
@pytest.mark.parametrize("name", OF_HCAS)
def test_an_example_with_an_hca_runs(name: str, namespace: Namespace) -> None:
    applied(namespace, name)


@pytest.mark.long
@pytest.mark.usefixtures("vfs")
@pytest.mark.parametrize("name", OF_VFS)
def test_an_example_with_a_vf_runs(name: str, namespace: Namespace) -> None:
    applied(namespace, name)


def test_a_reason_is_given_for_a_file_that_is_there() -> None:
    assert set(CANNOT) <= {file.stem for file in FILES}
