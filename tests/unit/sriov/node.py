"""An artificial node: PFs and VFs in a tree of files, interfaces and RDMA devices in memory.

It replaces the functions with which `cni.sriov` calls the kernel. `calls` has every change, in
order. Nothing leads to this machine's devices.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import msgspec
import pytest
from pyroute2.netlink.rtnl.ifinfmsg import IFF_UP

from base.paths import Paths
from host import announce, ethtool, netdev_move
from host.errors import HostError
from host.namespaces import NetworkNamespace
from host.netdev_move import Mark
from host.netlink import interface_addresses, links, rdma, vfs
from host.netlink.links import ARPHRD_ETHER, ARPHRD_INFINIBAND, Link
from host.netlink.rdma import NetlinkRdmaDevice, RdmaNetlink
from host.netlink.sockets import Rtnetlink
from host.netlink.vfs import VF
from host.sysfs import pci
from host.sysfs.pci import Function
from tests.unit.host.sysfs import Tree

HOST, POD = cast(Rtnetlink, "host"), cast(Rtnetlink, "pod")
NAMESPACE = cast(NetworkNamespace, "namespace")
PF, VF0, VF1 = "0000:af:00.1", "0000:af:06.0", "0000:af:06.1"
BOOT = "this boot"
PORT_GUID = "11:22:33:00:00:aa:bb:cc"


def link(name: str, device: str, **more: object) -> Link:
    """An Ethernet interface that is up, with these changes."""
    usual: dict[str, object] = {
        "index": 10,
        "kind": "",
        "link_type": ARPHRD_ETHER,
        "mac": "02:11:22:33:aa:bb",
        "broadcast": "ff:ff:ff:ff:ff:ff",
        "mtu": 1500,
        "flags": IFF_UP,
    }
    return Link(name=name, device=device, **{**usual, **more})  # type: ignore[arg-type]


def ipoib(name: str, device: str, guid: str = PORT_GUID, **more: object) -> Link:
    """A hardware IPoIB interface, not a child."""
    mac = f"00:00:10:49:fe:80:00:00:00:00:00:00:{guid}"
    return link(name, device, link_type=ARPHRD_INFINIBAND, kind="ipoib", mac=mac, mtu=2044, **more)


def vf(index: int = 0, **more: object) -> VF:
    """A VF as its driver creates it, with these changes."""
    usual: dict[str, object] = {
        "mac": "02:11:22:33:aa:bb",
        "vlan": 0,
        "qos": 0,
        "proto": "802.1q",
        "min_tx_rate": 0,
        "max_tx_rate": 0,
        "spoofchk": True,
        "trust": False,
        "link_state": "auto",
        "node_guid": None,
        "port_guid": None,
    }
    return VF(index=index, **{**usual, **more})  # type: ignore[arg-type]


class Node:
    """The tree, netlink's answers, and the changes made."""

    def __init__(self, tree: Tree, root: Path) -> None:
        self.tree = tree
        self.paths = Paths(
            sys=tree.root, proc=root / "proc", run=root / "run", state=root / "state"
        )
        boot = root / "proc/sys/kernel/random/boot_id"
        boot.parent.mkdir(parents=True)
        boot.write_text(BOOT + "\n")
        self.links: dict[str, Link] = {}
        self.vfs: dict[int, VF] = {}
        self.rdma: dict[int, str] = {}  # on the host, by index
        self.rdma_in_pod: dict[int, str] = {}
        self.mode = "exclusive"
        self.addresses: dict[str, list[str]] = {}  # by interface
        self.calls: list[str] = []

    def stands_for_the_kernel(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let the functions that `cni.sriov` calls use this node."""
        for module, names in (
            (links, ("find", "every", "by_index")),
            (interface_addresses, ("configure",)),
            (netdev_move, ("move_in", "set_address")),
            (rdma, ("rdma", "devices", "move")),
        ):
            for name in names:
                monkeypatch.setattr(module, name, getattr(self, f"_{name}"))
        monkeypatch.setattr(vfs, "read", self._read_vf)
        monkeypatch.setattr(vfs, "find", self._find_vf)
        monkeypatch.setattr(
            interface_addresses, "of_users", lambda route, link: self.addresses.get(link.name, [])
        )
        monkeypatch.setattr(rdma, "mode", lambda socket: self.mode)
        monkeypatch.setattr(rdma, "by_index", self._rdma_by_index)
        monkeypatch.setattr(ethtool, "settings", lambda route, name: {})
        monkeypatch.setattr(pci, "unbind", self._unbind)
        monkeypatch.setattr(pci, "bind", self._bind)
        monkeypatch.setattr(announce, "announce", lambda *arguments: [])

    def with_a_scalable_function(self) -> None:
        """Give the PF the SF mlx5_core.sf.6, with an interface."""
        self.tree.sf(PF, "mlx5_core.sf.6")
        self.tree.netdev("mlx5_core.sf.6", "enp175s0f1s0")
        self.links["enp175s0f1s0"] = link("enp175s0f1s0", "mlx5_core.sf.6")

    def in_switchdev_mode(self) -> None:
        """Give the PF the representor aaa_rep0, which is down and the first in its directory."""
        self.tree.netdev(PF, "aaa_rep0", phys_port_name="pf0vf0")
        (self.tree.device(PF) / "net/enp175s0f1/phys_port_name").write_text("p0\n")
        self.links["aaa_rep0"] = link("aaa_rep0", PF, flags=0)

    def rebound(self) -> None:
        """Called when a driver is rebound; a test may replace it."""

    def _find(self, route: Rtnetlink, name: str) -> Link | None:
        return self.links.get(name)

    def _every(self, route: Rtnetlink, kind: str = "") -> list[Link]:
        return list(self.links.values())

    def _by_index(self, route: Rtnetlink, index: int) -> Link | None:
        return next((link for link in self.links.values() if link.index == index), None)

    def _read_vf(self, route: Rtnetlink, pf: Link, index: int) -> VF:
        if index not in self.vfs:
            raise HostError(f'"{pf.name}" has no VF {index}')
        return self.vfs[index]

    def _find_vf(self, route: Rtnetlink, pf: str, index: int) -> tuple[Link, VF] | None:
        return (
            (self.links[pf], self._read_vf(route, self.links[pf], index))
            if pf in self.links
            else None
        )

    def _unbind(self, paths: Paths, function: Function) -> None:
        self.calls.append(f"unbind {function.address} from {function.driver}")
        self.tree.bound(function.address, "")

    def _bind(self, paths: Paths, function: Function, driver: str) -> None:
        self.calls.append(f"bind {function.address} to {driver}")
        self.tree.bound(function.address, driver)
        self.rebound()

    def _move_in(
        self,
        host: Rtnetlink,
        pod: Rtnetlink,
        namespace: NetworkNamespace,
        moved: Link,
        name: str,
        mark: Mark,
        *,
        mtu: int = 0,
    ) -> Link:
        assert self.links[moved.name] == moved, "an interface that is there no more"
        self.calls.append(f"interface {moved.name}, index {moved.index}, to the pod as {name}")
        return msgspec.structs.replace(moved, name=name, alias=mark.alias, mtu=mtu or moved.mtu)

    def _set_address(self, route: Rtnetlink, moved: Link, mac: str) -> None:
        self.calls.append(f"address {mac}")

    def _configure(
        self,
        pod: Rtnetlink,
        namespace: NetworkNamespace,
        moved: Link,
        cidrs: Sequence[str],
        *,
        modes: tuple[int, int] = (0, 0),
        accept_ra: bool = False,
    ) -> Link:
        self.calls.append(f"{moved.name} up")
        return moved

    @contextmanager
    def _rdma(self, namespace: NetworkNamespace | None = None) -> Iterator[RdmaNetlink]:
        yield cast(RdmaNetlink, "host" if namespace is None else "pod")

    def _seen(self, socket: RdmaNetlink) -> dict[int, str]:
        return self.rdma if cast(str, socket) == "host" else self.rdma_in_pod

    def _devices(self, socket: RdmaNetlink) -> list[NetlinkRdmaDevice]:
        return [_device(index, name) for index, name in self._seen(socket).items()]

    def _rdma_by_index(self, socket: RdmaNetlink, index: int) -> NetlinkRdmaDevice | None:
        name = self._seen(socket).get(index)
        return None if name is None else _device(index, name)

    def _move(
        self, socket: RdmaNetlink, device: NetlinkRdmaDevice, target: NetworkNamespace
    ) -> None:
        self.calls.append(f"RDMA device {device.name} to the pod")
        self.rdma_in_pod[device.index] = self.rdma.pop(device.index)
        self.moved_rdma(device.name)

    def moved_rdma(self, name: str) -> None:
        """Called when an RDMA device moves; a test may replace it."""


def _device(index: int, name: str) -> NetlinkRdmaDevice:
    return NetlinkRdmaDevice(
        index=index, name=name, node_guid="0011:2233:4455:6677", protocol="roce"
    )
