"""The projects that podfabric replaces run, with pods; then the test follows docs/move/index.md.

The section "Move all nodes at once" of that page has the commands and the values.
"""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster import peers
from tests.cluster.cluster import PATIENCE, Cluster, Namespace, namespaces
from tests.cluster.installation import (
    await_nothing_left,
    await_offered,
    install,
    uninstall,
    with_vfs,
)
from tests.cluster.node import CNI_BIN
from tests.cluster.seen import pings
from tests.kernel.vm import layout
from tests.waiting import until

PAGE = layout.CHECKOUT / "docs/move/index.md"
BLOCK = re.compile(r"^```(?:yaml)?\n(.*?)^```$", re.M | re.S)
CHILD, VF = "rdma/hca_shared_devices_a", "intel.com/sriov_netdevice"
VFS = 6
OFFERED = {CHILD: 20, VF: VFS}
CHILDREN = [f"child-{number}" for number in range(10)]
HOLDERS = [f"vf-{number}" for number in range(4)]
NEW = {"child-new": "children", "vf-new": "vfs"}
RESOURCES = {"children": CHILD, "vfs": VF}
EXECUTABLES = [executable for _, executable in peers.CNI_PLUGINS.values()]
STORES = "/var/lib/cni/sriov /var/lib/cni/ib-sriov /var/lib/cni/ipoib"

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        any(
            not program.archive_files()
            for program, _ in (*peers.CNI_PLUGINS.values(), *peers.DEVICE_PLUGINS.values())
        ),
        reason="the other plugins' sources are not here: PODFABRIC_PEERS names their directory",
    ),
]


@dataclass
class Page:
    """The section of docs/move/index.md, for this node."""

    values: dict[str, Any]
    move: list[str]
    look: str


def page(parent: str, pf: str) -> Page:
    """The page's values with this node's interfaces, and the image that the node has."""
    section = PAGE.read_text().partition("## Move all nodes at once")[2].partition("\n## ")[0]
    values, move, look = BLOCK.findall(section)
    written = yaml.safe_load(values)
    (shared,), (vfs,) = written["config"]["configList"], written["config"]["resourceList"]
    shared["selectors"]["ifNames"] = [parent]
    vfs["selectors"]["pfNames"] = [pf]
    written["image"] = {"repository": "podfabric", "pullPolicy": "Never"}
    return Page(written, move.splitlines(), look.strip())


