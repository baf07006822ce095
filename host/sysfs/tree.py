"""Reads the bus and class directories of sysfs once and relates their entries to devices.

Every entry is a link to a directory below /sys/devices, and the directories above that are the
devices it is on. This is a snapshot of the entries. Attributes are read on demand; those that
cannot be read are "".

Sources: Documentation/ABI/stable/sysfs-class-infiniband, testing/sysfs-class-net and
sysfs-bus-pci; drivers/infiniband/core/{uverbs_main,user_mad}.c, ulp/ipoib/ipoib_vlan.c.
"""

import re
from typing import NamedTuple

import msgspec

from base.paths import Paths
from host.sysfs import attribute_files, pci

_SF = re.compile(r"mlx5_core\.sf\.[0-9]+")
_SMI = re.compile(r"smi[0-9]+")  # an XDR HCA's second mlx5 device, for subnet management
_ARPHRD = {"1": "ether", "32": "infiniband"}  # linux/if_arp.h


class CharacterDevice(msgspec.Struct, frozen=True):
    """A character device: its name and its numbers in sysfs."""

    name: str  # "uverbs0"; its node is /dev/infiniband/uverbs0
    major: int
    minor: int


class Netdev(NamedTuple):
    """An interface in this network namespace."""

    name: str
    link_type: str  # "ether", "infiniband", or ""
    guid: str  # the port's GUID of an IPoIB interface, 16 digits
    dev_port: int
    foreign: bool  # not the device's own: an IPoIB child or a representor


