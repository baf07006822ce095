"""podfabric beside the projects that it replaces, on one real Kubernetes.

As root: `python -m bench.cluster`, where `tests.cluster.programs` finds the peers' sources. IPoIB
children beside ipoib-cni with whereabouts; VFs beside sriov-network-device-plugin, sriov-cni and
whereabouts. Pods of both sides start in turns, on one node, which is the virtual machine: read the
ratios. Then pods with children, of each side, are force-deleted while the API server is restarted.

k8s-rdma-shared-dev-plugin is not there: it finds no RDMA device that has no PCI function.
"""

import argparse
import json
import ssl
import statistics
import subprocess
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from bench import memory
from tests.cluster import cluster as clusters
from tests.cluster import peers, programs
from tests.cluster.cluster import Cluster, Namespace, is_ready
from tests.cluster.installation import addresses, configured, install, leftovers, with_vfs
from tests.cluster.node import CNI_BIN
from tests.cluster.peers import SRIOV_DEVICE_PLUGIN, whereabouts
from tests.kernel.vm import debian
from tests.waiting import until

PATIENCE = 900.0  # seconds
QUIET = 300.0  # seconds without a change before leftovers are counted: the kubelet tries again
NAMESPACE = "bench"
OTHER_NAMES = {"ipoib": "peer-ipoib", "sriov": "peer-sriov"}  # ours have the names themselves
OUR_VF, THEIR_VF = "example.com/our_vf", "example.com/their_vf"
OPERATIONS = ("run_podsandbox", "stop_podsandbox")


@dataclass(frozen=True)
class Side:
    """One of both: its network, and how to count what it has reserved."""

    name: str
    network: dict[str, Any]
    addresses: Callable[[Cluster], int]
    resource: str = ""


class Seen(NamedTuple):
    """Counters before or after some pods."""

    requests: float
    seconds: dict[str, tuple[float, float]]  # sum and count, by operation


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pods", type=int, default=10, help="of each side, one after another")
    parser.add_argument("--deleted", type=int, default=40, help="force-deleted pods of each side")
    arguments = parser.parse_args()
    with clusters.cluster(programs.KUBERNETES) as cluster:
        install(cluster)
        _install_peers(cluster)
        cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
        namespace = Namespace(cluster, NAMESPACE)
        for side in (*CHILDREN, *VFS):
            namespace.network(side.name, side.network, side.resource)
        _start_and_end(namespace, CHILDREN, arguments.pods)
        with with_vfs(cluster, 2) as pf:
            own = {
                "resourceName": OUR_VF.partition("/")[2],
                "resourcePrefix": OUR_VF.partition("/")[0],
                "selectors": {"pfNames": [f"{pf}#0"]},
            }
            with configured(cluster, {"resourceList": [own]}, {OUR_VF: 1}):
                _start_their_device_plugin(cluster, f"{pf}#1")
                _start_and_end(namespace, VFS, arguments.pods)
                memory.compare(cluster)
        _force_delete(namespace, arguments.deleted)


def _ours(cluster: Cluster) -> int:
    return len(addresses(cluster))


def _theirs(cluster: Cluster) -> int:
    pools = cluster.objects.resources.get(
        api_version="whereabouts.cni.cncf.io/v1alpha1", kind="IPPool"
    )
    return sum(len(pool.to_dict()["spec"]["allocations"]) for pool in pools.get().items)


CHILDREN = (
    Side(
        "podfabric",
        {
            "type": "ipoib",
            "master": "ib0",
            "ipam": {"type": "podfabric-ipam", "range": "10.60.0.0/16"},
        },
        _ours,
    ),
    Side(
        "ipoib-cni",
        {"type": "peer-ipoib", "master": "ib0", "ipam": whereabouts("10.61.0.0/16")},
        _theirs,
    ),
)
VFS = (
    Side(
        "podfabric-vf",
        {"type": "sriov", "ipam": {"type": "podfabric-ipam", "range": "10.62.0.0/16"}},
        _ours,
        OUR_VF,
    ),
    Side(
        "sriov-cni",
        {"type": "peer-sriov", "ipam": whereabouts("10.63.0.0/16")},
        _theirs,
        THEIR_VF,
    ),
)


def _install_peers(cluster: Cluster) -> None:
    debian.install(peers.PCI_IDS)
    programs.build([SRIOV_DEVICE_PLUGIN, *(program for program, _ in peers.CNI_PLUGINS.values())])
    for program, executable in peers.CNI_PLUGINS.values():
        name = OTHER_NAMES.get(executable, executable)
        cluster.node.run(f"cp {program.directory()}/{executable} {CNI_BIN}/{name}")
    peers.prepare_whereabouts(cluster)


def _start_their_device_plugin(cluster: Cluster, vf: str) -> None:
    """sriov-network-device-plugin, with this VF of a PF in its pool."""
    prefix, _, name = THEIR_VF.partition("/")
    entry = {"resourceName": name, "resourcePrefix": prefix, "selectors": {"pfNames": [vf]}}
    path = "/etc/pcidp/config.json"
    cluster.node.write(path, json.dumps({"resourceList": [entry]}))
    program = SRIOV_DEVICE_PLUGIN.directory() / "sriovdp"
    cluster.node.start("sriovdp", f"{program} --config-file={path} --logtostderr")
    until(lambda: cluster.allocatable(THEIR_VF), PATIENCE, f"node with {THEIR_VF}", pause=0.5)


