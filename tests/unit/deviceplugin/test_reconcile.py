"""The HCAs of ids that only the kubelet has, by the ids and by the holders' nodes."""

from pathlib import Path

import pytest

from base.paths import Paths
from base.types import DeviceId
from deviceplugin.allocate.container_devices import recorded
from deviceplugin.checkpoint import AllocatedHCA
from deviceplugin.current import is_as_recorded
from deviceplugin.kubelet.records import PodDevices
from deviceplugin.pools.pool import Pool
from deviceplugin.reconcile import behind
from host.sysfs.discovery import HCA, hcas
from tests.unit.deviceplugin import made
from tests.unit.host import servers

A, B, C = servers.DGX_HCAS[:3]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Paths:
    return servers.dgx(tmp_path_factory.mktemp("dgx"))


@pytest.fixture(scope="module")
def found(paths: Paths) -> list[HCA]:
    return hcas(paths)


def pool(found: list[HCA], mode: str, *hcas: str) -> Pool:
    return made.pool([hca for hca in found if hca.id in hcas], mode=mode)


def row(*ids: str, nodes: tuple[str, ...] = ()) -> PodDevices:
    return PodDevices(
        namespace="",
        name="",
        uid="u-1",
        container="main",
        resource="rdma/hca",
        ids=tuple(map(DeviceId, ids)),
        nodes=nodes,
    )


def told(devices: tuple[AllocatedHCA, ...]) -> dict[str, str]:
    """The node of each HCA: "uverbs0 231:192"."""
    found = {}
    for device in devices:
        (rdma,) = device.rdma
        node = rdma.uverbs
        shown = f"{Path(node.path).name} {node.major}:{node.minor}" if node else "none"
        found[device.id] = shown
    return found


@pytest.mark.parametrize(
    ("mode", "known", "hcas"),
    [
        ("exclusive", f"{A}-3", {A}),  # it was shared
        ("shared", A, {A}),
        ("exclusive", C, {C}),  # the pool has it no more
        ("exclusive", "mlx5_2", {C}),
        ("all", "mlx5_2", {C}),
        ("all", "ib-plugin/infiniband-0", {A, B}),
        ("all", "12", {A, B}),
        ("all", f"{C}-1", {C}),
        ("exclusive", "12", set()),
        ("shared", "0000:ff:00.0-3", {"0000:ff:00.0"}),  # it is not on the node now
        ("exclusive", "0000:ff:00.0", {"0000:ff:00.0"}),
        ("all", "0000:ff:00.0", {"0000:ff:00.0"}),
    ],
)
def test_id_that_the_pool_has_not_tells_by_its_name(
    paths: Paths, found: list[HCA], mode: str, known: str, hcas: set[str]
) -> None:
    devices = behind(paths, pool(found, mode, A, B), found, row(known))
    assert {hca.id for hca in devices[known]} == hcas


@pytest.mark.parametrize(
    ("mode", "known", "nodes", "expected"),
    [
        pytest.param("exclusive", A, ["uverbs0"], {A: "uverbs0 231:192"}, id="as it was"),
        pytest.param("exclusive", A, ["uverbs1"], {A: "uverbs1 231:193"}, id="another's now"),
        pytest.param("exclusive", A, ["uverbs9"], {A: "uverbs9 231:201"}, id="no HCA's now"),
        pytest.param("exclusive", A, ["uverbs40"], {A: "uverbs40 0:0"}, id="not told any more"),
        pytest.param(
            "all", "0", ["uverbs1"], {B: "uverbs1 231:193"}, id="one of the two was not well then"
        ),
        pytest.param(
            "all",
            "0",
            ["uverbs1", "uverbs9"],
            {A: "uverbs9 231:201", B: "uverbs1 231:193"},
            id="one of the two has another",
        ),
        pytest.param("exclusive", "12", ["uverbs2"], {C: "uverbs2 231:194"}, id="by it alone"),
    ],
)
def test_holder_has_the_nodes_that_it_was_given(
    paths: Paths,
    found: list[HCA],
    mode: str,
    known: str,
    nodes: list[str],
    expected: dict[str, str],
) -> None:
    devices = behind(paths, pool(found, mode, A, B), found, row(known, nodes=tuple(nodes)))
    assert told(devices[known]) == expected


def test_nodes_are_of_all_ids_of_the_container(paths: Paths, found: list[HCA]) -> None:
    of = pool(found, "shared", A, B)
    ids = f"{A}-0", f"{A}-1", f"{B}-0"
    devices = behind(paths, of, found, row(*ids, nodes=("uverbs0", "uverbs1")))
    assert [told(devices[known]) for known in ids] == [
        {A: "uverbs0 231:192"},
        {A: "uverbs0 231:192"},
        {B: "uverbs1 231:193"},
    ]
    devices = behind(paths, of, found, row(*ids, nodes=("uverbs1", "uverbs5")))
    assert [told(devices[known]) for known in ids] == [
        {A: "uverbs5 231:197"},
        {A: "uverbs5 231:197"},
        {B: "uverbs1 231:193"},
    ]


def test_hca_is_as_recorded_while_its_holders_nodes_are_its_own(found: list[HCA]) -> None:
    of = pool(found, "exclusive", A, B)
    first, second = of.hcas
    assert is_as_recorded(recorded(of, first), first)
    assert not is_as_recorded(recorded(of, first), second)
    without = pool(found, "exclusive", A)
    without = made.pool(without.hcas, rdma=False)
    assert is_as_recorded(recorded(without, first), second)