@dataclass
class Administrator:
    """A reader who follows the page, in a directory with the chart and move.yaml."""

    cluster: Cluster
    directory: Path

    def run(self, command: str) -> str:
        """Run a command that must succeed."""
        done = subprocess.run(
            ["/bin/sh", "-c", command],
            cwd=self.directory,
            env={
                **os.environ,
                "PATH": f"{self.directory}/bin:{os.environ['PATH']}",
                "KUBECONFIG": str(self.cluster.plane.kubeconfig("admin")),
            },
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout


@pytest.fixture
def administrator(cluster: Cluster, tmp_path: Path) -> Administrator:
    """An administrator with kubectl and helm."""
    (tmp_path / "deploy").symlink_to(layout.CHECKOUT / "deploy")
    (tmp_path / "bin").mkdir()
    kubectl = cluster.node.programs["kubernetes"] / "kubectl"
    (tmp_path / "bin/kubectl").symlink_to(kubectl)
    tool = [str(layout.CHECKOUT / "tools/go_tool.sh"), "--path", "helm"]
    helm = subprocess.run(tool, check=True, capture_output=True, text=True).stdout.strip()
    (tmp_path / "bin/helm").symlink_to(helm)
    return Administrator(cluster, tmp_path)


@pytest.fixture
def former(cluster: Cluster) -> Iterator[Page]:
    """A node without podfabric, on which the other plugins run. Restored afterwards."""
    uninstall(cluster)
    with with_vfs(cluster, VFS, "beside") as names:
        followed = page(*names.split())
        config = followed.values["config"]
        lists = {
            "rdma-shared-dp-ds": {"configList": config["configList"]},
            "kube-sriov-device-plugin": {"resourceList": config["resourceList"]},
        }
        peers.start(cluster, lists)
        await_offered(cluster, OFFERED)
        until(lambda: set(digests(cluster)) == set(EXECUTABLES), PATIENCE, "executables", pause=1)
        try:
            yield followed
        finally:
            peers.stop(cluster)
            cluster.node.run(f"cd {CNI_BIN} && rm -f {' '.join(EXECUTABLES)}")
    install(cluster)


@pytest.fixture
def moving(former: Page, cluster: Cluster) -> Iterator[Namespace]:
    """A namespace with a definition of ipoib-cni and one of sriov-cni."""
    (parent,) = former.values["config"]["configList"][0]["selectors"]["ifNames"]
    with namespaces(cluster, ["moving"]) as (made,):
        child = {"type": "ipoib", "master": parent, "ipam": peers.whereabouts("10.70.0.0/24")}
        vf = {"type": "sriov", "vlan": 100, "ipam": peers.whereabouts("10.71.0.0/24")}
        made.network("children", child)
        made.network("vfs", vf, resource=VF)
        yield made


def digests(cluster: Cluster) -> dict[str, str]:
    """The digest of each executable that they have installed."""
    paths = " ".join(f"{CNI_BIN}/{name}" for name in EXECUTABLES)
    _, output, _ = cluster.node.status_of(f"sha256sum {paths}")
    return {Path(path).name: digest for digest, path in map(str.split, output.splitlines())}


def state(cluster: Cluster) -> dict[str, str]:
    """The settings of the node's interfaces and VFs."""
    command = f"cd {layout.CHECKOUT} && {layout.PYTHON} -m tests.cluster.vfs state"
    found: dict[str, str] = json.loads(cluster.node.run(command, timeout=600))
    pods = ("veth", "pods0")  # of the cluster's own network
    return {key: value for key, value in found.items() if not key.startswith(pods)}


def written(cluster: Cluster) -> list[str]:
    """The offsets of the addresses that whereabouts has written into its IPPools."""
    resource = cluster.objects.resources.get(
        api_version="whereabouts.cni.cncf.io/v1alpha1", kind="IPPool"
    )
    pools = resource.get().to_dict()["items"]
    return [offset for pool in pools for offset in pool["spec"]["allocations"]]


def held(cluster: Cluster) -> list[str]:
    """The addresses that the controller attributes to pods of whereabouts."""
    resource = cluster.objects.resources.get(
        api_version="ipam.podfabric.io/v1alpha1", kind="AddressPool"
    )
    pools = resource.get().to_dict()["items"]
    return [each for pool in pools for each in pool.get("status", {}).get("held", ())]


def make(namespace: Namespace, network: str, *names: str) -> None:
    """Create pods on a network, each with a device of its resource."""
    for name in names:
        namespace.pod(name, networks=network, devices={RESOURCES[network]: 1})


def lives(namespace: Namespace) -> dict[str, tuple[str, int, str]]:
    """Each pod's UID, restart count and address."""
    return {
        pod.metadata.name: (
            pod.metadata.uid,
            pod.status.container_statuses[0].restart_count,
            namespace.address(pod.metadata.name),
        )
        for pod in namespace.pods()
    }


def test_pods_of_other_plugins_run_on_and_their_end_leaves_nothing(
    cluster: Cluster, moving: Namespace, former: Page, administrator: Administrator
) -> None:
    executables, before = digests(cluster), state(cluster)
    make(moving, "children", *CHILDREN)
    make(moving, "vfs", *HOLDERS)
    moving.running(*CHILDREN, *HOLDERS)
    lived = lives(moving)
    assert len(written(cluster)) == len(lived)

    (administrator.directory / "move.yaml").write_text(yaml.safe_dump(former.values))
    for command in former.move:
        administrator.run(command)
    await_offered(cluster, OFFERED)
    assert digests(cluster).keys() == executables.keys()
    assert not set(digests(cluster).values()) & set(executables.values())

    for name, network in NEW.items():
        make(moving, network, name)
    moving.running(*NEW)
    assert {name: life for name, life in lives(moving).items() if name not in NEW} == lived
    addresses = [address for _, _, address in lives(moving).values()]
    assert len(set(addresses)) == len(addresses)
    for new, old in zip(NEW, (CHILDREN, HOLDERS), strict=True):
        assert pings(moving, old[0], moving.address(old[-1]))
        assert pings(moving, new, moving.address(old[0]))

    assert held(cluster)
    moving.delete(*CHILDREN, *HOLDERS)
    until(lambda: not held(cluster), PATIENCE, "end of what whereabouts holds", pause=1)
    administrator.run(former.look)
    for new in NEW:
        assert moving.networks(new)["net1"]["ips"]
    moving.delete(*NEW)
    await_nothing_left(cluster, allocations=True)
    left = cluster.node.run(f"find {STORES} -type f -not -name '*.lock' 2> /dev/null || :")
    assert left == ""
    assert state(cluster) == before

    uninstall(cluster)
    assert digests(cluster) == executables
