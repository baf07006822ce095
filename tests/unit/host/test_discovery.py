"""HCAs read from artificial servers, and their device nodes."""

import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from base.paths import Paths
from host.device_nodes import verify
from host.errors import HostError
from host.sysfs.discovery import HCA, CharacterDevice, Port, RdmaDevice, hcas, rdma_cm
from tests.unit.host import servers
from tests.unit.host.servers import (
    DGX_HCAS,
    FLAT_HCAS,
    MULTIPORT_HCA,
    VFS,
    VFS_ETHERNET,
    VFS_ETHERNET_PF,
    VFS_PF,
    VFS_SF,
    ipoib_address,
    port_guid,
)
from tests.unit.host.sysfs import Tree

PF = "0000:3b:00.0"


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """One function without netdevs and RDMA devices."""
    tree = Tree(tmp_path / "sys", Paths(sys=tmp_path / "sys", dev=tmp_path / "dev"))
    tree.pf(PF, numa=0)
    return tree


def _by_id(paths: Paths) -> dict[str, HCA]:
    return {hca.id: hca for hca in hcas(paths)}


def _only(paths: Paths) -> HCA:
    (hca,) = hcas(paths)
    return hca


def _port(hca: HCA) -> Port:
    (rdma,) = hca.rdma
    (port,) = rdma.ports
    return port


def test_hca_of_an_eight_gpu_server_is_whole(tmp_path: Path) -> None:
    listed = hcas(servers.dgx(tmp_path))
    assert tuple(hca.id for hca in listed) == DGX_HCAS
    assert listed[5] == HCA(
        id="0000:9d:00.0",
        address="0000:9d:00.0",
        vendor="15b3",
        device="1021",
        driver="mlx5_core",
        pf="",
        pf_netdevs=(),
        index=None,
        aux_type="",
        numa=1,
        acpi_index="",
        netdevs=("ib5",),
        link_types=("infiniband",),
        rdma=(
            RdmaDevice(
                name="mlx5_5",
                uverbs=CharacterDevice("uverbs5", 231, 197),
                ports=(
                    Port(
                        number=1,
                        link_layer="InfiniBand",
                        state="ACTIVE",
                        physical_state="LinkUp",
                        rate="400 Gb/sec (4X NDR)",
                        guid=port_guid(5),
                        pkeys=(0xFFFF,),
                        netdevs=("ib5",),
                        umad=CharacterDevice("umad5", 231, 5),
                        issm=CharacterDevice("issm5", 231, 69),
                    ),
                ),
            ),
        ),
        rdma_names=("mlx5_5",),
        iommu_group="",
        software=False,
        num_vfs=0,
    )


@pytest.mark.parametrize(
    ("build", "ids"),
    [
        (servers.domains, servers.DOMAINS_HCAS),
        (servers.flat_vm, FLAT_HCAS),
        (servers.multiport, (MULTIPORT_HCA,)),
        (servers.vfs, (VFS_PF, VFS_ETHERNET_PF, *VFS, *VFS_ETHERNET, VFS_SF)),
    ],
)
def test_gpus_bridges_and_other_functions_are_not_hcas(
    tmp_path: Path, build: Callable[[Path], Paths], ids: tuple[str, ...]
) -> None:
    assert tuple(hca.id for hca in hcas(build(tmp_path))) == ids


def test_unknown_numa_node_is_none(tmp_path: Path) -> None:
    assert {hca.numa for hca in hcas(servers.flat_vm(tmp_path))} == {None}


def test_each_port_has_its_own_netdev_and_mad_nodes_and_smi_is_left_out(tmp_path: Path) -> None:
    hca = _only(servers.multiport(tmp_path))
    (rdma,) = hca.rdma
    assert (rdma.name, hca.rdma_names, hca.netdevs) == ("mlx5_0", ("mlx5_0",), ("ib0", "ib1"))
    told = [(port.number, port.netdevs, port.umad, port.issm) for port in rdma.ports]
    assert told == [
        (1, ("ib0",), CharacterDevice("umad0", 231, 0), CharacterDevice("issm0", 231, 64)),
        (2, ("ib1",), CharacterDevice("umad1", 231, 1), CharacterDevice("issm1", 231, 65)),
    ]
    assert rdma.uverbs == CharacterDevice("uverbs0", 231, 192)


