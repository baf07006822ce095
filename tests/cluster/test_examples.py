"""Every file of the examples, applied to the API server: its pod runs, or a reason is given
here."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml

from tests.api import nv_ipam
from tests.cluster import images
from tests.cluster.cluster import (
    NETWORKS_ANNOTATION,
    PATIENCE,
    Cluster,
    Namespace,
    namespaces,
)
from tests.cluster.installation import (
    await_nothing_left,
    configured,
    serving_nv_ipam,
    with_pools_of_vfs,
    with_vfs,
)
from tests.runtime import CHECKOUT
from tests.waiting import until

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
    "roce-macvlan": "the machine's HCAs are InfiniBand",
    "sriov-dpdk": "the machine's CPU has no pages of 1 GiB",
    "sriov-vlan": "max_tx_rate is more than the emulated card's 1000 Mbit/s",
    "sriov-whole-pf": "rdmaIsolation: the emulated card has no RDMA device",
}
FILES = sorted(EXAMPLES.glob("*.yaml"))
OF_ISOLATED_VFS = ["sriov-dual-rail", "sriov-matched", "sriov-roce"]
OF_INFINIBAND_VFS = "sriov-infiniband"
OF_RDMA_VFS = [*OF_ISOLATED_VFS, OF_INFINIBAND_VFS]
OF_VFS = [
    file.stem for file in FILES if file.stem.startswith("sriov-") and file.stem not in OF_RDMA_VFS
]
ISOLATED_POOLS = {
    "example.com/roce_vf": "",
    "rdma/vf": "",
    "example.com/rail0_vf": "#0",
    "example.com/rail1_vf": "#1",
}
OF_STICKY, OF_NV_IPAM, OF_RAILS = "sticky", "nv-ipam", "ipoib-rails"
OF_HCAS = [file.stem for file in FILES if file.stem not in (*OF_VFS, *OF_RDMA_VFS, OF_NV_IPAM)]


def documents(name: str) -> list[dict[str, Any]]:
    """The objects of an example, with an image that the node has and a pod that ends
    immediately."""
    found: list[dict[str, Any]] = list(yaml.safe_load_all((EXAMPLES / f"{name}.yaml").read_text()))
    for each in found:
        spec = {"Pod": each, "StatefulSet": each["spec"].get("template")}.get(each["kind"])
        if spec is not None:
            spec["spec"]["terminationGracePeriodSeconds"] = 0
            for container in spec["spec"]["containers"]:
                container["image"] = images.WORKLOAD
    return found


def pods_of(objects: list[dict[str, Any]]) -> dict[str, list[str]]:
    """The names of the expected pods, and the networks that each names."""
    found: dict[str, list[str]] = {}
    for each in objects:
        name = each["metadata"]["name"]
        if each["kind"] == "Pod":
            annotations, names = each["metadata"]["annotations"], [name]
        elif each["kind"] == "StatefulSet":
            annotations = each["spec"]["template"]["metadata"]["annotations"]
            names = [f"{name}-{number}" for number in range(each["spec"]["replicas"])]
        else:
            continue
        written = annotations[NETWORKS_ANNOTATION]
        asked = [json.dumps(element) for element in json.loads(written)] if "[" in written else []
        found |= dict.fromkeys(names, asked or written.split(","))
    return found


@pytest.fixture(scope="module")
def hcas(cluster: Cluster) -> Iterator[None]:
    """Configure the pools that the examples with HCAs name."""
    with configured(cluster, IPOIB, IPOIB_OFFERED):
        yield


@pytest.fixture(scope="module")
def vfs(cluster: Cluster) -> Iterator[None]:
    """Configure the pool that the examples with VFs name."""
    with with_vfs(cluster, 2) as pf:
        selectors = {"pfNames": [pf]}
        entry = {"resourceName": "eth_vf", "resourcePrefix": "example.com", "selectors": selectors}
        with configured(cluster, {"resourceList": [entry]}, {VF: 2}):
            yield


@pytest.fixture(scope="module")
def isolated_vfs(cluster: Cluster) -> Iterator[None]:
    """Configure the pools that the examples of RDMA devices in exclusive mode name."""
    with with_pools_of_vfs(cluster, "isolated", ISOLATED_POOLS):
        yield


@pytest.fixture
def infiniband_vfs(cluster: Cluster) -> Iterator[None]:
    """Configure the pool that the example with InfiniBand VFs names."""
    with with_pools_of_vfs(cluster, "infiniband", {"example.com/ib_vf": ""}):
        yield


@pytest.fixture(scope="module")
def examples(hcas: None, cluster: Cluster) -> Iterator[Mapping[str, Namespace]]:
    """The examples with HCAs, applied all at once, each in a separate namespace."""
    with namespaces(cluster, [f"example-{name}" for name in OF_HCAS]) as made:
        found = dict(zip(OF_HCAS, made, strict=True))
        for name, namespace in found.items():
            apply(namespace, name)
        yield found
    await_nothing_left(cluster)


def apply(namespace: Namespace, name: str) -> None:
    """Apply every object of an example."""
    for each in documents(name):
        namespace.cluster.apply(each, each["metadata"].get("namespace", namespace.name))


def require_running(namespace: Namespace, name: str) -> None:
    """Check that the example's pods run, with an interface for each network that they name."""
    if reason := CANNOT.get(name):
        pytest.skip(reason)
    for own, asked in pods_of(documents(name)).items():
        until(lambda own=own: namespace.exists(own), PATIENCE, own)  # type: ignore[misc]
        namespace.running(own)
        attached = namespace.networks(own)
        rails = ["net1-1"] if name == OF_RAILS else []
        assert set(attached) == {"eth0", *(f"net{n + 1}" for n in range(len(asked))), *rails}
        for interface in attached:
            namespace.run(own, "ip", "link", "show", interface)


