"""Allocations of device ids, on made-up servers with real device nodes."""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from base.paths import Paths
from deviceplugin.allocate import cdi
from deviceplugin.allocate.container_devices import AllocateResult, allocation
from deviceplugin.api.v1beta1_pb2 import ContainerAllocateResponse
from deviceplugin.checkpoint import AllocatedNode
from deviceplugin.kubelet.plugin_server import Rejected
from deviceplugin.pools.pool import Pool
from host.sysfs.discovery import HCA, hcas
from host.sysfs.selectors import Selector
from tests.unit.deviceplugin.made import hca, pool, rdma
from tests.unit.host import servers

pytestmark = pytest.mark.root

FIRST, SECOND = servers.DGX_HCAS[:2]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Paths:
    return servers.dgx(tmp_path_factory.mktemp("dgx"))


@pytest.fixture
def paths(server: Paths, tmp_path: Path) -> Paths:
    """A server with device nodes of its own; its /sys is shared."""
    own = replace(server, dev=tmp_path / "dev", cdi=tmp_path / "cdi")
    (own.dev / "infiniband").mkdir(parents=True)
    servers.make_nodes(own)
    return own


@pytest.fixture
def changing(tmp_path: Path) -> Paths:
    """A server that a test may change as it likes."""
    return servers.dgx(tmp_path, nodes=True)


def _pool(paths: Paths, **fields: object) -> Pool:
    found = [hca for hca in hcas(paths) if hca.rdma]
    return pool(found, **fields)


def _allocated(paths: Paths, of: Pool, *ids: str) -> AllocateResult:
    return allocation(paths, of, ids, {slot.id for slot in of.slots}, _current(paths))


def _current(paths: Paths) -> dict[str, HCA]:
    return {hca.id: hca for hca in hcas(paths)}


def _names(granted: AllocateResult) -> list[str]:
    nodes = granted.answer.devices
    return [node.container_path.removeprefix("/dev/infiniband/") for node in nodes]


def _refused(paths: Paths, of: Pool, *ids: str) -> tuple[str, str]:
    with pytest.raises(Rejected) as caught:
        _allocated(paths, of, *ids)
    return caught.value.code.name, str(caught.value)


def _set(hcas: list[HCA], states: dict[str, str]) -> dict[str, HCA]:
    """The HCAs by id, the ports of some in another state."""
    return {
        hca.id: replace(
            hca,
            rdma=tuple(
                replace(
                    device,
                    ports=tuple(
                        replace(port, state=states.get(hca.id, port.state)) for port in device.ports
                    ),
                )
                for device in hca.rdma
            ),
        )
        for hca in hcas
    }


# --- Nodes.


def test_an_hca_comes_with_its_verbs_device_and_the_connection_manager(paths: Paths) -> None:
    granted = _allocated(paths, _pool(paths), SECOND)
    directory = paths.dev / "infiniband"
    assert [
        (node.container_path, node.host_path, node.permissions) for node in granted.answer.devices
    ] == [
        ("/dev/infiniband/rdma_cm", str(directory / "rdma_cm"), "rw"),
        ("/dev/infiniband/uverbs1", str(directory / "uverbs1"), "rw"),
    ]
    assert granted.notes == ()


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        pytest.param({}, ["rdma_cm", "uverbs0"], id="verbs"),
        pytest.param({"umad": True}, ["rdma_cm", "umad0", "umad1", "uverbs0"], id="umad"),
        pytest.param({"issm": True}, ["issm0", "issm1", "rdma_cm", "uverbs0"], id="issm"),
        pytest.param({"rdma": False}, [], id="no RDMA"),
    ],
)
def test_management_nodes_are_given_of_each_port_where_the_pool_asks(
    tmp_path: Path, fields: dict[str, object], names: list[str]
) -> None:
    paths = servers.multiport(tmp_path, nodes=True)
    granted = _allocated(paths, _pool(paths, **fields), servers.MULTIPORT_HCA)
    assert _names(granted) == names


