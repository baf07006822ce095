"""The projects that podfabric replaces, on the cluster: their programs, built from `PEERS`."""

import json
import tarfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from kubernetes.dynamic.exceptions import NotFoundError

from tests.cluster import images, programs
from tests.cluster.cluster import Cluster
from tests.cluster.control_plane import HOST_OF_NODE
from tests.cluster.node import CNI_BIN
from tests.cluster.programs import NET_ATTACH_DEF_CLIENT, PEERS, Program
from tests.kernel.vm import debian

KUBECONFIG = "/etc/cni/net.d/whereabouts.d/whereabouts.kubeconfig"
WHEREABOUTS = Program(
    "whereabouts",
    "github.com/k8snetworkplumbingwg/whereabouts",
    "v0.9.3",
    {"whereabouts": "cmd"},
    archives=[
        ("whereabouts", "github.com/k8snetworkplumbingwg/whereabouts"),
        ("network-attachment-definition-client", NET_ATTACH_DEF_CLIENT),
    ],
)
IPOIB_CNI = Program(
    "ipoib-cni",
    "github.com/Mellanox/ipoib-cni",
    "v1.2.2",
    {"ipoib": "cmd/ipoib"},
    archives=[("ipoib-cni", "github.com/Mellanox/ipoib-cni")],
)
SRIOV_CNI = Program(
    "sriov-cni",
    "github.com/k8snetworkplumbingwg/sriov-cni",
    "v2.10.0",
    {"sriov": "cmd/sriov"},
    archives=[("sriov-cni", "github.com/k8snetworkplumbingwg/sriov-cni")],
)
SRIOV_DEVICE_PLUGIN = Program(
    "sriov-network-device-plugin",
    "github.com/k8snetworkplumbingwg/sriov-network-device-plugin",
    "v3.9.0",
    {"sriovdp": "cmd/sriovdp"},
    archives=[
        (
            "sriov-network-device-plugin",
            "github.com/k8snetworkplumbingwg/sriov-network-device-plugin",
        )
    ],
)
SHARED_DEVICE_PLUGIN = Program(
    "k8s-rdma-shared-dev-plugin",
    "github.com/Mellanox/k8s-rdma-shared-dev-plugin",
    "410b0f3",
    {"k8s-rdma-shared-dp": "cmd/k8s-rdma-shared-dp"},
    archives=[("k8s-rdma-shared-dev-plugin", "github.com/Mellanox/k8s-rdma-shared-dev-plugin")],
)
PCI_IDS = {"pci.ids": "/usr/share/misc/pci.ids"}  # without it the device plugins find nothing
SYSTEM = "kube-system"
OF_HOST = ("/dev", "/etc/pcidp", "/opt/cni/bin", "/var/lib/kubelet", "/var/run/k8s.cni.cncf.io")
CNI_PLUGINS: Mapping[str, tuple[Program, str]] = {
    "whereabouts": (WHEREABOUTS, "whereabouts"),
    "kube-ipoib-cni-ds": (IPOIB_CNI, "ipoib"),
    "kube-sriov-cni-ds": (SRIOV_CNI, "sriov"),
}
"""By the names of their DaemonSets: the program, and the executable that each installs."""
DEVICE_PLUGINS: Mapping[str, tuple[Program, str]] = {
    "rdma-shared-dp-ds": (SHARED_DEVICE_PLUGIN, "k8s-rdma-shared-dp --config-file={}"),
    "kube-sriov-device-plugin": (SRIOV_DEVICE_PLUGIN, "sriovdp --logtostderr --config-file={}"),
}
"""The same, with the command, and where it has its configuration."""


def prepare_whereabouts(cluster: Cluster) -> None:
    """Install its kinds, and its executable's access to the API server."""
    kubeconfig = cluster.plane.kubeconfig("admin", HOST_OF_NODE).read_text()
    cluster.node.write(KUBECONFIG, kubeconfig)
    flat = {"datastore": "kubernetes", "kubernetes": {"kubeconfig": KUBECONFIG}}
    cluster.node.write(Path(KUBECONFIG).with_name("whereabouts.conf"), json.dumps(flat))
    (archive,) = Path(PEERS or ".").glob("whereabouts-*.tar.*")
    with tarfile.open(archive) as files:
        for member in files.getmembers():
            if "/crds/whereabouts.cni.cncf.io_" in member.name:
                content = files.extractfile(member)
                assert content is not None
                cluster.apply(yaml.safe_load(content.read()))


def whereabouts(range_: str) -> dict[str, object]:
    """The `ipam` of a definition."""
    return {"type": "whereabouts", "range": range_, "kubernetes": {"kubeconfig": KUBECONFIG}}


def start(cluster: Cluster, configurations: Mapping[str, Mapping[str, object]]) -> None:
    """Create the DaemonSets of all projects, with the device plugins' configurations."""
    debian.install(PCI_IDS)
    every = {**CNI_PLUGINS, **DEVICE_PLUGINS}
    programs.build([program for program, _ in every.values()])
    prepare_whereabouts(cluster)
    for name, (program, executable) in CNI_PLUGINS.items():
        copy = f"cp {program.directory()}/{executable} {CNI_BIN}/"
        _make_daemon_set(cluster, name, program, f"{copy} && exec sleep 1000000")
    for name, (program, command) in DEVICE_PLUGINS.items():
        file = f"/etc/pcidp/{name}.json"
        cluster.node.write(file, json.dumps(configurations[name]))
        command = f"exec {program.directory()}/{command.format(file)}"
        _make_daemon_set(cluster, name, program, command)


def stop(cluster: Cluster) -> None:
    """Delete the DaemonSets that still exist."""
    sets = cluster.objects.resources.get(api_version="apps/v1", kind="DaemonSet")
    for name in (*CNI_PLUGINS, *DEVICE_PLUGINS):
        with suppress(NotFoundError):
            sets.delete(name=name, namespace=SYSTEM)


def _make_daemon_set(cluster: Cluster, name: str, program: Program, script: str) -> None:
    """Create one with a container that sees as much of the node as the project's own."""
    paths = [*OF_HOST, *(str(Path(path).parent) for path in PCI_IDS.values())]
    paths.append(str(program.directory()))
    volumes = {f"volume-{number}": path for number, path in enumerate(paths)}
    container: dict[str, Any] = {
        "name": "main",
        "image": images.WORKLOAD,
        "command": ["/bin/sh", "-c", script],
        "env": [{"name": "GOMAXPROCS", "value": "1"}],  # threads that look for work cost time
        "securityContext": {"privileged": True},
        "volumeMounts": [{"name": key, "mountPath": path} for key, path in volumes.items()],
    }
    labels = {"name": name}
    spec = {
        "hostNetwork": True,
        "terminationGracePeriodSeconds": 1,
        "containers": [container],
        "volumes": [
            {"name": key, "hostPath": {"path": path, "type": "DirectoryOrCreate"}}
            for key, path in volumes.items()
        ],
    }
    daemons = {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": name},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }
    cluster.apply(daemons, SYSTEM)