def test_vfs_and_sfs_know_their_pf(tmp_path: Path) -> None:
    by_id = _by_id(servers.vfs(tmp_path))
    told = {
        id: (hca.pf, hca.pf_netdevs, hca.index, hca.aux_type, hca.device, hca.numa)
        for id, hca in by_id.items()
    }
    for index, (vf, ethernet) in enumerate(zip(VFS, VFS_ETHERNET, strict=True)):
        assert told[vf] == (VFS_PF, ("ib0",), index, "", "101e", 1)
        assert told[ethernet] == (VFS_ETHERNET_PF, ("enp59s0f1np0",), index, "", "101e", 1)
    assert told[VFS_SF] == (VFS_ETHERNET_PF, ("enp59s0f1np0",), 88, "sf", "1021", 1)
    assert told[VFS_PF] == ("", (), None, "", "1021", 1)
    assert (by_id[VFS_PF].num_vfs, by_id[VFS_ETHERNET_PF].num_vfs, by_id[VFS[0]].num_vfs) == (
        4,
        4,
        0,
    )
    assert by_id[VFS_SF].vendor == "15b3"


def test_representors_are_not_netdevs_of_the_pf(tmp_path: Path) -> None:
    pf = _by_id(servers.vfs(tmp_path))[VFS_ETHERNET_PF]
    assert (pf.netdevs, pf.link_types) == (("enp59s0f1np0",), ("ether",))
    assert _port(pf).netdevs == ("enp59s0f1np0",)


def test_hca_is_working_if_any_port_is_active(tmp_path: Path) -> None:
    paths = servers.multiport(tmp_path)
    tree = Tree(paths.sys)
    tree.port("mlx5_0", 1, guid=port_guid(0, 1), state="1: DOWN", physical_state="2: Polling")
    assert _only(paths).working
    tree.port("mlx5_0", 2, guid=port_guid(0, 2), state="2: INIT")
    hca = _only(paths)
    assert not hca.working
    states = [(port.state, port.physical_state) for port in hca.rdma[0].ports]
    assert states == [("DOWN", "Polling"), ("INIT", "LinkUp")]


def test_hca_in_a_pod_is_listed_by_its_uverbs_device(tmp_path: Path) -> None:
    paths = servers.vfs(tmp_path)
    tree = Tree(paths.sys)
    for device, rdma, netdev in ((VFS[1], "mlx5_3", "ib3"), (VFS_SF, "mlx5_10", "enp59s0f1s88")):
        for kind, name in (("infiniband", rdma), ("net", netdev)):
            shutil.rmtree(tree.device(device) / kind)
            (paths.sys / "class" / kind / name).unlink()
        hca = _by_id(paths)[device]
        assert (hca.rdma, hca.netdevs, hca.link_types) == ((), (), ())
        assert hca.rdma_names == (rdma,)
        assert hca.pf_netdevs != ()


@pytest.mark.parametrize("by_sysfs", [True, False])
def test_ipoib_children_are_not_netdevs_of_the_hca(tmp_path: Path, by_sysfs: bool) -> None:
    paths = servers.dgx(tmp_path)
    tree = Tree(paths.sys)
    address = ipoib_address(port_guid(0))
    child = tree.netdev(DGX_HCAS[0], "ib0.8001", address=address, parent="ib0")
    if by_sysfs:
        (child / "iflink").write_text((child / "ifindex").read_text())
    else:
        (child / "parent").unlink()
    hca = hcas(paths)[0]
    assert hca.netdevs == ("ib0",)
    assert _port(hca).netdevs == ("ib0",)


