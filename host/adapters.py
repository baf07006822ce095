"""The adapters of this node: what a pool of the device plugin can offer, as sysfs shows it now.

An adapter is one PCI network function (PF or VF), one auxiliary device (SF), or one software
RDMA device; with its netdevs, RDMA devices, ports and character devices. It is known by what
stays over reboots and driver reloads: the PCI address, not `mlx5_N`.
"""

import msgspec

from host.paths import Paths


class Node(msgspec.Struct, frozen=True):
    """A character device of the kernel: its name, and the numbers sysfs gives it."""

    name: str  # "uverbs0"; its node is /dev/infiniband/uverbs0
    major: int
    minor: int


class Port(msgspec.Struct, frozen=True, kw_only=True):
    """A port of an RDMA device. States are sysfs' words: "ACTIVE", "DOWN"; "LinkUp", "Polling"."""

    number: int
    link_layer: str  # "InfiniBand" or "Ethernet"
    state: str
    physical_state: str
    rate: str  # "400 Gb/sec (4X NDR)"
    lid: int
    sm_lid: int
    guid: str  # "0011:2233:4455:6677"; "" if there is none
    pkeys: tuple[int, ...]  # without the empty slots of the table
    netdevs: tuple[str, ...]  # the host's interfaces on this port, sorted; IPoIB children are none
    umad: Node | None
    issm: Node | None


class RdmaDevice(msgspec.Struct, frozen=True, kw_only=True):
    """An RDMA device (struct ib_device). Siblings that carry no data (smi*) are left out."""

    name: str  # "mlx5_0": by probe order, so it may be another's after a reboot
    node_guid: str
    uverbs: Node | None
    ports: tuple[Port, ...]


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """What can be offered as one device."""

    id: str  # the address; of software devices, which have none, the RDMA device's name
    address: str  # "0000:3b:00.0", "mlx5_core.sf.4", or "" of a software device
    vendor: str  # "15b3", as sysfs has it without 0x; an SF's are its PF's; "" if unknown
    device: str  # "101e"
    driver: str
    pf: str  # address of the PF if this is a VF or an SF, else ""
    pf_netdevs: tuple[str, ...]  # names of the PF's own interfaces, if this is a VF or an SF
    index: int | None  # of a VF at its PF, or of an SF (its sfnum)
    aux_type: str  # "sf" of mlx5_core.sf.4, "" if it is no auxiliary device
    numa: int | None  # None where the kernel does not know (-1)
    acpi_index: str
    netdevs: tuple[str, ...]  # visible in this network namespace, sorted
    link_types: tuple[str, ...]  # "ether", "infiniband", of those
    rdma: tuple[RdmaDevice, ...]  # visible in this network namespace, sorted
    verbs: tuple[str, ...]  # names of its RDMA devices in whatever network namespace
    iommu_group: str  # "37", of a function bound for a program's own driver; else ""
    software: bool  # Soft-RoCE, siw: a program on a netdev
    num_vfs: int  # how many VFs it has now

    @property
    def working(self) -> bool:
        """Some port of it can carry traffic now."""
        return any(port.state == "ACTIVE" for rdma in self.rdma for port in rdma.ports)


def adapters(paths: Paths) -> list[Adapter]:
    """Every adapter of the node, sorted by id. One that cannot be read hides no other."""
    raise NotImplementedError
