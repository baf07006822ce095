"""Pods on a real kubelet, containerd and Multus: their devices, interfaces and addresses."""

import ipaddress
import time
from collections.abc import Iterator

import pytest

from tests.cluster.cluster import (
    NETWORKS_ANNOTATION,
    PATIENCE,
    Cluster,
    Document,
    Namespace,
    pod,
    pod_spec,
)
from tests.cluster.configurations import ipoib
from tests.cluster.installation import HCA, await_nothing_left, explain, explain_job, renamed
from tests.cluster.seen import guid_of, pings, rdma_of, uverbs
from tests.waiting import until


def test_two_pods_hold_an_hca_and_an_interface_on_it_and_reach_each_other(
    cluster: Cluster, namespace: Namespace
) -> None:
    namespace.network("fabric", ipoib("10.56.0.0/16"))
    for name in ("one", "two"):
        namespace.pod(name, networks="fabric", devices={HCA: 1})
    namespace.running("one", "two")
    for name in ("one", "two"):
        (device,) = uverbs(namespace, name)
        interface = namespace.networks(name)["net1"]
        assert interface["name"] == f"{namespace.name}/fabric"
        assert ipaddress.ip_address(interface["ips"][0]) in ipaddress.ip_network("10.56.0.0/16")
        inside = namespace.run(name, "cat", "/sys/class/net/net1/address").strip()
        assert inside.replace(":", "")[-16:] == guid_of(cluster, rdma_of(cluster, device))
        (attachment,) = explain(cluster, f"{namespace.name}/{name}")["attachments"]
        assert attachment["matches"] is True, attachment
    assert pings(namespace, "one", namespace.address("two"))
    assert pings(namespace, "two", namespace.address("one"))
    namespace.delete("one", "two")
    await_nothing_left(cluster)


def test_the_fabric_node_shows_the_pod_and_a_port_that_goes_down(
    cluster: Cluster, namespace: Namespace
) -> None:
    namespace.network("fabric", ipoib("10.56.0.0/16"))
    namespace.pod("one", networks="fabric", devices={HCA: 1})
    namespace.running("one")
    (device,) = uverbs(namespace, "one")
    rdma = rdma_of(cluster, device)
    kind = cluster.objects.resources.get(
        api_version="fabric.podfabric.io/v1alpha1", kind="FabricNode"
    )

    def status() -> Document:
        found: Document = kind.get(name=cluster.node.name).to_dict()["status"]
        return found

    def shown() -> bool:
        return any(
            (each["pod"], each["interface"]) == (f"{namespace.name}/one", "net1")
            for each in status().get("attachments", ())
        )

    def faulty() -> bool:
        return any("DOWN" in fault["text"] for fault in status().get("faults", ()))

    def page() -> str:
        text: str = cluster.node.run("busybox wget -q -O - http://127.0.0.1:9810/")
        return text

    def degraded() -> str:
        conditions = cluster.core.read_node(cluster.node.name).status.conditions
        return next((one.status for one in conditions if one.type == "FabricDegraded"), "")

    until(shown, PATIENCE, "the attachment in the FabricNode", pause=1)
    assert not faulty()
    assert f"{namespace.name}/one" in page()
    metrics = cluster.node.run("busybox wget -q -O - http://127.0.0.1:9810/metrics")
    held = [line for line in metrics.splitlines() if line.startswith("podfabric_pod_device{")]
    assert any(f'device="{rdma}"' in line and 'pod="one"' in line for line in held), held
    knob = f"/sys/class/infiniband/{rdma}/ibloop/port"
    try:
        cluster.node.run(f"echo down > {knob}")
        began = time.monotonic()
        until(lambda: "is DOWN" in page(), PATIENCE, "the fault on the page", pause=0.5)
        print(f"the page shows the fault after {time.monotonic() - began:.1f} s")
        until(faulty, PATIENCE, "the fault in the FabricNode", pause=0.5)
        until(lambda: degraded() == "True", PATIENCE, "the condition of the Node", pause=0.5)
        print(f"the Node is degraded after {time.monotonic() - began:.1f} s")
        until(
            lambda: any(event.startswith("FabricFault: ") for event in namespace.events("one")),
            PATIENCE,
            "the event on the pod",
            pause=1,
        )
    finally:
        cluster.node.run(f"echo up > {knob}")
    until(lambda: not faulty(), PATIENCE, "the end of the fault in the FabricNode", pause=1)
    until(lambda: degraded() == "False", PATIENCE, "the end of the condition", pause=1)