def test_pkeys_are_in_the_order_of_the_table_without_its_empty_slots(tree: Tree) -> None:
    tree.rdma(PF, "mlx5_0")
    table = [0, 0x8001, *[0] * 7, 0x8002, 0x7FFF, 0]
    tree.port("mlx5_0", pkeys=table)
    assert _port(_only(tree.paths)).pkeys == (0x8001, 0x8002, 0x7FFF)


def test_ipoib_interface_is_found_by_its_ports_guid(tree: Tree) -> None:
    for number, name in enumerate(("mlx5_0", "mlx5_1")):
        tree.rdma(PF, name)
        tree.port(name, guid=port_guid(number))
        tree.netdev(PF, f"ib{1 - number}", address=ipoib_address(port_guid(number)))
    tree.netdev(PF, "eth0")
    netdevs = {rdma.name: rdma.ports[0].netdevs for rdma in _only(tree.paths).rdma}
    assert netdevs == {"mlx5_0": ("ib1",), "mlx5_1": ("ib0",)}
    assert _only(tree.paths).link_types == ("ether", "infiniband")


def test_port_without_a_guid_has_no_netdev(tree: Tree) -> None:
    tree.rdma(PF, "mlx5_0")
    tree.port("mlx5_0")
    tree.netdev(PF, "ib0", address=ipoib_address("0000:0000:0000:0000"))
    port = _port(_only(tree.paths))
    assert (port.guid, port.netdevs) == ("", ())


def _roce(tree: Tree, *named: str, number: int = 1) -> None:
    ndevs = tree.port("mlx5_0", number, link_layer="Ethernet") / "gid_attrs/ndevs"
    for index, name in enumerate(named):
        (ndevs / str(index)).write_text(f"{name}\n")


@pytest.mark.parametrize(
    ("named", "netdevs"),
    [
        (("eth0", "eth0.100"), ("eth0",)),  # a VLAN has GIDs of its own
        (("bond0",), ("bond0",)),
        ((), ("eth0",)),  # while the link is down
        (("gone0",), ("eth0",)),
    ],
)
def test_netdev_of_a_roce_port(
    tree: Tree, named: tuple[str, ...], netdevs: tuple[str, ...]
) -> None:
    tree.rdma(PF, "mlx5_0")
    tree.netdev(PF, "eth0")
    tree.netdev("", "eth0.100")
    tree.netdev("", "bond0")
    _roce(tree, *named)
    assert _port(_only(tree.paths)).netdevs == netdevs


def test_ports_without_gids_are_distinguished_by_dev_port(tree: Tree) -> None:
    tree.rdma(PF, "mlx5_0")
    for number in (1, 2):
        tree.netdev(PF, f"eth{2 - number}", dev_port=number - 1)
        _roce(tree, number=number)
    (rdma,) = _only(tree.paths).rdma
    assert [port.netdevs for port in rdma.ports] == [("eth1",), ("eth0",)]


def test_software_device_is_an_hca_by_its_name(tree: Tree) -> None:
    tree.remove(PF)
    tree.netdev("", "eth7")
    tree.netdev("", "lo")
    tree.soft_rdma("rxe0", "eth7")
    tree.port("rxe0", link_layer="Ethernet", netdev="eth7")
    tree.uverbs("uverbs3", "rxe0")
    tree.write("class/infiniband_verbs/uverbs3/dev", "231:195")
    hca = _only(tree.paths)
    assert (hca.id, hca.address, hca.driver, hca.software) == ("rxe0", "", "rdma_rxe", True)
    assert (hca.netdevs, hca.link_types) == (("eth7",), ("ether",))
    assert hca.rdma_names == ("rxe0",)
    assert hca.rdma[0].uverbs == CharacterDevice("uverbs3", 231, 195)
    assert _port(hca).netdevs == ("eth7",)


