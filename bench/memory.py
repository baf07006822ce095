"""What the processes of a node hold in memory: podfabric's agent, and the daemons it replaces.

All run on the test cluster's node, at the same API server and kubelet: nv-ipam's node daemon,
k8s-rdma-shared-dev-plugin and sriov-network-device-plugin (`bench.cluster` starts the last one for
its pods). Shared pages count in part (PSS, proc_pid_smaps_rollup(5)), so the figures may be added.
The agent is the whole of podfabric on a node: CNI plugins, addresses of the cluster's pools and
device plugin. Theirs leave out their CNI plugins, which are processes of their own for each call.
"""

import json
import tarfile
import time
from pathlib import Path

import yaml

from tests.cluster import programs
from tests.cluster.cluster import Cluster
from tests.cluster.control_plane import HOST_OF_NODE
from tests.cluster.peers import SHARED_DEVICE_PLUGIN
from tests.cluster.programs import PEERS, Program
from tests.waiting import until

PATIENCE = 300.0  # seconds
SETTLE = 20.0  # seconds after the start
NV_IPAM = Program(
    "nvidia-k8s-ipam",
    "github.com/Mellanox/nvidia-k8s-ipam",
    "3ce4a34",
    {"ipam-node": "cmd/ipam-node", "nv-ipam": "cmd/nv-ipam"},
    archives=[("nvidia-k8s-ipam", "github.com/Mellanox/nvidia-k8s-ipam")],
)
OURS = "podfabric agent"


def compare(cluster: Cluster) -> None:
    """Print the table. sriov-network-device-plugin must run on the node as `sriovdp`."""
    programs.build([NV_IPAM, SHARED_DEVICE_PLUGIN])
    _start_nv_ipam(cluster)
    _start_shared_device_plugin(cluster)
    time.sleep(SETTLE)
    services = ("ipam-node", "shared-dp", "sriovdp")
    pids = {name: cluster.node.run(f"cat /run/node/{name}.pid").strip() for name in services}
    pids[OURS] = cluster.node.run("pgrep -f 'podfabric agent$'").strip()
    held = {name: _megabytes(cluster, pid) for name, pid in pids.items()}
    print(f"\n{'memory of a node, PSS':44}{'MB':>14}")
    for name, megabytes in held.items():
        print(f"{name:44}{megabytes:14.1f}")
    ours, theirs = held[OURS], sum(held.values()) - held[OURS]
    print(f"{'ours, and the sum of theirs':44}{ours:14.1f}{theirs:14.1f}{ours / theirs:9.2f}")
    for name in ("ipam-node", "shared-dp"):
        cluster.node.kill(name)


def _start_nv_ipam(cluster: Cluster) -> None:
    (archive,) = Path(PEERS or ".").glob("nvidia-k8s-ipam-*.tar.*")
    with tarfile.open(archive) as files:
        for member in files.getmembers():
            if "/deploy/crds/nv-ipam.nvidia.com_" in member.name:
                content = files.extractfile(member)
                assert content is not None
                cluster.apply(yaml.safe_load(content.read()))
    kubeconfig = "/run/node/nv-ipam.kubeconfig"
    content_of = cluster.plane.kubeconfig("admin", HOST_OF_NODE).read_text()
    cluster.node.write(kubeconfig, content_of)
    (node,) = (item.metadata.name for item in cluster.core.list_node().items)
    directory = NV_IPAM.directory()
    flags = {
        "kubeconfig": kubeconfig,
        "node-name": node,
        "metrics-bind-address": "0",
        "health-probe-bind-address": "127.0.0.1:18081",
        "bind-address": "unix:///run/node/nv-ipam.sock",
        "store-file": "/run/node/nv-ipam.store",
        "cni-skip-nv-ipam-binary-copy": "true",
        "cni-skip-nv-ipam-config-creation": "true",
    }
    words = " ".join(f"--{name}={value}" for name, value in flags.items())
    cluster.node.start("ipam-node", f"{directory}/ipam-node {words}")
    until(
        lambda: cluster.node.status_of("test -S /run/node/nv-ipam.sock")[0] == 0,
        PATIENCE,
        "nv-ipam's node daemon",
        pause=0.5,
    )


def _start_shared_device_plugin(cluster: Cluster) -> None:
    """It offers nothing here, since it finds no RDMA device without a PCI function."""
    path = "/run/node/shared-dp.json"
    pool = {
        "resourceName": "hca",
        "resourcePrefix": "their",
        "rdmaHcaMax": 100,
        "selectors": {"linkTypes": ["infiniband"]},
    }
    cluster.node.write(path, json.dumps({"configList": [pool]}))
    program = SHARED_DEVICE_PLUGIN.directory() / "k8s-rdma-shared-dp"
    cluster.node.start("shared-dp", f"{program} --config-file={path}")


def _megabytes(cluster: Cluster, pid: str) -> float:
    """The process's part of the memory that it has."""
    content = cluster.node.run(f"cat /proc/{pid}/smaps_rollup")
    (line,) = (line for line in content.splitlines() if line.startswith("Pss:"))
    return int(line.split()[1]) / 1000