def test_pods_of_a_partition_reach_each_other_and_no_other(
    cluster: Cluster, namespace: Namespace
) -> None:
    namespace.network("tenant-a", ipoib("10.1.0.0/24", pkey="0x8001"))
    namespace.network("tenant-b", ipoib("10.1.0.0/24", pkey="0x8002"))
    # One pod of the job is in the other partition by mistake.
    for name, fabric in {"a1": "tenant-a", "a2": "tenant-a", "b1": "tenant-b"}.items():
        document = pod(name, networks=fabric, devices={HCA: 1})
        document["metadata"]["labels"] = {"job-name": "training"}
        namespace.apply(document)
    namespace.running("a1", "a2", "b1")
    assert namespace.run("a1", "cat", "/sys/class/net/net1/broadcast").split(":")[8:10] == [
        "80",
        "01",
    ]
    assert pings(namespace, "a1", namespace.address("a2"))
    assert namespace.address("b1") not in {namespace.address("a1"), namespace.address("a2")}
    assert not pings(namespace, "a1", namespace.address("b1"), tries=1)

    for name, pkey, index in (("a1", 0x8001, 1), ("a2", 0x8001, 1), ("b1", 0x8002, 2)):
        nccl = namespace.run(name, "/bin/sh", "-c", "cat $NCCL_CONF_FILE").splitlines()
        assert nccl[-2:] == [f"NCCL_IB_PKEY_VALUE={pkey:#06x}", f"NCCL_IB_PKEY={index}"]
        ucx = namespace.run(name, "/bin/sh", "-c", "cat $UCX_CONFIG_DIR/ucx.conf").splitlines()
        assert ucx[-1] == f"UCX_IB_PKEY={pkey & 0x7FFF:#06x}"

    def differing() -> list[Document]:
        job = explain_job(namespace, "training")
        assert [each["pod"] for each in job["pods"]] == [f"{namespace.name}/{it}" for it in names]
        return [each for each in job["differences"] if each["about"] == "P_KEY"]

    names = ("a1", "a2", "b1")
    until(lambda: len(differing()) == 1, PATIENCE, "the P_Key that differs", pause=2)
    (found,) = differing()
    assert found["pods"] == [f"{namespace.name}/b1"]
    assert found["text"].startswith("b1 has P_Key 0x8002, most pods have P_Key 0x8001: ")


def test_a_pod_of_two_hcas_has_an_interface_on_each(cluster: Cluster, namespace: Namespace) -> None:
    namespace.network("rail0", ipoib("10.57.0.0/16"))
    namespace.network("rail1", ipoib("10.58.0.0/16"))
    namespace.pod("worker", networks="rail0, rail1", devices={HCA: 2})
    namespace.running("worker")
    held = {guid_of(cluster, rdma_of(cluster, each)) for each in uverbs(namespace, "worker")}
    addresses = (
        namespace.run("worker", "cat", f"/sys/class/net/{name}/address").strip()
        for name in ("net1", "net2")
    )
    assert {address.replace(":", "")[-16:] for address in addresses} == held
    assert len(held) == 2


def test_the_same_definition_works_on_a_node_with_other_interface_names(
    cluster: Cluster, namespace: Namespace
) -> None:
    namespace.network("fabric", ipoib("10.56.0.0/16"))
    with renamed(cluster, {"ib0": "ibs1f0", "ib1": "ibP257p0s0"}):
        for name in ("one", "two"):
            namespace.pod(name, networks="fabric", devices={HCA: 1})
        namespace.running("one", "two")
        assert pings(namespace, "one", namespace.address("two"))
        namespace.delete("one", "two")
        await_nothing_left(cluster)


def test_an_init_container_and_a_restarted_container_have_the_pods_device_and_interface(
    cluster: Cluster, namespace: Namespace
) -> None:
    namespace.network("fabric", ipoib("10.56.0.0/16"))
    document = pod("worker", networks="fabric", devices={HCA: 1})
    (main,) = document["spec"]["containers"]
    look = "(ls /dev/infiniband && cat /sys/class/net/net1/address) > /dev/termination-log"
    document["spec"]["initContainers"] = [
        {**main, "name": "init", "command": ["/bin/sh", "-c", look]}
    ]
    namespace.apply(document)
    (running,) = namespace.running("worker")
    message = running.status.init_container_statuses[0].state.terminated.message
    before = uverbs(namespace, "worker"), namespace.address("worker")
    assert before[0] < set(message.split())
    assert namespace.run("worker", "cat", "/sys/class/net/net1/address").strip() in message

    # Later, because the end of process 1 kills the command too.
    namespace.run("worker", "/bin/sh", "-c", "(sleep 1; kill 1) > /dev/null 2>&1 &")
    until(
        lambda: namespace.read("worker").status.container_statuses[0].restart_count == 1,
        PATIENCE,
        "restart",
        pause=0.5,
    )
    namespace.running("worker")
    assert (uverbs(namespace, "worker"), namespace.address("worker")) == before


@pytest.fixture
def deployment(namespace: Namespace) -> Iterator[str]:
    """A deployment of no pods with an HCA and an interface each."""
    namespace.network("fabric", ipoib("10.56.0.0/24"))
    template = {
        "metadata": {"labels": {"app": "many"}, "annotations": {NETWORKS_ANNOTATION: "fabric"}},
        "spec": pod_spec({HCA: 1}),
    }
    namespace.apply(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "many"},
            "spec": {
                "replicas": 0,
                "selector": {"matchLabels": {"app": "many"}},
                "template": template,
            },
        }
    )
    yield "many"


def scale(namespace: Namespace, deployment: str, replicas: int) -> None:
    """Scale a deployment, and wait until exactly that many pods exist."""
    resource = namespace.cluster.objects.resources.get(api_version="apps/v1", kind="Deployment")
    resource.patch(
        name=deployment,
        namespace=namespace.name,
        body={"spec": {"replicas": replicas}},
        content_type="application/merge-patch+json",
    )

    def reached() -> bool:
        pods = namespace.pods()
        return len(pods) == replicas and all(each.status.phase == "Running" for each in pods)

    until(reached, 4 * PATIENCE, f"{replicas} pods", pause=1)


@pytest.mark.timeout(5400)
def test_a_deployment_scaled_up_and_down_gives_no_address_twice_and_leaves_none(
    cluster: Cluster, namespace: Namespace, deployment: str, scaling: tuple[int, int]
) -> None:
    replicas, times = scaling
    for _ in range(times):
        scale(namespace, deployment, replicas)
        names = [each.metadata.name for each in namespace.pods()]
        addresses = [namespace.address(name) for name in names]
        assert len(set(addresses)) == replicas
        scale(namespace, deployment, 0)
        await_nothing_left(cluster)