def test_software_device_has_no_other_virtual_interface_while_its_own_is_down(tree: Tree) -> None:
    tree.remove(PF)
    tree.netdev("", "eth7")
    tree.netdev("", "veth1")
    ndev = tree.soft_rdma("rxe0", "eth7") / "ports/1/gid_attrs/ndevs/0"
    tree.port("rxe0", link_layer="Ethernet")
    ndev.unlink()
    assert _only(tree.paths).netdevs == ("eth7",)


def test_software_device_in_a_pod_is_listed(tree: Tree) -> None:
    tree.uverbs("uverbs3", "rxe0")
    hca = _by_id(tree.paths)["rxe0"]
    assert (hca.software, hca.rdma, hca.rdma_names) == (True, (), ("rxe0",))


def test_hca_without_a_pci_function_has_its_name_as_id(tree: Tree) -> None:
    tree.remove(PF)
    above = tree.root / "devices/platform/ibloop.0/infiniband/ibloop0"
    above.mkdir(parents=True)
    link = tree.root / "class/infiniband/ibloop0"
    link.parent.mkdir(parents=True)
    link.symlink_to(os.path.relpath(above, link.parent))
    tree.port("ibloop0", guid=port_guid(3))
    tree.netdev("", "ib0", address=ipoib_address(port_guid(3)))
    hca = _only(tree.paths)
    assert (hca.id, hca.address, hca.software) == ("ibloop0", "", False)
    assert hca.netdevs == ("ib0",)


def test_rdma_device_below_another_device_of_the_function_is_the_functions(tree: Tree) -> None:
    below = tree.device(PF) / "irdma.roce.0/infiniband/irdma0"
    (below / "ports").mkdir(parents=True)
    link = tree.root / "class/infiniband/irdma0"
    link.parent.mkdir(parents=True)
    link.symlink_to(os.path.relpath(below, link.parent))
    assert [rdma.name for rdma in _only(tree.paths).rdma] == ["irdma0"]


@pytest.mark.parametrize(
    ("kind", "rdma", "offered"),
    [
        ("020000", False, True),
        ("020700", False, True),
        ("028000", False, True),
        ("0c0600", True, True),  # old HCAs
        ("0c0600", False, False),
        ("120000", True, True),
        ("030200", False, False),
    ],
)
def test_network_functions_and_those_with_an_rdma_device(
    tmp_path: Path, kind: str, rdma: bool, offered: bool
) -> None:
    tree = Tree(tmp_path)
    tree.pf(PF, kind=kind)
    if rdma:
        tree.rdma(PF, "mlx5_0")
    assert [hca.id for hca in hcas(tree.paths)] == ([PF] if offered else [])


def test_uverbs_device_without_a_parent_is_its_rdma_devices(tree: Tree) -> None:
    tree.rdma(PF, "mlx5_0", uverbs="uverbs0")
    assert _only(tree.paths).rdma_names == ("mlx5_0",)


def test_auxiliary_devices_other_than_sfs_are_not_hcas(tree: Tree) -> None:
    for name in ("mlx5_core.eth.0", "mlx5_core.rdma.0", "mlx5_core.sf.12"):
        tree.sf(PF, name)
    assert [hca.id for hca in hcas(tree.paths)] == [PF, "mlx5_core.sf.12"]


def test_netdev_on_the_virtio_device_of_a_function_is_the_functions(tree: Tree) -> None:
    netdev = tree.device(PF) / "virtio0/net/eth0"
    netdev.mkdir(parents=True)
    (netdev / "type").write_text("1\n")
    link = tree.root / "class/net/eth0"
    link.parent.mkdir(parents=True)
    link.symlink_to(os.path.relpath(netdev, link.parent))
    assert _only(tree.paths).netdevs == ("eth0",)


@pytest.mark.parametrize(("driver", "group"), [("vfio-pci", "37"), ("mlx5_core", ""), ("", "")])
def test_function_with_a_userspace_driver_has_its_iommu_group(
    tree: Tree, driver: str, group: str
) -> None:
    tree.bound(PF, driver)
    (tree.device(PF) / "iommu_group").symlink_to("../../../../kernel/iommu_groups/37")
    hca = _only(tree.paths)
    assert (hca.driver, hca.iommu_group) == (driver, group)


