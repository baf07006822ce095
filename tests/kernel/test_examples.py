"""Every attachment definition in the examples, through the real executables and an agent.

One with a master and one without go the long way as well, in processes of their own.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from base.paths import Paths
from base.types import DeviceId
from deviceplugin import checkpoint
from deviceplugin.checkpoint import AllocatedHCA, Allocation
from host import discovery, infiniband, links
from host.netlink import netlink
from tests.kernel.pods import link_names, pod
from tests.plugins.service import Service, install_launchers
from tests.runtime import CHECKOUT, Definition, Runtime, definitions, pods

# Those of `sriov` need hardware of many kinds: tests/unit/sriov/test_examples.py reads them.
# That of nv-ipam needs its pools, and that of a claim an API server:
# tests/cluster/test_examples.py applies them.
FILES = [
    file
    for file in sorted((CHECKOUT / "netattach-examples").glob("*.yaml"))
    if any(
        definition.config["type"] == "ipoib"
        and definition.config["ipam"]["type"] != "nv-ipam"
        and not definition.config.get("allowPersistentIPs")
        for definition in definitions(file)
    )
]
POD = "IgnoreUnknown=1;K8S_POD_NAMESPACE=demo;K8S_POD_NAME=example;K8S_POD_UID=uid-1"
GIVEN = "ib1"  # on the HCA that the pod is given, where the definition leaves the choice to that


EXAMPLES = {
    f"{file.stem}-{definition.name}": definition
    for file in FILES
    for definition in definitions(file)
}
ALONE = ("single-fabric-fabric", "ipoib-auto-hca-fabric")


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    """A runtime with launchers, and their agent."""
    root = tmp_path_factory.mktemp("agent")
    install_launchers(root / "bin", ["ipoib"])
    agent = Service(root / "agent")
    agent.wait_until_ready()
    yield Runtime(root / "bin", {**os.environ, "PODFABRIC_SOCKET": str(agent.socket)})
    agent.stop()


@pytest.fixture
def roots(tmp_path: Path) -> dict[str, str]:
    """The variables that name the directories of this test."""
    names = ("state", "run", "kubelet")
    return {f"PODFABRIC_{name.upper()}": f"{tmp_path}/{name}" for name in names}


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_attaches_and_detaches(
    example: str, roots: dict[str, str], launched: Runtime
) -> None:
    runtime = Runtime(launched.bin_dir, launched.environ | roots)
    _attach_and_detach(runtime, EXAMPLES[example])


@pytest.mark.parametrize("example", ALONE)
def test_example_attaches_and_detaches_without_an_agent(
    example: str, roots: dict[str, str]
) -> None:
    _attach_and_detach(Runtime(environ={**os.environ, **roots}), EXAMPLES[example])


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.stem))
def test_pods_of_an_example_name_its_definitions(file: Path) -> None:
    names = {definition.name for definition in definitions(file)}
    for each in pods(file):
        asked = each["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"]
        assert {name.strip() for name in asked.split(",")} == names


def _attach_and_detach(runtime: Runtime, definition: Definition) -> None:
    if definition.config["master"] == "auto":
        _give_hca(Paths.from_environ(runtime.environ))
    with pod("example") as netns:
        options = {"container_id": "c1", "netns": f"/var/run/netns/{netns}", "args": POD}
        added = runtime.call("ADD", definition.config, **options)  # type: ignore[arg-type]
        assert (added.exit_code, added.stderr) == (0, "")
        assert added.document["cniVersion"] == definition.config["cniVersion"]
        assert added.document["ips"]
        if definition.config["master"] == "auto":
            assert added.document["interfaces"][0]["rdmaDevice"] == _rdma(GIVEN)
        assert link_names(netns) == {"lo", "net1"}
        removed = runtime.call("DEL", definition.config, **options)  # type: ignore[arg-type]
        assert (removed.exit_code, removed.stdout, removed.stderr) == (0, "", "")
        assert link_names(netns) == {"lo"}


def _give_hca(paths: Paths) -> None:
    """Write the files of the kubelet and the device plugin as if the pod had the HCA."""
    rdma = _rdma(GIVEN)
    (hca,) = (hca for hca in discovery.hcas(paths) if rdma in {each.name for each in hca.rdma})
    device = AllocatedHCA(id=hca.id, address=hca.address, netdevs=hca.netdevs, rdma=())
    allocation = Allocation(
        resource="rdma/hca",
        id=DeviceId(f"{hca.id}-0"),
        devices=(device,),
        time="2026-01-02T03:04:05Z",
        boot_id=paths.boot_id(),
    )
    checkpoint.write(paths, [checkpoint.encode(allocation)], {allocation.resource: []})
    entry = {
        "PodUID": "uid-1",
        "ContainerName": "worker",
        "ResourceName": allocation.resource,
        "DeviceIDs": {"-1": [allocation.id]},
    }
    paths.device_plugins.mkdir(parents=True)
    (paths.device_plugins / "kubelet_internal_checkpoint").write_text(
        json.dumps({"Data": {"PodDeviceEntries": [entry]}})
    )


def _rdma(interface: str) -> str:
    with netlink() as host:
        port = infiniband.port_of(Paths(), links.require(host, interface))
    assert port is not None
    return port.hca
