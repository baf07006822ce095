"""Builds an artificial /sys of PCI functions, auxiliary devices, netdevs and RDMA devices.

The directories lie and the symlinks lead as the kernel's do: devices below `devices/`, every
`bus` and `class` entry a relative symlink to them. Attributes end in a newline. Nothing is bound,
renamed or removed by itself: a test that plays a kernel's answer changes the tree.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from base.paths import Paths

ROOT_PORT = "devices/pci0000:00"


class Tree:
    """A /sys below `root`, or that of `paths`; existing files stay."""

    def __init__(self, root: Path, paths: Paths | None = None) -> None:
        self.root = root
        self.paths = paths or Paths(sys=root)

    def pf(
        self,
        address: str,
        *,
        driver: str = "mlx5_core",
        totalvfs: int = 0,
        below: str = ROOT_PORT,
        kind: str = "020000",
        ids: str = "15b3:1021",
        numa: int | None = None,
    ) -> Path:
        """A PCI function; it can have VFs if `totalvfs` is not 0.

        `below` is the directory above it, or the address of the bridge; `kind` its class, `ids`
        vendor and device. Without `numa` it has no such file.
        """
        above = self.device(below) if _is_address(below) else self.root / below
        device = self._device("pci", address, above / address, driver)
        _write(device / "driver_override", "(null)")
        vendor, _, model = ids.partition(":")
        for name, text in (("class", kind), ("vendor", vendor), ("device", model)):
            _write(device / name, f"0x{text}")
        if numa is not None:
            _write(device / "numa_node", str(numa))
        if totalvfs:
            _write(device / "sriov_totalvfs", str(totalvfs))
            _write(device / "sriov_numvfs", "0")
        return device

    def bridge(self, address: str, below: str, *, ids: str = "8086:352a", numa: int = 0) -> str:
        """Add a PCI bridge: a root port or a port of a switch. Returns its address."""
        self.pf(address, driver="pcieport", below=below, kind="060400", ids=ids, numa=numa)
        return address

    def vf(
        self, pf: str, address: str, *, driver: str = "mlx5_core", numa: int | None = None
    ) -> Path:
        """Add the next VF of a PF, in the same directory."""
        above = self.device(pf)
        below = str(above.parent.relative_to(self.root.resolve()))
        device = self.pf(address, driver=driver, below=below, ids="15b3:101e", numa=numa)
        index = int((above / "sriov_numvfs").read_text())
        _link(device / "physfn", above)
        _link(above / f"virtfn{index}", device)
        _write(above / "sriov_numvfs", str(index + 1))
        return device

    def sf(
        self, pf: str, name: str, *, driver: str = "mlx5_core.sf", sfnum: int | None = None
    ) -> Path:
        """An auxiliary device of a PF."""
        device = self._device("auxiliary", name, self.device(pf) / name, driver)
        if sfnum is not None:
            _write(device / "sfnum", str(sfnum))
        return device

    def netdev(
        self,
        on: str,
        name: str,
        *,
        phys_port_name: str | None = None,
        dev_port: int = 0,
        address: str = "02:00:00:00:00:01",
        parent: str = "",
    ) -> Path:
        """An interface of the device with the address `on`, or a virtual one if that is "".

        It is IPoIB's if its own address has 20 bytes, and then a child if it has a `parent`.
        """
        above = self.device(on) if on else self.root / "devices/virtual"
        netdev = above / "net" / name
        _write(netdev / "dev_port", str(dev_port))
        _write(netdev / "address", address)
        _write(netdev / "type", "32" if len(address) == 59 else "1")
        index = len(_names(self.root / "class/net")) + 2
        _write(netdev / "ifindex", str(index))
        _write(
            netdev / "iflink", self.text(f"class/net/{parent}/ifindex") if parent else str(index)
        )
        if parent:
            _write(netdev / "parent", parent)
        if phys_port_name is not None:
            _write(netdev / "phys_port_name", phys_port_name)
        if on:
            _link(netdev / "device", above)
        _link(self.root / "class/net" / name, netdev)
        return netdev

    def rdma(self, on: str, name: str, *, uverbs: str = "") -> Path:
        """An RDMA device of the device with the address `on`, or a virtual one if that is ""."""
        above = self.device(on) if on else self.root / "devices/virtual"
        rdma = above / "infiniband" / name
        (rdma / "ports/1/gid_attrs/ndevs").mkdir(parents=True)
        if on:
            _link(rdma / "device", above)
        _link(self.root / "class/infiniband" / name, rdma)
        if uverbs:
            self.uverbs(uverbs, name)
        return rdma

    def port(
        self,
        rdma: str,
        number: int = 1,
        *,
        guid: str = "",
        link_layer: str = "InfiniBand",
        state: str = "4: ACTIVE",
        physical_state: str = "5: LinkUp",
        rate: str = "400 Gb/sec (4X NDR)",
        pkeys: Sequence[int] = (0xFFFF, 0),
        netdev: str = "",
    ) -> Path:
        """A port of an RDMA device; `netdev` is what the GID table names (RoCE)."""
        port = self.root / "class/infiniband" / rdma / "ports" / str(number)
        attributes = {
            "link_layer": link_layer,
            "state": state,
            "phys_state": physical_state,
            "rate": rate,
            "lid": hex(number),
            "sm_lid": "0x1",
            "gids/0": f"fe80:0000:0000:0000:{guid or '0000:0000:0000:0000'}",
        }
        for name, text in attributes.items():
            _write(port / name, text)
        for index, pkey in enumerate(pkeys):
            _write(port / "pkeys" / str(index), f"0x{pkey:04x}")
        (port / "gid_attrs/ndevs").mkdir(parents=True, exist_ok=True)
        if netdev:
            _write(port / "gid_attrs/ndevs/0", netdev)
        return port

    def character(self, kind: str, name: str, rdma: str, dev: str, *, port: int = 0) -> None:
        """Add a character device ("infiniband_verbs", "infiniband_mad") where the kernel has it."""
        above = (self.root / "class/infiniband" / rdma).resolve().parents[1]
        entry = above / kind / name
        _write(entry / "ibdev", rdma)
        _write(entry / "dev", dev)
        if port:
            _write(entry / "port", str(port))
        _link(self.root / "class" / kind / name, entry)

    def soft_rdma(self, name: str, netdev: str, *, parent: bool = True) -> Path:
        """Add a Soft-RoCE device; `parent` is an attribute that only rdma_rxe has."""
        rdma = self.rdma("", name)
        if parent:
            _write(rdma / "parent", netdev)
        _write(rdma / "ports/1/gid_attrs/ndevs/0", netdev)
        return rdma

    def uverbs(self, name: str, rdma: str) -> None:
        """Add the character device of an RDMA device; called again, it moves to another one."""
        entry = self.root / "devices/virtual/infiniband_verbs" / name
        _write(entry / "ibdev", rdma)
        _link(self.root / "class/infiniband_verbs" / name, entry)

    def driver(self, name: str, *, bus: str = "pci") -> Path:
        """Add a driver to that bus."""
        directory = self.root / "bus" / bus / "drivers" / name
        for order in ("bind", "unbind"):
            _write(directory / order, "")
        return directory

    def bound(self, address: str, driver: str) -> None:
        """Bind this driver to the device, or none if it is ""."""
        link = self.device(address) / "driver"
        link.unlink(missing_ok=True)
        if driver:
            bus = "pci" if ":" in address else "auxiliary"
            _link(link, self.driver(driver, bus=bus))

    def device(self, address: str) -> Path:
        """The directory of a device, below `devices`."""
        bus = "pci" if ":" in address else "auxiliary"
        return (self.root / "bus" / bus / "devices" / address).resolve(strict=True)

    def remove(self, address: str) -> None:
        """Unplug a device. Links to it dangle, as until the kernel removes them."""
        shutil.rmtree(self.device(address))

    def write(self, path: str, text: str) -> None:
        """Write an attribute at a path below /sys."""
        _write(self.root / path, text)

    def text(self, path: str) -> str:
        """Read an attribute."""
        return (self.root / path).read_text().strip()

    def _device(self, bus: str, address: str, directory: Path, driver: str) -> Path:
        directory.mkdir(parents=True)
        _link(self.root / "bus" / bus / "devices" / address, directory)
        _link(directory / "subsystem", self.root / "bus" / bus)
        if driver:
            self.bound(address, driver)
        return directory


def ethernet(root: Path) -> Tree:
    """A PF with two VFs, both with netdevs, and one without VFs that has two ports."""
    tree = Tree(root)
    tree.pf("0000:af:00.1", totalvfs=8)
    tree.netdev("0000:af:00.1", "enp175s0f1")
    tree.vf("0000:af:00.1", "0000:af:06.0")
    tree.netdev("0000:af:06.0", "enp175s6")
    tree.vf("0000:af:00.1", "0000:af:06.1")
    tree.netdev("0000:af:06.1", "enp175s7")
    tree.pf("0000:05:00.0", driver="mlx4_core", totalvfs=8)
    tree.netdev("0000:05:00.0", "ens1")
    tree.netdev("0000:05:00.0", "ens1d1", dev_port=1)
    return tree


def infiniband(root: Path) -> Tree:
    """A PF with two VFs: one with netdev and RDMA device, one bound to vfio-pci."""
    tree = Tree(root)
    tree.pf("0000:af:00.1", totalvfs=8)
    tree.netdev("0000:af:00.1", "ib0")
    tree.rdma("0000:af:00.1", "mlx5_0", uverbs="uverbs0")
    tree.vf("0000:af:00.1", "0000:af:06.0")
    tree.netdev("0000:af:06.0", "ib1")
    tree.rdma("0000:af:06.0", "mlx5_1", uverbs="uverbs1")
    tree.vf("0000:af:00.1", "0000:af:06.1", driver="vfio-pci")
    return tree


def _is_address(text: str) -> bool:
    return "/" not in text and ":" in text and "." in text


def _names(directory: Path) -> list[str]:
    return [entry.name for entry in directory.iterdir()] if directory.exists() else []


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def _link(link: Path, target: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(os.path.relpath(target, link.parent))