def _start_and_end(namespace: Namespace, sides: Sequence[Side], pods: int) -> None:
    """Pods of both sides in turns: how long until they run, what it costs."""
    seconds: dict[str, list[float]] = {side.name: [] for side in sides}
    used: dict[str, list[Seen]] = {side.name: [] for side in sides}
    for number in range(-1, pods):  # the first of each side does not count
        for side in sides:
            before = _look(namespace.cluster)
            name = f"{side.name}-{number + 1}"
            devices = {side.resource: 1} if side.resource else None
            began = time.monotonic()
            namespace.pod(name, networks=side.name, devices=devices)
            until(lambda name=name: is_ready(namespace.read(name)), PATIENCE, name, pause=0.05)  # type: ignore[misc]
            took = time.monotonic() - began
            namespace.delete(name)
            after = _look(namespace.cluster)
            if number >= 0:
                seconds[side.name].append(took)
                used[side.name].append(_between(before, after))
    ours, theirs = (side.name for side in sides)
    print(f"\n{'':44}{ours:>14}{theirs:>14}{'ratio':>9}")
    _row(f"creation to Running, s, median of {pods}", *map(statistics.median, seconds.values()))
    for operation in OPERATIONS:
        means = [
            sum(seen.seconds[operation][0] for seen in each)
            / max(1.0, sum(seen.seconds[operation][1] for seen in each))
            for each in used.values()
        ]
        _row(f"the kubelet's {operation}, s, mean", *means)
    # Also what the test, the kubelet and the controllers ask, which is alike for both.
    requests = [statistics.median(seen.requests for seen in each) for each in used.values()]
    _row("requests to the API server for a pod, median", *requests)


def _force_delete(namespace: Namespace, pods: int) -> None:
    """Pods that are force-deleted while they start and while the API server is restarted."""
    cluster = namespace.cluster
    for side in CHILDREN:
        before = side.addresses(cluster)
        names = [f"{side.name}-gone-{number}" for number in range(pods)]
        for name in names:
            namespace.pod(name, networks=side.name)
        half = names[: pods // 2]
        until(
            lambda half=half: all(is_ready(namespace.read(name)) for name in half),  # type: ignore[misc]
            PATIENCE,
            "the first half",
            pause=0.5,
        )
        for name in names:
            cluster.core.delete_namespaced_pod(name, NAMESPACE, grace_period_seconds=0)
        cluster.plane.stop_api_server()
        time.sleep(10)
        cluster.plane.start_api_server()
        left = _settled(lambda side=side: (side.addresses(cluster), _children(cluster)))  # type: ignore[misc]
        print(
            f"{side.name}: {pods} pods force-deleted while the API server was restarted: "
            f"{left[0] - before} addresses and {left[1]} interfaces are left",
            flush=True,
        )


def _settled(look: Callable[[], tuple[int, int]]) -> tuple[int, int]:
    """What is seen once it has not changed for a while, or is nothing."""
    seen, since = look(), time.monotonic()
    while any(seen) and time.monotonic() - since < QUIET:
        time.sleep(5)
        now = look()
        if now != seen:
            seen, since = now, time.monotonic()
    return seen


def _children(cluster: Cluster) -> int:
    """IPoIB children on the host: dead namespaces gave them back."""
    return len(leftovers(cluster).get("interfaces", ()))


def _look(cluster: Cluster) -> Seen:
    served, kubelet = _samples(_of_api_server(cluster)), _samples(_of_kubelet(cluster))
    prefix = "kubelet_runtime_operations_duration_seconds"
    seconds = {}
    for operation in OPERATIONS:
        total, count = (
            sum(
                value
                for name, value in kubelet.items()
                if name.startswith(f"{prefix}_{kind}") and f'"{operation}"' in name
            )
            for kind in ("sum", "count")
        )
        seconds[operation] = (total, count)
    asked = sum(
        value for name, value in served.items() if name.startswith("apiserver_request_total{")
    )
    return Seen(asked, seconds)


def _between(before: Seen, after: Seen) -> Seen:
    seconds = {
        operation: (
            after.seconds[operation][0] - before.seconds[operation][0],
            after.seconds[operation][1] - before.seconds[operation][1],
        )
        for operation in OPERATIONS
    }
    return Seen(after.requests - before.requests, seconds)


def _of_api_server(cluster: Cluster) -> str:
    kubectl = cluster.node.programs["kubernetes"] / "kubectl"
    kubeconfig = cluster.plane.kubeconfig("admin")
    command = [str(kubectl), "--kubeconfig", str(kubeconfig), "get", "--raw", "/metrics"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _of_kubelet(cluster: Cluster) -> str:
    """As the API server asks it; its own proxy refuses a kubelet on the loopback."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the kubelet has signed its certificate itself
    own = cluster.plane.directory / "kubelet-client.crt"
    context.load_cert_chain(own, own.with_suffix(".key"))
    url = f"https://127.0.0.1:{cluster.node.kubelet_port}/metrics"
    with urllib.request.urlopen(url, context=context, timeout=PATIENCE) as answer:
        return str(answer.read().decode())


def _samples(text: str) -> dict[str, float]:
    samples = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in samples if name}


def _row(label: str, ours: float, theirs: float) -> None:
    ratio = f"{ours / theirs:9.2f}" if theirs else f"{'':9}"
    print(f"{label:44}{ours:14.2f}{theirs:14.2f}{ratio}", flush=True)


if __name__ == "__main__":
    main()