def test_an_ethernet_hca_has_no_issm_and_is_given_all_the_same(tmp_path: Path) -> None:
    paths = servers.vfs(tmp_path, nodes=True)
    of = _pool(paths, umad=True, issm=True)
    granted = _allocated(paths, of, servers.VFS_ETHERNET[0])
    assert _names(granted) == ["rdma_cm", "umad6", "uverbs6"]


def test_each_node_is_given_once(paths: Paths) -> None:
    of = _pool(paths, mode="shared", slots=4)
    granted = _allocated(paths, of, f"{SECOND}-0", f"{FIRST}-3", f"{FIRST}-0", f"{FIRST}-0")
    assert _names(granted) == ["rdma_cm", "uverbs0", "uverbs1"]
    assert list(granted.devices) == [f"{FIRST}-0", f"{FIRST}-3", f"{SECOND}-0"]
    assert granted == _allocated(paths, of, f"{FIRST}-3", f"{FIRST}-0", f"{SECOND}-0")


def test_no_ids_get_nothing(paths: Paths) -> None:
    empty = AllocateResult(answer=ContainerAllocateResponse())
    assert _allocated(paths, _pool(paths)) == empty


def test_without_a_connection_manager_it_is_said_and_verbs_are_given(changing: Paths) -> None:
    (changing.sys / "class/misc/rdma_cm/dev").unlink()
    granted = _allocated(changing, _pool(changing), FIRST)
    assert _names(granted) == ["uverbs0"]
    assert len(granted.notes) == 1
    assert "load the kernel module rdma_ucm" in granted.notes[0]


def _missing(node: Path) -> None:
    node.unlink()


def _directory(node: Path) -> None:
    node.unlink()
    node.mkdir()


def _file(node: Path) -> None:
    node.unlink()
    node.touch()


def _older(node: Path) -> None:
    node.unlink()
    os.mknod(node, stat.S_IFCHR | 0o600, os.makedev(231, 250))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_missing, "No such file or directory"),
        (_directory, "not a character device"),
        (_file, "not a character device"),
        (_older, "has device number 231:250, but sysfs has 231:192"),
    ],
)
def test_a_node_that_is_not_what_sysfs_says_is_not_given(
    paths: Paths, damage: Callable[[Path], None], words: str
) -> None:
    damage(paths.dev / "infiniband/uverbs0")
    code, text = _refused(paths, _pool(paths), SECOND, FIRST)
    assert code == "FAILED_PRECONDITION"
    assert text.startswith(f"cannot allocate {FIRST} of rdma/hca: {FIRST}: ")
    assert words in text
    assert _names(_allocated(paths, _pool(paths), SECOND)) == ["rdma_cm", "uverbs1"]


def test_a_broken_connection_manager_is_left_out_and_said(paths: Paths) -> None:
    _directory(paths.dev / "infiniband/rdma_cm")
    granted = _allocated(paths, _pool(paths), FIRST)
    assert _names(granted) == ["uverbs0"]
    assert "not a character device" in granted.notes[0]


# --- What is refused.


@pytest.mark.parametrize("id_", ["0000:99:00.0", "", f"{FIRST}-0", "17"])
def test_an_unknown_id_is_an_invalid_argument(paths: Paths, id_: str) -> None:
    code, text = _refused(paths, _pool(paths), FIRST, id_)
    assert code == "INVALID_ARGUMENT"
    assert text.startswith(f"cannot allocate {id_} of rdma/hca: the pool has no such id")


