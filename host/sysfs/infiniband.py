"""Finds the HCA and port of an IPoIB interface in sysfs, and the port's state.

Sources: Documentation/ABI/stable/sysfs-class-infiniband, drivers/infiniband/ulp/ipoib.
"""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from base.paths import Paths
from host.sysfs import attribute_files

if TYPE_CHECKING:
    from host.netlink.links import Link

_IPV4 = "0000:0000:0000:0000:0000:ffff:"  # the start of a GID with an IPv4 address
_LINK_LOCAL = "RoCE v2 link-local"  # each interface has this kind
FULL_MEMBER = 0x8000  # bit 15 of a P_Key (InfiniBand specification, 10.9.1)


class IpoibPort(msgspec.Struct, frozen=True, kw_only=True):
    """The port that an IPoIB interface is on. A property is read from sysfs at each use."""

    hca: str
    number: int
    directory: str

    @property
    def state(self) -> str:
        return attribute_files.text(f"{self.directory}/state").partition(": ")[2]

    @property
    def physical_state(self) -> str:
        return attribute_files.text(f"{self.directory}/phys_state").partition(": ")[2]

    @property
    def sm_lid(self) -> int:
        return attribute_files.number(f"{self.directory}/sm_lid") or 0

    @property
    def pkeys(self) -> Iterator[int]:
        """Yields the P_Keys of the port's table.

        Each is read when it is needed, because a table may have 128 slots.
        """
        table = f"{self.directory}/pkeys"
        for slot in sorted(int(name) for name in attribute_files.names(table) if name.isdecimal()):
            if pkey := attribute_files.number(f"{table}/{slot}"):  # an empty slot has 0x0000
                yield pkey

    def has_pkey(self, pkey: int) -> bool:
        """Whether the port is a full or limited member of the partition."""
        return any(pkey & 0x7FFF == own & 0x7FFF for own in self.pkeys)


def port_of(paths: Paths, link: "Link") -> IpoibPort | None:
    """The port of an IPoIB interface on the host; `None` if sysfs does not show the port.

    The interface's address ends in the port's GUID. Only PCI functions have `device/infiniband`.
    """
    guid = link.mac.replace(":", "")[-16:]
    below_netdev = f"{paths.sysfs}/class/net/{link.name}/device/infiniband"
    for directory in (below_netdev, f"{paths.sysfs}/class/infiniband"):
        for hca in sorted(attribute_files.names(directory)):
            ports = f"{directory}/{hca}/ports"
            for number in sorted(attribute_files.names(ports)):
                if attribute_files.text(f"{ports}/{number}/gids/0").replace(":", "")[-16:] == guid:
                    return IpoibPort(hca=hca, number=int(number), directory=f"{ports}/{number}")
    return None


def has_pkey(paths: Paths, rdma: str, port: int, pkey: int) -> bool | None:
    """Whether the port's table has the P_Key, with either membership.

    Returns `None` if no file of the table has the P_Key and a file cannot be read.
    """
    table = f"{_port(paths, rdma, port)}/pkeys"
    slots = [name for name in attribute_files.names(table) if name.isdecimal()]
    certain = bool(slots)
    for slot in sorted(slots, key=int):
        own = attribute_files.number(f"{table}/{slot}")
        if own is None:
            certain = False
        elif own & ~FULL_MEMBER == pkey & ~FULL_MEMBER:
            return True
    return False if certain else None


def pkey_slot(paths: Paths, rdma: str, port: int, pkey: int) -> tuple[int, int] | None:
    """The index and the value of a P_Key in the port's table, with either membership."""
    table = f"{_port(paths, rdma, port)}/pkeys"
    for slot in sorted(int(name) for name in attribute_files.names(table) if name.isdecimal()):
        own = attribute_files.number(f"{table}/{slot}")
        if own and own & ~FULL_MEMBER == pkey & ~FULL_MEMBER:
            return slot, own
    return None


def subnet(paths: Paths, rdma: str, port: int) -> str:
    """The subnet prefix of an InfiniBand port, "fe80:0000:0000:0000"; "" if unknown."""
    return attribute_files.text(f"{_port(paths, rdma, port)}/gids/0")[:-20]


def kinds_of_gids(paths: Paths, rdma: str, port: int) -> tuple[str, ...]:
    """The kinds of a RoCE port's GIDs of version 2: IPv4 and IPv6, or else link-local.

    Reads an entry only if the entry has an interface, because most entries are empty.
    """
    kinds, at = set(), _port(paths, rdma, port)
    for index in attribute_files.names(f"{at}/gid_attrs/ndevs"):
        if attribute_files.text(f"{at}/gid_attrs/ndevs/{index}"):
            gid = attribute_files.text(f"{at}/gids/{index}")
            kind = attribute_files.text(f"{at}/gid_attrs/types/{index}")
            if kind == "RoCE v2" and gid:
                of = "IPv4" if gid.startswith(_IPV4) else "IPv6"
                kinds.add(f"{kind} {'link-local' if gid.startswith('fe80:') else of}")
    return tuple(sorted(kinds - {_LINK_LOCAL} or kinds))


def _port(paths: Paths, rdma: str, port: int) -> str:
    return f"{paths.sys}/class/infiniband/{rdma}/ports/{port}"


def node_guid(paths: Paths, hca: str) -> str:
    """The node GUID of an HCA, "00:11:22:33:44:55:66:77"; "" if unknown."""
    guid = attribute_files.text(f"{paths.sysfs}/class/infiniband/{hca}/node_guid")
    return bytes.fromhex(guid.replace(":", "")).hex(":")


def bdf_of(paths: Paths, name: str) -> str:
    """The address of a host netdev's PCI function; "" if there is none."""
    address = attribute_files.target(f"{paths.sysfs}/class/net/{name}/device")
    return address if re.fullmatch(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", address) else ""
