"""Artificial servers: their /sys, /proc/driver/nvidia and /dev/infiniband, all below one directory.

Each builder returns the Paths; `Tree(paths.sys, paths)` changes the server afterwards. With
`nodes=True` the character devices are real, as sysfs numbers them (needs CAP_MKNOD).
"""

import os
import stat
from pathlib import Path

from base.paths import Paths
from tests.unit.host.sysfs import Tree

BRIDGES = ((0x17, 0), (0x5D, 0), (0x97, 1), (0xC7, 1))  # bus, NUMA node
DGX_GPUS = tuple(f"0000:{bus + n:02x}:00.0" for bus, _ in BRIDGES for n in (3, 4))
DGX_HCAS = tuple(f"0000:{bus + n:02x}:00.0" for bus, _ in BRIDGES for n in (5, 6))

DOMAINS_GPUS = ("0001:00:00.0", "0002:00:00.0")
DOMAINS_HCAS = ("0001:01:00.0", "0002:01:00.0", "10000:e1:00.0", "10000:e2:00.0")

FLAT_GPUS = ("0000:00:05.0", "0000:00:06.0", "0000:00:07.0", "0000:00:08.0")
FLAT_HCAS = ("0000:00:09.0", "0000:00:0a.0", "0000:00:0b.0", "0000:00:0c.0")

MULTIPORT_HCA = "0000:3b:00.0"

VFS_PF = "0000:3b:00.0"  # InfiniBand, with VFs 0 to 3; the Ethernet PF .1 has VFs 0 to 3, too
VFS_ETHERNET_PF = "0000:3b:00.1"
VFS = tuple(f"0000:3b:00.{n}" for n in (2, 3, 4, 5))
VFS_ETHERNET = tuple(f"0000:3c:00.{n}" for n in (2, 3, 4, 5))
VFS_SF = "mlx5_core.sf.4"

UVERBS, UMAD, ISSM = 192, 0, 64  # the first minors (drivers/infiniband/core)
MAJOR = 231
RDMA_CM = (10, 121)


def gpu_uuid(number: int) -> str:
    """The UUID of a server's GPU, by its position in the builder's list."""
    return f"GPU-{number:08x}-1111-2222-3333-{number:012x}"


def port_guid(number: int, port: int = 1) -> str:
    """The GUID of a port of mlx5_<number>, as sysfs writes it."""
    return f"0002:c903:{number:04x}:{port:04x}"


def ipoib_address(guid: str) -> str:
    """The hardware address of an IPoIB interface on the port with that GUID."""
    digits = "80000102" + "fe80000000000000" + guid.replace(":", "")
    return ":".join(digits[at : at + 2] for at in range(0, 40, 2))


def dgx(root: Path, *, nodes: bool = False) -> Paths:
    """Two sockets with two PCIe switches each, and at each switch two GPUs and two HCAs.

    The HCAs are mlx5_0 to mlx5_7 with one InfiniBand port, ib0 to ib7 and all their nodes.
    """
    return _with_switches(root, BRIDGES, nodes)


def half_dgx(root: Path, *, nodes: bool = False) -> Paths:
    """As `dgx`, with one PCIe switch at each socket: four GPUs, and mlx5_0 to mlx5_3."""
    return _with_switches(root, BRIDGES[::2], nodes)


def _with_switches(root: Path, bridges: tuple[tuple[int, int], ...], nodes: bool) -> Paths:
    """A server with two GPUs and two HCAs at each switch."""
    tree = _server(root)
    gpus, hcas = 0, []
    for bus, numa in bridges:
        for n, port in enumerate(_switch(tree, f"0000:{bus:02x}", 4, numa=numa)):
            address = f"0000:{bus + 3 + n:02x}:00.0"
            if n < 2:
                _gpu(tree, address, gpus, below=port, numa=numa)
                gpus += 1
            else:
                tree.pf(address, below=port, kind="020700", numa=numa)
                hcas.append(address)
    for number, address in enumerate(hcas):
        _hca(tree, address, number)
    return _finished(tree, nodes)