@pytest.mark.parametrize(
    ("now", "words"),
    [
        pytest.param(None, f"{FIRST} is not on this node now", id="unplugged"),
        pytest.param(hca(FIRST), f"{FIRST}: has no RDMA device now", id="driver reload"),
        pytest.param(
            hca(FIRST, rdma_names=("mlx5_0",)),
            "mlx5_0 is in another network namespace",
            id="in pod",
        ),
        pytest.param(
            hca(FIRST, replace(rdma(0), uverbs=None)), "mlx5_0 has no verbs device", id="uverbs"
        ),
        pytest.param(
            hca(FIRST, driver="vfio-pci", iommu_group="3"), "is bound to vfio-pci", id="vfio"
        ),
    ],
)
def test_an_hca_without_a_verbs_device_is_refused_and_it_is_said_why(
    paths: Paths, now: HCA | None, words: str
) -> None:
    of = _pool(paths)
    current = {} if now is None else {now.id: now}
    with pytest.raises(Rejected) as caught:
        allocation(paths, of, [FIRST], {FIRST}, current)
    assert caught.value.code.name == "FAILED_PRECONDITION"
    assert words in str(caught.value)


# --- Mode "all".


@pytest.mark.parametrize(
    ("down", "given"),
    [
        pytest.param([], "01234567", id="all work"),
        pytest.param([0, 5], "123467", id="some work"),
        pytest.param(list(range(8)), "01234567", id="none works"),
    ],
)
def test_a_token_of_all_is_every_hca_that_works(paths: Paths, down: list[int], given: str) -> None:
    of = _pool(paths, mode="all", amount=2)
    current = _set(hcas(paths), {servers.DGX_HCAS[n]: "DOWN" for n in down})
    granted = allocation(paths, of, ["1", "0"], {"0", "1"}, current)
    assert _names(granted) == ["rdma_cm", *(f"uverbs{n}" for n in given)]
    held = {id_: [device.id for device in held] for id_, held in granted.devices.items()}
    expected = [servers.DGX_HCAS[int(n)] for n in given]
    assert held == {"0": expected, "1": expected}
    assert granted.answer.envs["PCIDEVICE_RDMA_HCA"] == ",".join(expected)


def test_a_token_of_all_goes_without_what_is_broken(paths: Paths) -> None:
    of = _pool(paths, mode="all", amount=1)
    _missing(paths.dev / "infiniband/uverbs3")
    granted = _allocated(paths, of, "0")
    assert _names(granted) == ["rdma_cm", *(f"uverbs{n}" for n in (0, 1, 2, 4, 5, 6, 7))]
    assert servers.DGX_HCAS[3] in granted.notes[0]
    for node in (paths.dev / "infiniband").glob("uverbs*"):
        node.unlink()
    assert _refused(paths, of, "0")[0] == "FAILED_PRECONDITION"


# --- Functions without RDMA.


def _bound(paths: Paths, *names: str) -> Pool:
    (paths.dev / "vfio").mkdir()
    for minor, name in enumerate(names):
        os.mknod(paths.dev / "vfio" / name, stat.S_IFCHR | 0o600, os.makedev(240, minor))
    bound = hca(FIRST, driver="vfio-pci", iommu_group="37")
    return pool([bound], resource="intel.com/dpdk", rdma=False)


@pytest.mark.parametrize("name", ["37", "noiommu-37"])
def test_a_function_on_vfio_comes_with_its_group(paths: Paths, name: str) -> None:
    of = _bound(paths, "vfio", name)
    granted = allocation(paths, of, [FIRST], {FIRST}, {FIRST: of.hcas[0]})
    assert [(node.container_path, node.host_path) for node in granted.answer.devices] == [
        (f"/dev/vfio/{node}", str(paths.dev / "vfio" / node)) for node in sorted(("vfio", name))
    ]
    info = json.loads(granted.answer.envs["PCIDEVICE_INTEL_COM_DPDK_INFO"])
    assert info[FIRST]["vfio"] == {"mount": "/dev/vfio/vfio", "dev-mount": f"/dev/vfio/{name}"}
    assert granted.devices[FIRST][0].rdma == ()


def test_a_function_on_vfio_without_its_group_is_refused(paths: Paths) -> None:
    of = _bound(paths, "vfio")
    with pytest.raises(Rejected, match=rf"{FIRST}: .*/vfio/37: No such file"):
        allocation(paths, of, [FIRST], {FIRST}, {FIRST: of.hcas[0]})


