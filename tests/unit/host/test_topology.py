"""Distances on artificial servers, from sysfs and from a file in NCCL's format."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from base.paths import Paths
from host.sysfs.topology import Distance, Topology
from tests.unit.host import servers
from tests.unit.host.servers import (
    DGX_GPUS,
    DGX_HCAS,
    DOMAINS_GPUS,
    DOMAINS_HCAS,
    FLAT_GPUS,
    FLAT_HCAS,
    VFS,
    VFS_ETHERNET,
    VFS_ETHERNET_PF,
    VFS_PF,
    VFS_SF,
)
from tests.unit.host.sysfs import Tree

LETTERS = {"=": "SAME", "i": "PIX", "x": "PXB", "h": "PHB", "n": "NODE", "s": "SYS"}


def _rows(topology: Topology, rows: Sequence[str], columns: Sequence[str]) -> list[str]:
    letters = {name: letter for letter, name in LETTERS.items()}
    return ["".join(letters[topology.distance(a, b).name] for b in columns) for a in rows]


def _server(
    tmp_path: Path, build: Callable[[Path], Paths], addresses: Sequence[str]
) -> tuple[Paths, Topology]:
    paths = build(tmp_path)
    return paths, Topology.read(paths, addresses)


def test_eight_gpu_server(tmp_path: Path) -> None:
    _, topology = _server(tmp_path, servers.dgx, (*DGX_GPUS, *DGX_HCAS))
    expected = [
        "iinnssss",
        "iinnssss",
        "nniissss",
        "nniissss",
        "ssssiinn",
        "ssssiinn",
        "ssssnnii",
        "ssssnnii",
    ]
    assert _rows(topology, DGX_GPUS, DGX_HCAS) == expected
    assert _rows(topology, DGX_HCAS, DGX_GPUS) == expected
    assert _rows(topology, DGX_HCAS[:3], DGX_HCAS[:3]) == ["=in", "i=n", "nn="]
    switches = [topology.switch(address) for address in DGX_HCAS]
    assert switches == [
        *("0000:18:00.0",) * 2,
        *("0000:5e:00.0",) * 2,
        *("0000:98:00.0",) * 2,
        *("0000:c8:00.0",) * 2,
    ]
    assert [topology.switch(address) for address in DGX_GPUS] == switches


def test_place_is_the_way_from_the_root_port_down(tmp_path: Path) -> None:
    _, topology = _server(tmp_path, servers.dgx, DGX_HCAS)
    location = topology.location("0000:1d:00.0")
    assert location is not None
    assert (location.bridge, location.numa) == ("pci0000:17", 0)
    assert location.chain == ("0000:17:01.0", "0000:18:00.0", "0000:19:03.0", "0000:1d:00.0")


def test_pci_domains_and_a_vmd(tmp_path: Path) -> None:
    _, topology = _server(tmp_path, servers.domains, (*DOMAINS_GPUS, *DOMAINS_HCAS))
    assert _rows(topology, DOMAINS_GPUS, DOMAINS_HCAS) == ["isnn", "siss"]
    assert _rows(topology, DOMAINS_HCAS[2:], DOMAINS_HCAS[2:]) == ["=h", "h="]
    location = topology.location("10000:e1:00.0")
    assert location is not None
    assert (location.bridge, location.chain) == ("pci0000:5d", ("10000:e0:02.0", "10000:e1:00.0"))
    assert topology.switch(DOMAINS_HCAS[2]) != topology.switch(DOMAINS_HCAS[3])


def test_function_of_the_bridge_that_a_vmd_is_on_is_at_phb(tmp_path: Path) -> None:
    paths = servers.domains(tmp_path)
    Tree(paths.sys).pf("0000:5e:00.0", below="devices/pci0000:5d/0000:5d:02.0", numa=0)
    topology = Topology.read(paths, ("0000:5e:00.0", "10000:e1:00.0"))
    assert topology.distance("0000:5e:00.0", "10000:e1:00.0") is Distance.PHB


def test_flat_virtual_machine_has_no_switches(tmp_path: Path) -> None:
    paths = servers.flat_vm(tmp_path)
    topology = Topology.read(paths, (*FLAT_GPUS, *FLAT_HCAS))
    assert _rows(topology, FLAT_GPUS, FLAT_HCAS) == ["hhhh"] * 4
    assert len({topology.switch(address) for address in FLAT_HCAS}) == 4


def test_vfs_and_sfs_are_where_their_pf_is(tmp_path: Path) -> None:
    every = (VFS_PF, VFS_ETHERNET_PF, *VFS, *VFS_ETHERNET, VFS_SF)
    _, topology = _server(tmp_path, servers.vfs, every)
    # VFS_ETHERNET are on the bus after their PF's, so their addresses do not show it.
    assert _rows(topology, every, every) == ["=" * len(every)] * len(every)
    for address, pf in ((VFS[0], VFS_PF), (VFS_ETHERNET[3], VFS_ETHERNET_PF)):
        location = topology.location(address)
        assert location is not None
        assert (location.address, location.chain[-1], location.numa) == (address, pf, 1)
    assert len({topology.switch(address) for address in every}) == 1


def _machine(root: Path, *chains: str, numa: int | None = 0, ids: str = "8086:352a") -> Paths:
    """Functions with everything above them: "pci0000:17 17:01.0 18:00.0 …"; all bridges `ids`."""
    paths = Paths(sys=root / "sys", etc=root / "etc")
    tree = Tree(paths.sys, paths)
    for chain in chains:
        bridge, *between, leaf = chain.split()
        directory = f"devices/{bridge}"
        for address in between:
            if not (paths.sys / "bus/pci/devices" / f"0000:{address}").is_symlink():
                tree.bridge(f"0000:{address}", directory, ids=ids)
            directory += f"/0000:{address}"
        tree.pf(f"0000:{leaf}", below=directory, numa=numa)
    return paths


SWITCH = "pci0000:17 17:01.0 18:00.0"


@pytest.mark.parametrize(
    ("a", "b", "distance", "one_switch"),
    [
        pytest.param(
            f"{SWITCH} 19:00.0 1a:00.0", f"{SWITCH} 19:01.0 1b:00.0", "PIX", True, id="one switch"
        ),
        pytest.param(
            f"{SWITCH} 19:00.0 1a:00.0",
            f"{SWITCH} 19:01.0 1b:00.0 1c:00.0 1d:00.0",
            "PXB",
            False,
            id="a switch below the switch, such as the HCA's own",
        ),
        pytest.param(
            f"{SWITCH} 19:00.0 1a:00.0 1b:00.0 1c:00.0",
            f"{SWITCH} 19:01.0 2a:00.0 2b:00.0 2c:00.0",
            "PXB",
            False,
            id="two switches below one",
        ),
        pytest.param(
            f"{SWITCH} 19:00.0 1a:00.0",
            "pci0000:17 17:03.0 28:00.0 29:00.0 2a:00.0",
            "PHB",
            False,
            id="two root ports",
        ),
        pytest.param(
            "pci0000:17 17:01.0 18:00.0",
            "pci0000:17 17:02.0 19:00.0",
            "PHB",
            False,
            id="root ports without a switch",
        ),
        pytest.param(
            "pci0000:17 17:01.0 18:00.0",
            "pci0000:17 17:01.0 18:01.0",
            "PIX",
            True,
            id="one bus below a root port",
        ),
        pytest.param(
            "pci0000:17 17:02.0", "pci0000:17 17:03.0", "PHB", False, id="on the host bridge"
        ),
        pytest.param(
            "pci0000:17 17:02.0 18:00.0",
            "pci0000:17 17:02.0 18:00.1",
            "SAME",
            True,
            id="functions of a card",
        ),
        pytest.param(
            "pci0000:17 17:02.0",
            "pci0000:17 17:02.1",
            "SAME",
            True,
            id="functions of a card on the host bridge",
        ),
        pytest.param(
            "pci0000:17 17:02.0", "pci0000:5d 5d:02.0", "NODE", False, id="two host bridges"
        ),
    ],
)
def test_class_follows_from_the_ways(
    tmp_path: Path, a: str, b: str, distance: str, one_switch: bool
) -> None:
    here, there = (f"0000:{chain.split()[-1]}" for chain in (a, b))
    topology = Topology.read(_machine(tmp_path, a, b), (here, there))
    assert topology.distance(here, there).name == distance
    assert topology.distance(there, here).name == distance
    assert topology.distance(here, here) is Distance.SAME
    assert (topology.switch(here) == topology.switch(there)) is one_switch


@pytest.mark.parametrize(
    ("ids", "distance"),
    [("1000:c010", "PIX"), ("1000:c030", "PIX"), ("1000:c040", "PXB"), ("15b3:c030", "PXB")],
)
def test_two_levels_of_one_pex_chip_count_as_one(tmp_path: Path, ids: str, distance: str) -> None:
    chains = (
        f"{SWITCH} 19:00.0 1a:00.0 1b:00.0 1c:00.0",
        f"{SWITCH} 19:01.0 2a:00.0 2b:00.0 2c:00.0",
        f"{SWITCH} 19:02.0 3a:00.0",
    )
    leaves = [f"0000:{chain.split()[-1]}" for chain in chains]
    topology = Topology.read(_machine(tmp_path, *chains, ids=ids), leaves)
    assert {topology.distance(leaves[0], other).name for other in leaves[1:]} == {distance}
    assert (len({topology.switch(leaf) for leaf in leaves}) == 1) is (distance == "PIX")


@pytest.mark.parametrize(
    "others", [("0000:2a:00.0", "0000:2b:00.0"), ("0000:17:01.0", "0000:18:00.0")]
)
def test_pex_and_the_switch_of_another_maker_count_as_two(
    tmp_path: Path, others: tuple[str, str]
) -> None:
    chains = f"{SWITCH} 19:00.0 1a:00.0", f"{SWITCH} 19:01.0 2a:00.0 2b:00.0 2c:00.0"
    paths = _machine(tmp_path, *chains, ids="1000:c030")
    tree = Tree(paths.sys)
    for port in others:
        (tree.device(port) / "vendor").write_text("0x15b3\n")
    topology = Topology.read(paths, ("0000:1a:00.0", "0000:2c:00.0"))
    assert topology.distance("0000:1a:00.0", "0000:2c:00.0") is Distance.PXB


@pytest.mark.parametrize("numa", [None, -1])
def test_unknown_numa_node_is_far(tmp_path: Path, numa: int | None) -> None:
    paths = _machine(tmp_path, "pci0000:17 17:02.0", "pci0000:5d 5d:02.0", numa=numa)
    topology = Topology.read(paths, ("0000:17:02.0", "0000:5d:02.0"))
    assert topology.distance("0000:17:02.0", "0000:5d:02.0") is Distance.SYS
    location = topology.location("0000:17:02.0")
    assert location is not None
    assert location.numa is None


@pytest.mark.parametrize("other", ["", "rxe0", "0000:99:00.0", "mlx5_core.sf.9"])
def test_unknown_address_is_far_and_has_no_location(tmp_path: Path, other: str) -> None:
    paths = _machine(tmp_path, "pci0000:17 17:02.0")
    topology = Topology.read(paths, ("0000:17:02.0", other))
    assert topology.location(other) is None
    assert topology.switch(other) == ""
    assert topology.distance(other, "0000:17:02.0") is Distance.SYS
    assert topology.distance(other, other) is Distance.SYS


def test_host_bridge_may_be_below_another_bus(tmp_path: Path) -> None:
    """Hyper-V's are below VMBUS, Arm's below platform."""
    bridge = "LNXSYSTM:00/LNXSYBUS:00/ACPI0004:00/VMBUS:00/47505500/pci0001:00"
    paths = Paths(sys=tmp_path, etc=tmp_path)
    Tree(tmp_path).pf("0001:00:00.0", below=f"devices/{bridge}", numa=1)
    location = Topology.read(paths, ["0001:00:00.0"]).location("0001:00:00.0")
    assert location is not None
    assert (location.bridge, location.chain, location.numa) == ("pci0001:00", ("0001:00:00.0",), 1)