def domains(root: Path, *, nodes: bool = False) -> Paths:
    """PCI domains: 0001 and 0002, with a GPU and an HCA at one switch each; two more HCAs at
    root ports of domain 10000, which a VMD at 0000:5d:05.5 is.
    """
    tree = _server(root)
    for domain in (1, 2):
        numa = domain - 1
        host = f"devices/pci000{domain}:f0"
        prefix = f"000{domain}"
        root_port = tree.bridge(f"{prefix}:f0:01.0", host, numa=numa)
        upstream = tree.bridge(f"{prefix}:f1:00.0", root_port, numa=numa)
        for device in (0, 1):
            port = tree.bridge(f"{prefix}:f2:0{device}.0", upstream, numa=numa)
            if device == 0:
                _gpu(tree, f"{prefix}:00:00.0", domain - 1, below=port, numa=numa)
            else:
                tree.pf(f"{prefix}:01:00.0", below=port, kind="020700", numa=numa)
    vmd = tree.pf(
        "0000:5d:05.5", driver="vmd", below="devices/pci0000:5d", kind="010400", ids="8086:28c0"
    )
    inside = f"{vmd.relative_to(root / 'sys')}/pci10000:e0"
    for device, leaf in ((2, "10000:e1:00.0"), (4, "10000:e2:00.0")):
        port = tree.bridge(f"10000:e0:0{device}.0", inside)
        tree.pf(leaf, below=port, kind="020700", numa=0)
    for number, address in enumerate(DOMAINS_HCAS):
        _hca(tree, address, number)
    return _finished(tree, nodes)


def flat_vm(root: Path, *, nodes: bool = False) -> Paths:
    """A virtual machine with four GPUs and four HCAs on one host bridge, NUMA nodes unknown."""
    tree = _server(root)
    for number, address in enumerate(FLAT_GPUS):
        _gpu(tree, address, number, below="devices/pci0000:00", numa=-1)
    for number, address in enumerate(FLAT_HCAS):
        tree.pf(address, below="devices/pci0000:00", kind="020700", ids="15b3:101e", numa=-1)
        _hca(tree, address, number)
    return _finished(tree, nodes)


def multiport(root: Path, *, nodes: bool = False) -> Paths:
    """One function with mlx5_0, which has two InfiniBand ports, and its sibling smi1."""
    tree = _server(root)
    port = tree.bridge("0000:3a:00.0", "devices/pci0000:3a")
    tree.pf(MULTIPORT_HCA, below=port, kind="020700", ids="15b3:1023", numa=0)
    tree.rdma(MULTIPORT_HCA, "mlx5_0")
    for number in (1, 2):
        guid = port_guid(0, number)
        tree.port("mlx5_0", number, guid=guid)
        name = f"ib{number - 1}"
        address = ipoib_address(guid)
        tree.netdev(MULTIPORT_HCA, name, dev_port=number - 1, address=address)
        _mad(tree, "mlx5_0", number - 1, number)
    tree.character("infiniband_verbs", "uverbs0", "mlx5_0", f"{MAJOR}:{UVERBS}")
    tree.rdma(MULTIPORT_HCA, "smi1")
    tree.port("smi1", guid=port_guid(1))
    tree.character("infiniband_verbs", "uverbs1", "smi1", f"{MAJOR}:{UVERBS + 1}")
    _mad(tree, "smi1", 2, 1)
    return _finished(tree, nodes)


def vfs(root: Path, *, nodes: bool = False) -> Paths:
    """A card with an InfiniBand and an Ethernet PF of four VFs each, and an SF of the latter.

    mlx5_0 and mlx5_1 are the PFs, mlx5_2 to mlx5_5 and mlx5_6 to mlx5_9 their VFs, mlx5_10 the
    SF. The VFs have no NUMA node of their own. The Ethernet PF is in switchdev mode.
    """
    tree = _server(root)
    port = tree.bridge("0000:3a:00.0", "devices/pci0000:3a", numa=1)
    tree.pf(VFS_PF, below=port, kind="020700", totalvfs=8, numa=1)
    tree.pf(VFS_ETHERNET_PF, below=port, totalvfs=8, numa=1)
    _hca(tree, VFS_PF, 0)
    _hca(tree, VFS_ETHERNET_PF, 1, netdev="enp59s0f1np0", phys_port_name="p0")
    for index, address in enumerate(VFS):
        tree.vf(VFS_PF, address, numa=-1)
        _hca(tree, address, 2 + index)
    for index, address in enumerate(VFS_ETHERNET):
        tree.vf(VFS_ETHERNET_PF, address, numa=-1)
        _hca(tree, address, 6 + index, netdev=f"enp59s0f1v{index}")
        representor = f"enp59s0f1np0_{index}"
        tree.netdev(VFS_ETHERNET_PF, representor, phys_port_name=f"pf1vf{index}")
    tree.sf(VFS_ETHERNET_PF, VFS_SF, sfnum=88)
    _hca(tree, VFS_SF, 10, netdev="enp59s0f1s88")
    return _finished(tree, nodes)