def test_a_network_function_without_rdma_comes_without_nodes(paths: Paths) -> None:
    of = _pool(paths, rdma=False)
    granted = _allocated(paths, of, FIRST)
    assert not granted.answer.devices
    assert sorted(granted.answer.envs) == ["PCIDEVICE_RDMA_HCA", "PCIDEVICE_RDMA_HCA_INFO"]
    assert [device.uverbs for device in granted.devices[FIRST][0].rdma] == [None]


def test_verbs_are_given_by_the_selector_that_takes_the_hca(paths: Paths) -> None:
    selectors = (
        Selector(pciAddresses=(FIRST,), isRdma=True),
        Selector(pciAddresses=(SECOND,)),
    )
    of = _pool(paths, selectors=selectors)
    assert _names(_allocated(paths, of, FIRST, SECOND)) == ["rdma_cm", "uverbs0"]
    assert not _allocated(paths, of, SECOND).answer.devices


# --- The checkpoint's entries and the variables.


def test_what_was_handed_out_is_told_with_its_numbers(tmp_path: Path) -> None:
    paths = servers.multiport(tmp_path, nodes=True)
    of = _pool(paths, umad=True)
    granted = _allocated(paths, of, servers.MULTIPORT_HCA)
    (device,) = granted.devices[servers.MULTIPORT_HCA]
    assert (device.id, device.address) == (servers.MULTIPORT_HCA, servers.MULTIPORT_HCA)
    assert device.netdevs == ("ib0", "ib1")
    (mlx5,) = device.rdma
    assert (mlx5.name, mlx5.uverbs) == (
        "mlx5_0",
        AllocatedNode("/dev/infiniband/uverbs0", 231, 192),
    )
    assert [(port.number, port.netdevs, port.umad, port.issm) for port in mlx5.ports] == [
        (1, ("ib0",), AllocatedNode("/dev/infiniband/umad0", 231, 0), None),
        (2, ("ib1",), AllocatedNode("/dev/infiniband/umad1", 231, 1), None),
    ]
    assert [port.guid for port in mlx5.ports] == [servers.port_guid(0, n) for n in (1, 2)]
    assert {port.link_layer for port in mlx5.ports} == {"InfiniBand"}


def test_nothing_more_is_written_down_than_was_given(paths: Paths) -> None:
    device = _allocated(paths, _pool(paths), FIRST).devices[FIRST][0]
    assert [
        (port.umad, port.issm) for rdma_device in device.rdma for port in rdma_device.ports
    ] == [(None, None)]


# --- CDI.


def _described(paths: Paths) -> dict[str, list[str]]:
    """The nodes' paths on the host by the CDI device, from the pool's file."""
    found = json.loads(cdi.path(paths, "rdma/hca").read_text())
    return {
        f"{found['kind']}={device['name']}": [
            node["hostPath"].rpartition("/")[2] for node in device["containerEdits"]["deviceNodes"]
        ]
        for device in found["devices"]
    }


def test_with_cdi_what_cannot_be_used_hides_no_other(paths: Paths) -> None:
    _missing(paths.dev / "infiniband/uverbs0")
    of = _pool(paths, cdi=True)
    assert _refused(paths, of, FIRST)[0] == "FAILED_PRECONDITION"
    granted = _allocated(paths, of, SECOND)
    assert {named.name for named in granted.answer.cdi_devices} < set(_described(paths))
    assert cdi.qualified("rdma/hca", FIRST) not in _described(paths)


def test_a_bound_function_has_a_cdi_device(paths: Paths) -> None:
    of = _bound(paths, "vfio", "37")
    of = Pool(config=replace(of.config, cdi=True), hcas=of.hcas, slots=of.slots)
    granted = allocation(paths, of, [FIRST], {FIRST}, {FIRST: of.hcas[0]})
    assert [named.name for named in granted.answer.cdi_devices] == [
        f"podfabric.io/intel-com-dpdk={FIRST}"
    ]
