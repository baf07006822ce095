"""podfabric on the cluster: installation, configuration, and the remains of pods on the node."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import yaml
from kubernetes import client
from kubernetes.client.exceptions import ApiException
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster.cluster import PATIENCE, Cluster, Namespace, is_ready
from tests.kernel.igb import PARENTS
from tests.kernel.vm import layout
from tests.waiting import until

NAMESPACE = "podfabric"
COMPONENT = "app.kubernetes.io/component"
CONTROLLER = "controller"
HCA = "rdma/hca"
CUSTODIAN = "podfabric"
ALLOCATIONS = "allocations"  # a name of leftovers.py
LEFTOVERS = layout.CHECKOUT / "tests/cluster/leftovers.py"


def install(cluster: Cluster) -> None:
    """Install podfabric as README describes, and wait until the node offers HCAs."""
    upgrade(cluster, {})
    await_agent(cluster)
    await_controller(cluster)


def agents(cluster: Cluster) -> list[client.V1Pod]:
    """The pods of the agent, or of the custodian."""
    pods = Namespace(cluster, NAMESPACE).pods()
    return [pod for pod in pods if pod.metadata.labels[COMPONENT] != CONTROLLER]


def controllers(cluster: Cluster) -> list[client.V1Pod]:
    """The pods of the controller."""
    pods = Namespace(cluster, NAMESPACE).pods()
    return [pod for pod in pods if pod.metadata.labels[COMPONENT] == CONTROLLER]


_WHAT_IS_LEFT = """
tail -n +1 /run/podfabric/*.state
find /var/lib/podfabric/attachments /var/lib/podfabric/ipam
tail -n 40 /var/log/pods/podfabric_*/*/*.log
"""


def uninstall(cluster: Cluster) -> None:
    """Uninstall podfabric, and delete the custodian once the node is empty."""
    await_watch_of_daemonsets(cluster)
    helm(cluster, "uninstall", "podfabric", "--wait")
    await_custodian_and_delete_it(cluster)


def await_custodian_and_delete_it(cluster: Cluster) -> None:
    """Wait until the custodian reports by its readiness that the node is empty, then delete it.

    A previous agent that ends may still be ready, so this waits as `kubectl rollout status` does.
    """
    try:
        until(lambda: _is_rolled_out(cluster), PATIENCE, "custodian that is done", pause=1)
    except AssertionError:
        print(*((pod.metadata.name, pod.status.phase) for pod in agents(cluster)))
        print(cluster.node.status_of(_WHAT_IS_LEFT)[1])
        raise
    cluster.core.delete_namespaced_service_account(CUSTODIAN, NAMESPACE)
    sets = cluster.objects.resources.get(api_version="apps/v1", kind="DaemonSet")
    sets.delete(name=CUSTODIAN, namespace=NAMESPACE)
    until(
        lambda: not Namespace(cluster, NAMESPACE).pods(), PATIENCE, "end of the custodian", pause=1
    )


def await_watch_of_daemonsets(cluster: Cluster) -> None:
    """Wait until the controller manager watches DaemonSets.

    After an outage of the API server it does not watch for some seconds. If a DaemonSet is deleted
    and recreated with its name meanwhile, it seems to have changed, and the garbage collector never
    removes the pods of the deleted one.
    """
    sets = cluster.objects.resources.get(api_version="apps/v1", kind="DaemonSet")
    labels = {"tests": "watched"}
    nowhere = {"nodeSelector": labels, "containers": [{"name": "none", "image": "none"}]}
    spec = {
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": nowhere},
    }
    kind = {"apiVersion": "apps/v1", "kind": "DaemonSet"}
    body = {**kind, "metadata": {"name": "watched"}, "spec": spec}
    made = sets.create(body=body, namespace="default")

    def is_seen() -> bool:
        seen = sets.get(name="watched", namespace="default").to_dict()
        return bool(seen["status"].get("observedGeneration") == made.metadata.generation)

    try:
        until(is_seen, PATIENCE, "watch of the DaemonSets", pause=0.5)
    finally:
        sets.delete(name="watched", namespace="default")


def await_agent(cluster: Cluster) -> None:
    """Wait until only the agent of the present version serves, and the node offers HCAs."""
    until(lambda: _is_rolled_out(cluster), PATIENCE, "agent in place of the former one", pause=0.5)
    until(lambda: _serves(cluster), PATIENCE, "agent that serves", pause=0.5)
    until(lambda: HCA in registered(cluster), PATIENCE, f"pool of {HCA}", pause=0.5)
    until(lambda: cluster.allocatable(HCA), PATIENCE, f"node with {HCA}", pause=0.5)


def registered(cluster: Cluster) -> set[str]:
    """The resources whose lists the kubelet reads from the present agent.

    The node's status may still be that of the previous agent.
    """
    text = cluster.node.run("busybox wget -q -O - http://127.0.0.1:9810/metrics")
    return {
        sample.labels["resource"]
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.get("state") == "registered" and sample.value == 1
    }


def await_controller(cluster: Cluster) -> None:
    """Wait until each pod of the controller is ready: one leads, the rest stand by."""
    deployments = cluster.objects.resources.get(api_version="apps/v1", kind="Deployment")

    def is_available() -> bool:
        deployment = deployments.get(name=f"podfabric-{CONTROLLER}", namespace=NAMESPACE).to_dict()
        available = deployment["status"].get("availableReplicas", 0)
        return bool(available == deployment["spec"]["replicas"])

    until(is_available, PATIENCE, "controller", pause=0.5)


def await_offered(cluster: Cluster, offered: Mapping[str, int]) -> None:
    """Wait until the node offers these numbers of device ids to pods."""
    until(
        lambda: {name: cluster.allocatable(name) for name in offered} == offered,
        PATIENCE,
        f"node with {offered}",
        pause=0.5,
    )


def kill_agent(cluster: Cluster) -> None:
    """Kill the agent's process; the kubelet starts another one."""
    cluster.node.run("pkill -9 -f 'podfabric agent$'")


@contextmanager
def configured(
    cluster: Cluster, configuration: Mapping[str, object], offered: Mapping[str, int]
) -> Iterator[None]:
    """Another configuration for the block, once the node offers the expected devices.

    Afterwards the node has the default configuration again.
    """
    upgrade(cluster, configuration)
    try:
        await_offered(cluster, offered)
        yield
    finally:
        upgrade(cluster, {})
        until(lambda: cluster.allocatable(HCA), PATIENCE, f"node with {HCA}", pause=0.5)


@contextmanager
def with_vfs(cluster: Cluster, number: int, rdma: str = "") -> Iterator[str]:
    """VFs of the node's first network card for the block, which gets the PF's name.

    `rdma` is the kind of RDMA device on each VF: "isolated" or "infiniband", as in vfs.py. With
    "beside" the block gets the interface of an InfiniBand PF, and the PF's name after it.
    """
    command = f"cd {layout.CHECKOUT} && {layout.PYTHON} -m tests.cluster.vfs"
    try:
        yield cluster.node.run(f"{command} {number} {rdma}", timeout=600).strip()
    finally:
        cluster.node.run(f"{command} 0", timeout=600)


@contextmanager
def with_pools_of_vfs(cluster: Cluster, rdma: str, pools: Mapping[str, str]) -> Iterator[None]:
    """Two VFs for the block, each with an RDMA device in exclusive mode, and pools of them.

    `rdma` is "isolated" or "infiniband", as in vfs.py. `pools` has the VFs of each pool, as a
    selector names them after the PF's name: "#0" for the first, "" for both.
    """
    with with_vfs(cluster, 2, rdma) as pf:
        offered = {name: 1 if vfs else 2 for name, vfs in pools.items()}
        shape = {"mode": "exclusive", "overlap": True}
        own = [
            {"name": name, **shape, "selectors": {"pfNames": [pf + pools[name]]}} for name in pools
        ]
        try:
            upgrade(cluster, {"pools": own})
            await_offered(cluster, offered)
            yield
        finally:
            upgrade(cluster, {})
    until(lambda: cluster.allocatable(HCA), PATIENCE, f"node with {HCA}", pause=0.5)


@contextmanager
def unplugged(cluster: Cluster) -> Iterator[None]:
    """Unplug all HCAs for the block, and plug them in afterwards."""
    cluster.node.run("/sbin/modprobe --remove ibloop")
    try:
        yield
    finally:
        up = " && ".join(f"ip link set {parent} up" for parent in PARENTS)
        cluster.node.run(f"/sbin/modprobe ibloop && {up}")


@contextmanager
def renamed(cluster: Cluster, names: Mapping[str, str]) -> Iterator[None]:
    """Rename interfaces of the node for the block."""

    def rename(old: str, new: str) -> None:
        link = "ip link set"
        cluster.node.run(f"{link} {old} down && {link} {old} name {new} && {link} {new} up")

    for old, new in names.items():
        rename(old, new)
    try:
        yield
    finally:
        for old, new in names.items():
            rename(new, old)


def explain(cluster: Cluster, pod: str) -> dict[str, Any]:
    """The output of `podfabric explain` for a pod, namespace/name, in the agent's container."""
    (agent,) = (each.metadata.name for each in agents(cluster) if is_ready(each))
    output = Namespace(cluster, NAMESPACE).run(agent, "podfabric", "explain", "-o", "json", pod)
    explained: dict[str, Any] = json.loads(output)
    return explained


def explain_job(namespace: Namespace, job: str) -> dict[str, Any]:
    """The output of `podfabric explain --job`, with an administrator's rights."""
    command = [sys.executable, "-c", "from cli.main import main; main()", "explain", "-o", "json"]
    command += ["--kubeconfig", str(namespace.cluster.plane.kubeconfig("admin"))]
    command += ["--job", job, "-n", namespace.name]
    done = subprocess.run(command, cwd=layout.CHECKOUT, check=True, capture_output=True, text=True)
    explained: dict[str, Any] = json.loads(done.stdout)
    return explained


def await_nothing_left(cluster: Cluster, *, allocations: bool = False) -> None:
    """Wait until no pod has left anything on the node. Raises AssertionError that names the rest.

    The device plugin keeps an allocation for two to three minutes after its pod, because the
    kubelet may not have recorded the holder yet. So `allocations` are awaited once, at the end.
    """
    left: dict[str, list[object]] = {}

    def none() -> bool:
        nonlocal left
        left = leftovers(cluster)
        if not allocations:
            left.pop(ALLOCATIONS, None)
        if not left and (rows := addresses(cluster)):  # last, as it starts an interpreter
            left["addresses"] = rows
        return not left

    try:
        until(none, PATIENCE, "end", pause=1)
    except AssertionError:
        raise AssertionError(f"left on the node: {left}") from None


def leftovers(cluster: Cluster) -> dict[str, list[object]]:
    """Remains on the node for pods: interfaces, entries, allocations, namespaces."""
    found = json.loads(cluster.node.run(f"/usr/bin/python3 -IS {LEFTOVERS}", timeout=600))
    if len(found["sandboxes"]) <= len(controllers(cluster)):
        del found["sandboxes"]  # they exist as long as podfabric is installed
    return {name: left for name, left in found.items() if left}


def addresses(cluster: Cluster) -> list[object]:
    """The output of `podfabric ipam list` on the node; empty if podfabric has left the node."""
    command = f"{layout.PYTHON.with_name('podfabric')} ipam list -o json"
    status, output, errors = cluster.node.status_of(command, timeout=600)
    if "has no address store" in errors:
        return []
    assert status == 0, errors
    rows: list[object] = json.loads(output)
    return rows


@contextmanager
def serving_nv_ipam(cluster: Cluster, namespace: str, crds: Iterable[str]) -> Iterator[None]:
    """Agents and a controller that serve nv-ipam's pools of the namespace, and nv-ipam's kinds.

    Afterwards they serve none. The kinds stay.
    """
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    for crd in crds:
        for document in yaml.safe_load_all(crd):
            cluster.apply(document)
    upgrade(cluster, {}, ipam={"nv_ipam": True, "nv_ipam_namespace": namespace})
    try:
        await_agent(cluster)
        yield
    finally:
        upgrade(cluster, {})
        await_agent(cluster)


def upgrade(cluster: Cluster, configuration: Mapping[str, object], **values: object) -> None:
    """Install the chart, or upgrade its release to another configuration and other `values`."""
    values = {
        "image": {"repository": "podfabric", "pullPolicy": "Never"},
        "config": configuration,
        **values,
    }
    words = ("upgrade", "--install", "podfabric", "deploy/chart", "--create-namespace")
    helm(cluster, *words, "--values", "-", standard_input=json.dumps(values))
    for agent in agents(cluster):  # a changed pod gets a changed ConfigMap immediately
        changed = {"metadata": {"annotations": {"tests/changed": str(time.time())}}}
        with suppress(ApiException):  # it has ended
            cluster.core.patch_namespaced_pod(agent.metadata.name, NAMESPACE, changed)


def helm(cluster: Cluster, *words: str, standard_input: str = "") -> None:
    """Run helm as an administrator."""
    subprocess.run(
        ["tools/go_tool.sh", "helm", *words, "--namespace", NAMESPACE],
        cwd=layout.CHECKOUT,
        env={**os.environ, "KUBECONFIG": str(cluster.plane.kubeconfig("admin"))},
        input=standard_input,
        text=True,
        check=True,
    )


def _is_rolled_out(cluster: Cluster) -> bool:
    """The condition of `kubectl rollout status`, and no surplus pod."""
    sets = cluster.objects.resources.get(api_version="apps/v1", kind="DaemonSet")
    wanted = sets.get(name="podfabric", namespace=NAMESPACE).to_dict()
    status = wanted["status"]
    numbers = {
        status.get("desiredNumberScheduled"),
        status.get("updatedNumberScheduled"),
        status.get("numberAvailable"),
        len(agents(cluster)),
    }
    return numbers == {1} and status.get("observedGeneration") == wanted["metadata"]["generation"]


def _serves(cluster: Cluster) -> bool:
    script = "busybox wget -q -O - http://127.0.0.1:9810/readyz"
    return cluster.node.status_of(script)[0] == 0