class SysfsSnapshot:
    """The snapshot. Directories are relative to /sys/devices: "pci0000:17/0000:17:01.0"."""

    def __init__(self, paths: Paths) -> None:
        self._paths, self._sys = paths, str(paths.sys)
        self._indexes: dict[str, dict[str, int]] = {}  # of VFs, by their PF
        self.functions = self._directories("bus/pci/devices")  # by address
        auxiliary = self._directories("bus/auxiliary/devices")
        self.sfs = {name: at for name, at in auxiliary.items() if _SF.fullmatch(name)}
        self.addresses = {at: address for address, at in (self.functions | self.sfs).items()}
        self._netdevs: dict[str, list[str]] = {}  # by the directory of their device
        self._by_name: dict[str, Netdev] = {}
        self.visible: set[str] = set()  # names of netdevs
        self._read_netdevs()
        self.rdma: dict[str, list[str]] = {}  # names of visible RDMA devices, by their HCA's id
        self.rdma_names: dict[str, set[str]] = {}  # the same in all network namespaces
        self.software: set[str] = set()  # names of software RDMA devices
        self.above: dict[str, str] = {}  # the directory of an RDMA device's parent device
        self.uverbs: dict[str, CharacterDevice] = {}  # by RDMA device
        self.mad: dict[
            tuple[str, str, str], CharacterDevice
        ] = {}  # by RDMA device, port, "umad" or "issm"
        self._read_rdma()
        self._read_uverbs()
        self._read_mad()

    def own(self, directory: str) -> list[Netdev]:
        """A device's own interfaces by name, without IPoIB children and representors."""
        netdevs = (self.netdev(name) for name in sorted(self._netdevs.get(directory, ())))
        return [netdev for netdev in netdevs if not netdev.foreign]

    def netdev(self, name: str) -> Netdev:
        """The visible interface with that name."""
        netdev = self._by_name.get(name)
        if netdev is None:
            at = f"class/net/{name}"
            link_type = _ARPHRD.get(self.text(f"{at}/type"), "")
            if link_type == "infiniband":
                # Only children created through sysfs have `parent`; all have their parent's iflink.
                index, link = self.text(f"{at}/ifindex"), self.text(f"{at}/iflink")
                foreign = self.text(f"{at}/parent") != "" or index != link
            else:
                # EOPNOTSUPP outside switchdev mode
                foreign = pci.is_representor(self.text(f"{at}/phys_port_name"))
            address = self.text(f"{at}/address").replace(":", "")
            guid = address[-16:] if len(address) == 40 else ""
            dev_port = self.number(f"{at}/dev_port") or 0
            netdev = self._by_name[name] = Netdev(name, link_type, guid, dev_port, foreign)
        return netdev

    def indexes_of_vfs(self, pf: str) -> dict[str, int]:
        """The numbers of a PF's VFs there, by their addresses. Its directory is read once."""
        if pf not in self._indexes:
            self._indexes[pf] = {vf: index for index, vf in pci.indexed_vfs(self._paths, pf)}
        return self._indexes[pf]

    def text(self, path: str) -> str:
        """The attribute at a path below /sys, stripped; "" if it cannot be read."""
        return attribute_files.text(f"{self._sys}/{path}", errors="replace")

    def number(self, path: str) -> int | None:
        """As `attribute_files.number`, of a path below /sys."""
        return attribute_files.number(f"{self._sys}/{path}")

    def numa_node(self, *devices: str) -> int | None:
        """As `attribute_files.numa_node`, of directories below /sys."""
        return attribute_files.numa_node(*(f"{self._sys}/{device}" for device in devices))

    def names(self, path: str) -> list[str]:
        """The entries of a directory below /sys; [] if it does not exist."""
        return attribute_files.names(f"{self._sys}/{path}")

    def indexes(self, path: str) -> list[int]:
        """The numbers that are entries of a table below /sys, sorted."""
        return sorted(int(name) for name in self.names(path) if name.isdecimal())

    def link(self, path: str) -> str:
        """The text of a symbolic link below /sys; "" if there is none."""
        return attribute_files.link(f"{self._sys}/{path}")

    def target(self, path: str) -> str:
        """The last component of a symbolic link below /sys; "" if there is none."""
        return attribute_files.target(f"{self._sys}/{path}")

    def _directories(self, at: str) -> dict[str, str]:
        links = ((name, self.link(f"{at}/{name}")) for name in self.names(at))
        directories = ((name, link.partition("devices/")[2]) for name, link in links)
        return {name: directory for name, directory in directories if directory}

    def _read_netdevs(self) -> None:
        for name, directory in self._directories("class/net").items():
            device = directory.rpartition("/net/")[0] or "virtual"
            above, _, last = device.rpartition("/")
            if last.startswith("virtio"):  # its netdevs are on a device of the virtio bus
                device = above
            self._netdevs.setdefault(device, []).append(name)
            self.visible.add(name)

    def _read_rdma(self) -> None:
        for name, directory in self._directories("class/infiniband").items():
            if not _SMI.fullmatch(name):
                self.above[name] = directory.rpartition("/infiniband/")[0]
                home = self._home(name, self.above[name])
                self.rdma.setdefault(home, []).append(name)
                self.rdma_names.setdefault(home, set()).add(name)

    def _read_uverbs(self) -> None:
        for name, directory in self._directories("class/infiniband_verbs").items():
            rdma = self.text(f"class/infiniband_verbs/{name}/ibdev")
            if rdma and not _SMI.fullmatch(rdma):
                above = self.above.get(rdma, directory.rpartition("/infiniband_verbs/")[0])
                self.rdma_names.setdefault(self._home(rdma, above), set()).add(rdma)
                if node := node_at(f"{self._sys}/class/infiniband_verbs/{name}"):
                    self.uverbs[rdma] = node

    def _read_mad(self) -> None:
        for name in self.names("class/infiniband_mad"):
            at = f"class/infiniband_mad/{name}"
            if (rdma := self.text(f"{at}/ibdev")) and (node := node_at(f"{self._sys}/{at}")):
                self.mad[rdma, self.text(f"{at}/port"), name.rstrip("0123456789")] = node

    def _home(self, name: str, above: str) -> str:
        """The id of an RDMA device's HCA: the nearest device above with an address, or its name."""
        if above == "virtual":
            self.software.add(name)
        while above:
            if (address := self.addresses.get(above)) is not None:
                return address
            above = above.rpartition("/")[0]
        return name


def node_at(entry: str) -> CharacterDevice | None:
    """The character device of a class entry; None if there is none."""
    major, _, minor = attribute_files.text(f"{entry}/dev").partition(":")
    if not (major.isdecimal() and minor.isdecimal()):
        return None
    return CharacterDevice(entry.rpartition("/")[2], int(major), int(minor))
