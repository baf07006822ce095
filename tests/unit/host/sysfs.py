"""Builds a made-up /sys of PCI functions, auxiliary devices, netdevs and RDMA devices.

The directories lie and the symlinks lead as the kernel's do: devices below `devices/`, every
`bus` and `class` entry a relative symlink to them. Attributes end in a newline. Nothing is bound,
renamed or removed by itself: a test that plays a kernel's answer changes the tree.
"""

import os
import shutil
from pathlib import Path

from host.paths import Paths

ROOT_PORT = "devices/pci0000:00"


class Tree:
    """A /sys below `root`, empty at first."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.paths = Paths(sys=root)

    def pf(self, address: str, *, driver: str = "mlx5_core", totalvfs: int = 0) -> Path:
        """A PCI function; it can have VFs if `totalvfs` is not 0."""
        device = self._device("pci", address, self.root / ROOT_PORT / address, driver)
        _write(device / "driver_override", "(null)")
        if totalvfs:
            _write(device / "sriov_totalvfs", str(totalvfs))
            _write(device / "sriov_numvfs", "0")
        return device

    def vf(self, pf: str, address: str, *, driver: str = "mlx5_core") -> Path:
        """The next VF of a PF."""
        device = self.pf(address, driver=driver)
        above = self.device(pf)
        index = int((above / "sriov_numvfs").read_text())
        _link(device / "physfn", above)
        _link(above / f"virtfn{index}", device)
        _write(above / "sriov_numvfs", str(index + 1))
        return device

    def sf(self, pf: str, name: str, *, driver: str = "mlx5_core.sf") -> Path:
        """An auxiliary device of a PF."""
        return self._device("auxiliary", name, self.device(pf) / name, driver)

    def netdev(
        self, on: str, name: str, *, phys_port_name: str | None = None, dev_port: int = 0
    ) -> Path:
        """An interface of the device with the address `on`, or a virtual one if that is ""."""
        above = self.device(on) if on else self.root / "devices/virtual"
        netdev = above / "net" / name
        _write(netdev / "dev_port", str(dev_port))
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

    def soft_rdma(self, name: str, netdev: str, *, parent: bool = True) -> Path:
        """A Soft-RoCE device; `parent` is the attribute that rdma_rxe has beside the GIDs'."""
        rdma = self.rdma("", name)
        if parent:
            _write(rdma / "parent", netdev)
        _write(rdma / "ports/1/gid_attrs/ndevs/0", netdev)
        return rdma

    def uverbs(self, name: str, rdma: str) -> None:
        """The character device of an RDMA device; given again, it is another one's."""
        entry = self.root / "devices/virtual/infiniband_verbs" / name
        _write(entry / "ibdev", rdma)
        _link(self.root / "class/infiniband_verbs" / name, entry)

    def driver(self, name: str, *, bus: str = "pci") -> Path:
        """A driver of that bus, its module loaded."""
        directory = self.root / "bus" / bus / "drivers" / name
        for order in ("bind", "unbind"):
            _write(directory / order, "")
        return directory

    def bound(self, address: str, driver: str) -> None:
        """From now on the device has this driver, or none if it is ""."""
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
        """Unplug a device: links to it dangle until the kernel has removed them, too."""
        shutil.rmtree(self.device(address))

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


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def _link(link: Path, target: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(os.path.relpath(target, link.parent))
