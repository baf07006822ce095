"""HCAs of two ports with siblings for subnet management: near to GPUs as those of one port are."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from base.paths import Paths
from cli.show import topo
from deviceplugin.allocate.preferred import preferred
from deviceplugin.pools.pool import Pool, pools
from deviceplugin.pools.pool_config import DevicePluginConfig, PoolConfig
from host.sysfs import discovery
from host.sysfs.topology import Topology
from node.state import ThisNode
from tests.unit.cli.commands import short_path
from tests.unit.host import servers
from tests.unit.host.sysfs import Tree


def _siblings(root: Path) -> Paths:
    """The server of eight HCAs, each with a second port and an smi* beside it."""
    paths = servers.dgx(root)
    tree = Tree(paths.sys, paths)
    for number, address in enumerate(servers.DGX_HCAS):
        guid = servers.port_guid(number, 2)
        tree.port(f"mlx5_{number}", 2, guid=guid)
        ipoib = servers.ipoib_address(guid)
        tree.netdev(address, f"ib{8 + number}", dev_port=1, address=ipoib)
        tree.rdma(address, f"smi{number}")
        tree.port(f"smi{number}", guid=servers.port_guid(number, 3))
        dev = f"{servers.MAJOR}:{servers.UVERBS + 20 + number}"
        tree.character("infiniband_verbs", f"uverbs{20 + number}", f"smi{number}", dev)
    return paths


@pytest.fixture(scope="module")
def plain() -> Iterator[Paths]:
    with short_path() as root:
        yield servers.dgx(root)


@pytest.fixture(scope="module")
def doubled() -> Iterator[Paths]:
    with short_path() as root:
        yield _siblings(root)


def _pool(paths: Paths, mode: str) -> Pool:
    config = PoolConfig(resource="rdma/hca", mode=mode, slots=4)  # type: ignore[arg-type]
    (pool,) = pools(DevicePluginConfig(pools=(config,)), discovery.hcas(paths), {})
    return pool


def _chosen(paths: Paths, mode: str, gpus: Sequence[int], size: int) -> list[str]:
    of = _pool(paths, mode)
    near = [servers.DGX_GPUS[number] for number in gpus]
    topology = Topology.read(paths, [*servers.DGX_GPUS, *servers.DGX_HCAS])
    return preferred(of, [slot.id for slot in of.slots], [], size, {}, near, topology)


@pytest.mark.parametrize("mode", ["shared", "exclusive"])
@pytest.mark.parametrize(
    ("gpus", "size", "hcas"),
    [
        ([], 2, [0, 4]),
        ([], 8, range(8)),
        ([0], 1, [0]),
        ([0, 1], 2, [0, 1]),
        ([0, 2, 4, 6], 4, [0, 2, 4, 6]),
        ([5, 6], 2, [4, 6]),
        (range(8), 8, range(8)),
    ],
)
def test_hcas_are_chosen_as_if_they_had_one_port(
    plain: Paths, doubled: Paths, mode: str, gpus: Sequence[int], size: int, hcas: Sequence[int]
) -> None:
    chosen = _chosen(doubled, mode, gpus, size)
    assert chosen == _chosen(plain, mode, gpus, size)
    if gpus:
        assert {device_id[:12] for device_id in chosen} == {
            servers.DGX_HCAS[number] for number in hcas
        }
    assert len({device_id[:12] for device_id in chosen}) == size == len(hcas)


def test_siblings_are_no_hcas_and_no_rows_of_the_matrix(plain: Paths, doubled: Paths) -> None:
    found = discovery.hcas(doubled)
    assert [hca.id for hca in found] == [hca.id for hca in discovery.hcas(plain)]
    assert [[rdma.name for rdma in hca.rdma] for hca in found] == [
        [f"mlx5_{number}"] for number in range(8)
    ]
    assert [len(hca.rdma[0].ports) for hca in found] == [2] * 8
    drawn, usual = (topo.picture(ThisNode(paths)) for paths in (doubled, plain))
    assert drawn.distances == usual.distances
    assert [device.label for device in drawn.devices] == [device.label for device in usual.devices]
    assert drawn.devices[8].netdevs == ("ib0", "ib8")


def test_the_card_of_two_ports_is_one_row(tmp_path: Path) -> None:
    drawn = topo.picture(ThisNode(servers.multiport(tmp_path)))
    assert [(device.label, device.netdevs) for device in drawn.devices] == [
        ("mlx5_0", ("ib0", "ib1"))
    ]
    assert drawn.distances == {"mlx5_0": {"mlx5_0": "SAME"}}