def test_acpi_index(tree: Tree) -> None:
    tree.write(f"bus/pci/devices/{PF}/acpi_index", "3")
    assert _only(tree.paths).acpi_index == "3"


def test_unreadable_hca_does_not_hide_others(tmp_path: Path) -> None:
    paths = servers.dgx(tmp_path)
    tree = Tree(paths.sys)
    tree.remove(DGX_HCAS[0])  # unplugged now: links to it and its classes' entries dangle
    for name in ("class/infiniband/mlx5_1/ports/1/state", f"bus/pci/devices/{DGX_HCAS[2]}/vendor"):
        (paths.sys / name).unlink()
        (paths.sys / name).mkdir()
    tree.write("class/infiniband/mlx5_1/ports/1/pkeys/7", "x")
    tree.write("class/infiniband_verbs/uverbs3/dev", "231")
    (paths.sys / "class/infiniband_mad/umad4/port").unlink()
    by_id = _by_id(paths)
    assert tuple(by_id) == DGX_HCAS[1:]
    port = _port(by_id[DGX_HCAS[1]])
    assert (port.state, port.pkeys, port.netdevs) == ("", (0xFFFF,), ("ib1",))
    assert by_id[DGX_HCAS[2]].vendor == ""
    assert by_id[DGX_HCAS[3]].rdma[0].uverbs is None
    assert _port(by_id[DGX_HCAS[4]]).umad is None
    assert by_id[DGX_HCAS[7]].working


def test_node_without_bus_and_class_directories_has_no_hcas(tmp_path: Path) -> None:
    assert hcas(Paths(sys=tmp_path)) == []


def test_each_class_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = servers.dgx(tmp_path)
    seen: Counter[str] = Counter()
    listdir = os.listdir

    def counted(path: str) -> list[str]:
        seen[str(path)] += 1
        return listdir(path)

    monkeypatch.setattr(os, "listdir", counted)
    assert len(hcas(paths)) == 8
    assert seen[f"{paths.sys}/class/net"] == 1
    assert set(seen.values()) == {1}


@pytest.mark.root
def test_node_is_verified_by_its_numbers(tmp_path: Path) -> None:
    paths = servers.dgx(tmp_path, nodes=True)
    for hca in hcas(paths):
        (rdma,) = hca.rdma
        for node in (rdma.uverbs, rdma.ports[0].umad, rdma.ports[0].issm, rdma_cm(paths)):
            assert node is not None
            assert verify(paths, node).host == f"{paths.dev}/infiniband/{node.name}"


@pytest.mark.root
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("none", "No such file or directory"),
        ("directory", "is not a character device"),
        ("file", "is not a character device"),
        ("other", "has device number 231:193, but sysfs has 231:192"),
        ("loop", "Too many levels of symbolic links"),
    ],
)
def test_node_that_is_not_the_device_is_an_error(tmp_path: Path, kind: str, words: str) -> None:
    paths = Paths(dev=tmp_path)
    path = tmp_path / "infiniband/uverbs0"
    path.parent.mkdir()
    if kind == "directory":
        path.mkdir()
    elif kind == "file":
        path.write_text("")
    elif kind == "other":
        os.mknod(path, 0o020666, os.makedev(231, 193))
    elif kind == "loop":
        path.symlink_to(path)
    with pytest.raises(HostError) as caught:
        verify(paths, CharacterDevice("uverbs0", 231, 192))
    assert words in str(caught.value)
    assert str(path) in str(caught.value)
    assert "231:192" in str(caught.value)


def test_connection_manager_that_is_not_loaded_has_no_node(tmp_path: Path) -> None:
    paths = servers.dgx(tmp_path)
    assert rdma_cm(paths) == CharacterDevice("rdma_cm", 10, 121)
    shutil.rmtree(paths.sys / "class/misc/rdma_cm")
    assert rdma_cm(paths) is None