@pytest.mark.parametrize("name", OF_HCAS)
def test_an_example_with_an_hca_runs(name: str, examples: Mapping[str, Namespace]) -> None:
    require_running(examples[name], name)


def test_a_pod_of_the_example_of_sticky_addresses_keeps_its_address(
    examples: Mapping[str, Namespace],
) -> None:
    namespace = examples[OF_STICKY]
    names = ["trainer-0", "trainer-1"]
    until(lambda: all(map(namespace.exists, names)), PATIENCE, "pods of the StatefulSet", pause=0.5)
    namespace.running(*names)
    given = {name: namespace.address(name) for name in names}
    former = {name: namespace.read(name).metadata.uid for name in names}
    for name in names:
        namespace.cluster.core.delete_namespaced_pod(name, namespace.name)
    until(
        lambda: all(
            namespace.exists(name) and namespace.read(name).metadata.uid != former[name]
            for name in names
        ),
        PATIENCE,
        "new pods of the StatefulSet",
        pause=0.5,
    )
    namespace.running(*names)
    assert {name: namespace.address(name) for name in names} == given


@pytest.mark.long
def test_the_example_of_nv_ipam_runs(cluster: Cluster, namespace: Namespace) -> None:
    (pool,) = [each for each in documents(OF_NV_IPAM) if each["kind"] == "IPPool"]
    where = pool["metadata"]["namespace"]
    with serving_nv_ipam(cluster, where, nv_ipam.crds()):
        cluster.apply(pool, where)
        apply(namespace, OF_NV_IPAM)
        require_running(namespace, OF_NV_IPAM)
        assert namespace.address("nv-worker-0").startswith("10.74.")
        namespace.delete("nv-worker-0")


@pytest.mark.long
@pytest.mark.usefixtures("vfs")
@pytest.mark.parametrize("name", OF_VFS)
def test_an_example_with_a_vf_runs(name: str, namespace: Namespace) -> None:
    apply(namespace, name)
    require_running(namespace, name)


@pytest.mark.long
@pytest.mark.usefixtures("isolated_vfs")
@pytest.mark.parametrize("name", OF_ISOLATED_VFS)
def test_an_example_with_an_isolated_rdma_device_runs(name: str, namespace: Namespace) -> None:
    apply(namespace, name)
    require_running(namespace, name)
    (pod,) = pods_of(documents(name))
    devices = namespace.run(pod, "ls", "/sys/class/infiniband").split()
    assert len(devices) == len(namespace.networks(pod)) - 1


@pytest.mark.long
@pytest.mark.usefixtures("infiniband_vfs")
def test_the_example_with_an_infiniband_vf_has_its_guid(namespace: Namespace) -> None:
    apply(namespace, OF_INFINIBAND_VFS)
    require_running(namespace, OF_INFINIBAND_VFS)
    (pod,) = [each for each in documents(OF_INFINIBAND_VFS) if each["kind"] == "Pod"]
    name = pod["metadata"]["name"]
    (asked,) = json.loads(pod["metadata"]["annotations"][NETWORKS_ANNOTATION])
    assert asked["infiniband-guid"] in namespace.run(name, "ip", "link", "show", "net1")
    (device,) = namespace.run(name, "ls", "/sys/class/infiniband").split()
    assert (
        namespace.run(name, "cat", f"/sys/class/infiniband/{device}/ports/1/state").strip()
        == "4: ACTIVE"
    )


def test_a_reason_is_given_for_a_file_that_is_there() -> None:
    assert set(CANNOT) <= {file.stem for file in FILES}
