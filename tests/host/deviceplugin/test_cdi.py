"""Pools with CDI, through the whole plugin: names for the kubelet, a file for the runtime."""

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from base.paths import Paths
from deviceplugin.allocate import cdi
from deviceplugin.pools.pool_config import PoolConfig
from tests.host.deviceplugin.node import FIRST, HCA, Node, config, port
from tests.kubelet import Kubelet
from tests.unit.host import servers
from tests.unit.host.sysfs import Tree

NAMED = PoolConfig(resource=HCA, slots=4, cdi=True)
ALONE = PoolConfig(resource="rdma/alone", mode="exclusive", cdi=True, overlap=True)
BY_NODES = PoolConfig(resource="rdma/nodes", slots=4, overlap=True)


@pytest.fixture
def kubelet(server: Paths) -> Iterator[Kubelet]:
    with Kubelet(server.kubelet) as own_kubelet:
        yield own_kubelet


@pytest.fixture
def node(server: Paths, kubelet: Kubelet) -> Iterator[Node]:
    new_node = Node(server, config(NAMED, ALONE, BY_NODES))
    kubelet.wait(lambda: kubelet.allocatable(HCA) == 32)
    kubelet.wait(lambda: kubelet.allocatable(ALONE.resource) == 8)
    kubelet.wait(lambda: kubelet.allocatable(BY_NODES.resource) == 32)
    yield new_node
    new_node.plugin.close()


def wants(resource: str, count: int = 1) -> dict[str, Any]:
    return {"name": "main", "limits": {resource: count}}


def described(paths: Paths, resource: str = HCA) -> dict[str, list[str]]:
    """The device nodes of each device in the pool's file, by name; empty without a file."""
    file = cdi.path(paths, resource)
    if not file.exists():
        return {}
    specification = json.loads(file.read_bytes())
    return {
        f"{specification['kind']}={device['name']}": [
            edit["path"].rpartition("/")[2] for edit in device["containerEdits"]["deviceNodes"]
        ]
        for device in specification["devices"]
    }


def reload_driver(paths: Paths, hca: str, number: int) -> None:
    """Give the HCA another uverbs device, as after `modprobe -r` and `modprobe`."""
    tree = Tree(paths.sys, paths)
    of = f"mlx5_{servers.DGX_HCAS.index(hca)}"
    for entry in (paths.sys / "class/infiniband_verbs").iterdir():
        if (entry / "ibdev").read_text().strip() == of:
            shutil.rmtree(entry.resolve())
            entry.unlink()
    dev = f"{servers.MAJOR}:{servers.UVERBS + number}"
    tree.character("infiniband_verbs", f"uverbs{number}", of, dev)
    servers.make_nodes(paths)


@pytest.mark.parametrize(("resource", "count"), [(HCA, 1), (HCA, 3), (ALONE.resource, 2)])
def test_a_container_gets_names_and_no_nodes(
    node: Node, kubelet: Kubelet, resource: str, count: int
) -> None:
    given = kubelet.admit("worker", [wants(resource, count)]).containers["main"]
    assert given.devices == {}
    addresses = given.env[f"PCIDEVICE_{resource.upper().replace('/', '_')}"].split(",")
    assert given.cdi == [cdi.qualified(resource, address) for address in addresses]
    assert len(given.cdi) == count
    assert set(given.cdi) <= set(described(node.paths, resource))


def test_a_pool_without_cdi_beside_others_gives_nodes(node: Node, kubelet: Kubelet) -> None:
    given = kubelet.admit("worker", [wants(BY_NODES.resource)]).containers["main"]
    assert given.cdi == []
    assert "/dev/infiniband/rdma_cm" in given.devices
    assert not cdi.path(node.paths, BY_NODES.resource).exists()


def test_file_has_every_hca_before_any_allocation(node: Node) -> None:
    for resource in (HCA, ALONE.resource):
        assert described(node.paths, resource) == {
            cdi.qualified(resource, address): ["rdma_cm", f"uverbs{number}"]
            for number, address in enumerate(servers.DGX_HCAS)
        }


def test_the_file_is_renewed_after_a_reload_without_an_allocation(
    node: Node, kubelet: Kubelet
) -> None:
    name = cdi.qualified(HCA, FIRST)
    reload_driver(node.paths, FIRST, 40)
    other = cdi.qualified(ALONE.resource, FIRST)
    kubelet.wait(
        lambda: (
            described(node.paths).get(name)
            == described(node.paths, ALONE.resource).get(other)
            == ["rdma_cm", "uverbs40"]
        )
    )
    assert [call.method for call in kubelet.calls if call.method == "Allocate"] == []


def test_a_holders_id_stays_well_after_a_reload(node: Node, kubelet: Kubelet) -> None:
    """Its name means the current device nodes, when its container starts again."""
    given = kubelet.admit("worker", [wants(HCA)]).containers["main"]
    reload_driver(node.paths, given.env["PCIDEVICE_RDMA_HCA"], 40)
    # In between the HCA has no uverbs device. If the plugin looks then, the file has no HCA.
    kubelet.wait(lambda: described(node.paths).get(given.cdi[0]) == ["rdma_cm", "uverbs40"])
    kubelet.wait(lambda: kubelet.devices(HCA)[given.ids[HCA][0]][0])  # the list comes later


def test_file_is_removed_with_its_pool(node: Node, kubelet: Kubelet) -> None:
    foreign = node.paths.cdi / "vendor.example-nic.json"
    foreign.write_text('{"kind": "vendor.example/nic"}')
    node.plugin.reconfigure(config(NAMED, BY_NODES))
    assert sorted(node.paths.cdi.iterdir()) == [cdi.path(node.paths, HCA), foreign]
    node.plugin.reconfigure(config(BY_NODES))
    assert list(node.paths.cdi.iterdir()) == [foreign]


def test_file_is_removed_when_its_pool_changes_to_device_nodes(
    node: Node, kubelet: Kubelet
) -> None:
    node.plugin.reconfigure(config(PoolConfig(resource=HCA, slots=4)))
    assert described(node.paths) == {}
    given = kubelet.admit("worker", [wants(HCA)]).containers["main"]
    assert given.cdi == []
    assert given.devices


def test_the_file_stays_for_containers_that_start_again_while_no_plugin_runs(node: Node) -> None:
    before = described(node.paths)
    node.plugin.close()
    assert described(node.paths) == before


def test_an_hca_that_is_unplugged_is_in_the_file_no_more(node: Node, kubelet: Kubelet) -> None:
    Tree(node.paths.sys, node.paths).remove(FIRST)
    kubelet.wait(lambda: cdi.qualified(HCA, FIRST) not in described(node.paths))
    assert len(described(node.paths)) == 7


def test_a_port_that_is_down_takes_no_name_away(node: Node, kubelet: Kubelet) -> None:
    """Another container that has the name may start again."""
    port(node.paths, 0, up=False)
    kubelet.wait(lambda: kubelet.allocatable(HCA) == 28)
    assert cdi.qualified(HCA, FIRST) in described(node.paths)
