"""GPUs and HCAs of one container: the closest pair that is free, in both orders of allocation."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import pytest
from msgspec.structs import replace

from base.paths import Paths
from deviceplugin import checkpoint
from deviceplugin.pools.pool_config import PoolConfig
from gpu.gpu_pool import GpuPoolConfig, Shape
from gpu.pools import pre_start
from host.sysfs.selectors import Selector
from host.sysfs.topology import Distance, Topology
from tests.host.deviceplugin.gpus.gpu_node import (
    COMPUTE,
    GIB,
    MEMORY,
    GpuNode,
    container,
    units,
)
from tests.kubelet.devices import FirstOne
from tests.kubelet.kubelet import Kubelet
from tests.unit.cli.commands import Shell
from tests.unit.gpu.driver import Driver
from tests.unit.host.servers import DGX_GPUS, DGX_HCAS
from tests.waiting import PATIENCE

SLICE = "podfabric.io/gpu-2g-25"
HCA = "rdma/hca"
SLICES = GpuPoolConfig(
    shapes=(Shape(resource=SLICE, memory=2 * GIB, compute=25),), memory=8 * GIB, reserve=0
)
# The HCAs are at the second and third of four pairs of switches, the GPUs at the first and fourth.
# So the nearest pairs are at another host bridge of the same NUMA node; the rest are at the other
# socket.
APART_GPUS, APART_HCAS = (*DGX_GPUS[:2], *DGX_GPUS[6:]), DGX_HCAS[2:6]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pre_start, "ASK_KUBELET", PATIENCE)


class PairNode:
    """A node with HCAs, and GPUs in parts of one shape or in units. Each GPU has room for one
    container."""

    def __init__(self, server: Paths, kubelet: Kubelet, asked: Mapping[str, int]) -> None:
        self.paths = server
        self.kubelet = kubelet
        self.asked = asked

    def admit(self, name: str, limits: Mapping[str, int]) -> None:
        self.kubelet.admit(name, [container(others=limits)])

    def trainers(self, count: int) -> None:
        """Admit pods that request most of a GPU, and an HCA."""
        for number in range(count):
            self.admit(f"trainer-{number}", {**self.asked, HCA: 1})

    def pairs(self) -> list[Distance]:
        """The distance between the GPU and the HCA of each container."""
        held = {entry.key: entry for entry in checkpoint.read(self.paths).allocations}
        distances = []
        for pod in self.kubelet.pods.values():
            ids = pod.containers["main"].ids
            if HCA not in ids:
                continue
            gpus = [held[name, ids[name][0]].gpu for name in self.asked]  # type: ignore[index]
            (gpu,) = {gpu.bdf for gpu in gpus if gpu is not None}
            (hca,) = held[HCA, ids[HCA][0]].devices  # type: ignore[index]
            topology = Topology.read(self.paths, [gpu, hca.address])
            distances.append(topology.distance(gpu, hca.address))
        return distances


@contextmanager
def pair_node(
    server: Paths,
    mode: str,
    choice: random.Random,
    gpus: Sequence[str] = DGX_GPUS,
    hcas: Sequence[str] = DGX_HCAS,
) -> Iterator[PairNode]:
    """A node with these GPUs and HCAs, whose kubelet allocates in the order of `choice`."""
    Driver(server).nodes(range(8))
    pool = PoolConfig(resource=HCA, slots=4, selectors=(Selector(pciAddresses=tuple(hcas)),))
    shared = replace(SLICES if mode == "slices" else units(8), devices=frozenset(gpus))
    asked = {SLICE: 3} if mode == "slices" else {MEMORY: 6, COMPUTE: 75}
    whole = {SLICE: 4, MEMORY: 8, COMPUTE: 100}
    with Kubelet(server.kubelet) as kubelet:
        kubelet._manager._choice = choice
        node = GpuNode(server, [shared], [pool])
        try:
            wanted = {HCA: 4 * len(hcas), **{name: whole[name] * len(gpus) for name in asked}}
            kubelet.wait(
                lambda: all(kubelet.allocatable(name) == count for name, count in wanted.items())
            )
            yield PairNode(server, kubelet, asked)
        finally:
            node.plugin.close()


CHOICES: Mapping[str, Callable[[], random.Random]] = {
    "any": lambda: random.Random(1),
    "another": lambda: random.Random(3),
    "hca first": lambda: FirstOne(HCA),
    "slice first": lambda: FirstOne(SLICE),
    "memory first": lambda: FirstOne(MEMORY),
    "time first": lambda: FirstOne(COMPUTE),
}
MODES = [
    *(("slices", order) for order in ("any", "another", "hca first", "slice first")),
    *(("units", order) for order in ("any", "hca first", "memory first", "time first")),
]


@pytest.mark.parametrize(("mode", "order"), MODES)
def test_gpu_and_hca_of_a_container_are_the_closest_that_are_free(
    server: Paths, mode: str, order: str
) -> None:
    """The kubelet allocates in all orders, while containers hold the nearest GPUs and HCAs."""
    with pair_node(server, mode, CHOICES[order]()) as node:
        node.trainers(6)
        assert node.pairs() == [Distance.PIX] * 6


@pytest.mark.parametrize(("mode", "order"), MODES)
def test_where_no_pair_is_at_one_switch_the_least_distance_counts_and_explain_has_its_cost(
    server: Paths,
    mode: str,
    order: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pair_node(server, mode, CHOICES[order](), APART_GPUS, APART_HCAS) as node:
        node.trainers(4)
        assert node.pairs() == [Distance.NODE] * 4
        server.config.write_text("{}")
        shell = Shell(server, monkeypatch, capsys)
        (way,) = shell("explain", "trainer-3", "-o", "json").document()["ways"]
        assert (way["distance"], way["cost"], way["gpudirect"]) == ("NODE", 20, False)
        assert "NODE, cost 20" in shell("explain", "trainer-3").out


@pytest.mark.parametrize("order", ["any", "another", "hca first", "slice first"])
def test_hcas_are_near_a_gpu_that_has_room(server: Paths, order: str) -> None:
    """Containers without an HCA have the first GPUs, whose HCAs are the least loaded then."""
    with pair_node(server, "slices", CHOICES[order]()) as node:
        for number in range(5):
            node.admit(f"lonely-{number}", {SLICE: 4})
        for number in range(3):
            node.admit(f"trainer-{number}", {SLICE: 4, HCA: 1})
        assert node.pairs() == [Distance.PIX] * 3