def _server(root: Path) -> Tree:
    paths = Paths(**{name: root / name for name in Paths.__struct_fields__})
    for name in ("infiniband_verbs", "infiniband_mad", "infiniband", "net"):
        (paths.sys / "class" / name).mkdir(parents=True)
    tree = Tree(paths.sys, paths)
    tree.write("class/misc/rdma_cm/dev", f"{RDMA_CM[0]}:{RDMA_CM[1]}")
    return tree


def _switch(tree: Tree, bus: str, count: int, *, numa: int, ids: str = "15b3:1979") -> list[str]:
    """The downstream ports of a switch on the host bridge `bus`, which is 0000:17 for example."""
    domain, _, number = bus.partition(":")
    first = int(number, 16)
    root_port = tree.bridge(f"{bus}:01.0", f"devices/pci{bus}", numa=numa)
    upstream = tree.bridge(f"{domain}:{first + 1:02x}:00.0", root_port, ids=ids, numa=numa)
    return [
        tree.bridge(f"{domain}:{first + 2:02x}:{n:02x}.0", upstream, ids=ids, numa=numa)
        for n in range(count)
    ]


def _hca(
    tree: Tree, address: str, number: int, *, netdev: str = "", phys_port_name: str | None = None
) -> None:
    """mlx5_<number> with one port: InfiniBand and ib<number>, or RoCE on `netdev`."""
    rdma = f"mlx5_{number}"
    directory = tree.rdma(address, rdma)
    guid = port_guid(number)
    (directory / "node_guid").write_text(f"{port_guid(number, 0)}\n")
    if netdev:
        tree.port(rdma, guid=guid, link_layer="Ethernet", rate="100 Gb/sec (4X EDR)", netdev=netdev)
        tree.netdev(address, netdev, phys_port_name=phys_port_name)
    else:
        tree.port(rdma, guid=guid)
        tree.netdev(address, f"ib{number}", address=ipoib_address(guid))
    tree.character("infiniband_verbs", f"uverbs{number}", rdma, f"{MAJOR}:{UVERBS + number}")
    _mad(tree, rdma, number, 1, issm=not netdev)


def _mad(tree: Tree, rdma: str, number: int, port: int, *, issm: bool = True) -> None:
    tree.character("infiniband_mad", f"umad{number}", rdma, f"{MAJOR}:{UMAD + number}", port=port)
    if issm:
        dev = f"{MAJOR}:{ISSM + number}"
        tree.character("infiniband_mad", f"issm{number}", rdma, dev, port=port)


def _gpu(tree: Tree, address: str, number: int, *, below: str, numa: int) -> None:
    tree.pf(address, driver="nvidia", below=below, kind="030200", ids="10de:2330", numa=numa)
    directory = tree.paths.proc / "driver/nvidia/gpus" / address
    directory.mkdir(parents=True)
    (directory / "information").write_text(
        "Model: \t\t NVIDIA H100 80GB HBM3\n"
        f"IRQ:   \t\t {300 + number}\n"
        f"GPU UUID: \t {gpu_uuid(number)}\n"
        "Video BIOS: \t 96.00.74.00.01\n"
        "Bus Type: \t PCIe\n"
        f"Bus Location: \t {address}\n"
        f"Device Minor: \t {number}\n"
        "GPU Excluded:\t No\n"
    )


def _finished(tree: Tree, nodes: bool) -> Paths:
    directory = tree.paths.dev / "infiniband"
    directory.mkdir(parents=True)
    if nodes:
        make_nodes(tree.paths)
    return tree.paths


def make_nodes(paths: Paths) -> None:
    """The character devices that sysfs has now, in place of those below /dev/infiniband."""
    for kind in ("infiniband_verbs", "infiniband_mad", "misc"):
        for entry in (paths.sys / "class" / kind).iterdir():
            major, _, minor = (entry / "dev").read_text().strip().partition(":")
            node = paths.dev / "infiniband" / entry.name
            node.unlink(missing_ok=True)
            os.mknod(node, stat.S_IFCHR | 0o666, os.makedev(int(major), int(minor)))
