"""The HCAs of this node: what a pool of the device plugin can offer, as sysfs shows it now.

An HCA is one PCI network function (PF or VF), one auxiliary device (SF), or one software
RDMA device; with its netdevs, RDMA devices, ports and character devices. It is known by what
stays over reboots and driver reloads: the PCI address, not `mlx5_N`.

Interfaces and RDMA devices are seen only in the network namespace that they are in, but uverbs
devices in every one: by those an HCA that is in a pod is still told, by its `rdma_names`.
"""

import os
import re
import stat

import msgspec

from base.paths import Paths
from host import pci
from host.errors import HostError
from host.sysfs_snapshot import CharacterDevice as CharacterDevice
from host.sysfs_snapshot import Netdev, SysfsSnapshot, node_at

_VIRTFN = re.compile(r"virtfn([0-9]+)")


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
    umad: CharacterDevice | None
    issm: CharacterDevice | None


class RdmaDevice(msgspec.Struct, frozen=True, kw_only=True):
    """An RDMA device (struct ib_device). Siblings that carry no data (smi*) are left out."""

    name: str  # "mlx5_0": by probe order, so it may be another's after a reboot
    node_guid: str
    uverbs: CharacterDevice | None
    ports: tuple[Port, ...]


class HCA(msgspec.Struct, frozen=True, kw_only=True):
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
    rdma_names: tuple[str, ...]  # names of its RDMA devices in whatever network namespace
    iommu_group: str  # "37", of a function bound for a program's own driver; else ""
    software: bool  # Soft-RoCE, siw: a program on a netdev
    num_vfs: int  # how many VFs it has now

    @property
    def working(self) -> bool:
        """Some port of it can carry traffic now."""
        return any(port.state == "ACTIVE" for rdma in self.rdma for port in rdma.ports)


def hcas(paths: Paths) -> list[HCA]:
    """Every HCA of the node, sorted by id. One that cannot be read hides no other.

    PCI functions of class 02 (network) or with an RDMA device, mlx5's SFs, and RDMA devices
    that are on neither: software, and those of other buses. What vanishes meanwhile is left out.
    """
    sysfs = SysfsSnapshot(paths)
    with_rdma = sysfs.rdma.keys() | sysfs.rdma_names.keys()
    indexes = _Indexes(sysfs)
    found = []
    for address, directory in (sysfs.functions | sysfs.sfs).items():
        network = sysfs.text(f"devices/{directory}/class").startswith("0x02")
        if network or address in with_rdma or address in sysfs.sfs:
            hca = _on_a_device(sysfs, indexes, address, directory)
            # Without the device by now, it may have been read by half.
            if (paths.sys / "devices" / directory).exists():
                found.append(hca)
    others = with_rdma - sysfs.functions.keys() - sysfs.sfs.keys()
    return sorted([*found, *(_alone(sysfs, name) for name in others)], key=lambda one: one.id)


def verify(paths: Paths, node: CharacterDevice) -> str:
    """The path of a device node, if it is the device that sysfs says. Raises HostError."""
    path = f"{paths.dev}/infiniband/{node.name}"
    numbers = f"{node.major}:{node.minor}"
    try:
        found = os.stat(path)  # noqa: PTH116 - a Path costs more than the look
    except OSError as error:
        raise HostError(
            f"device node {path} cannot be used: {error.strerror}; sysfs says it is {numbers}: "
            "is udev running, and is this the host's /dev?"
        ) from None
    if not stat.S_ISCHR(found.st_mode):
        kind = "a directory" if stat.S_ISDIR(found.st_mode) else "no character device"
        raise HostError(
            f"device node {path} is {kind}, sysfs says {numbers}: remove it and run "
            "`udevadm trigger`"
        )
    actual = f"{os.major(found.st_rdev)}:{os.minor(found.st_rdev)}"
    if actual != numbers:
        raise HostError(
            f"device node {path} is {actual}, sysfs says {numbers}: the driver was loaded anew and "
            "the node is an older one's: is udev running?"
        )
    return path


def rdma_cm(paths: Paths) -> CharacterDevice | None:
    """The node of the RDMA connection manager; None if the module rdma_ucm is not loaded."""
    return node_at(paths, "class/misc/rdma_cm")


class _Indexes:
    """Which VF of its PF a function is; each PF's directory is read once."""

    def __init__(self, sysfs: SysfsSnapshot) -> None:
        self._sysfs = sysfs
        self._of_pf: dict[str, dict[str, int]] = {}

    def of(self, pf: str, vf: str) -> int | None:
        if pf not in self._of_pf:
            above = f"bus/pci/devices/{pf}"
            links = (_VIRTFN.fullmatch(name) for name in self._sysfs.names(above))
            self._of_pf[pf] = {
                self._sysfs.target(f"{above}/{link[0]}"): int(link[1]) for link in links if link
            }
        return self._of_pf[pf].get(vf)


def _on_a_device(sysfs: SysfsSnapshot, indexes: _Indexes, address: str, directory: str) -> HCA:
    device = f"devices/{directory}"
    is_sf = address in sysfs.sfs
    if is_sf:
        pf = sysfs.addresses.get(directory.rpartition("/")[0], "")
        index = sysfs.number(f"{device}/sfnum")
    else:
        pf = sysfs.target(f"{device}/physfn")
        index = indexes.of(pf, address) if pf else None
    pf_directory = sysfs.functions.get(pf, "")
    pci_device = f"devices/{pf_directory}" if is_sf else device
    driver = sysfs.target(f"{device}/driver")
    netdevs = sysfs.own(directory)
    return HCA(
        id=address,
        address=address,
        vendor=sysfs.text(f"{pci_device}/vendor").removeprefix("0x"),
        device=sysfs.text(f"{pci_device}/device").removeprefix("0x"),
        driver=driver,
        pf=pf,
        pf_netdevs=tuple(one.name for one in sysfs.own(pf_directory)),
        index=index,
        aux_type="sf" if is_sf else "",
        numa=_numa(sysfs, device, f"devices/{pf_directory}"),
        acpi_index=sysfs.text(f"{device}/acpi_index"),
        netdevs=tuple(one.name for one in netdevs),
        link_types=_link_types(netdevs),
        rdma=_devices(sysfs, address, netdevs),
        rdma_names=tuple(sorted(sysfs.rdma_names.get(address, ()))),
        iommu_group=sysfs.target(f"{device}/iommu_group") if pci.for_userspace(driver) else "",
        software=False,
        num_vfs=sysfs.number(f"{device}/sriov_numvfs") or 0,
    )


def _alone(sysfs: SysfsSnapshot, name: str) -> HCA:
    """An RDMA device on no PCI function: by a program on a netdev, or on another bus."""
    software = name in sysfs.software
    rdma = _devices(sysfs, name, [] if software else sysfs.own(sysfs.above.get(name, "")))
    names = {netdev for one in rdma for port in one.ports for netdev in port.netdevs}
    # rdma_rxe's; its GID table is empty while the interface is down.
    if (parent := sysfs.text(f"class/infiniband/{name}/parent")) in sysfs.visible:
        names.add(parent)
    netdevs = [sysfs.netdev(one) for one in sorted(names)]
    return HCA(
        id=name,
        address="",
        vendor="",
        device="",
        driver=sysfs.target(f"class/infiniband/{name}/device/driver"),
        pf="",
        pf_netdevs=(),
        index=None,
        aux_type="",
        numa=_numa(sysfs, f"class/infiniband/{name}/device"),
        acpi_index="",
        netdevs=tuple(one.name for one in netdevs),
        link_types=_link_types(netdevs),
        rdma=rdma,
        rdma_names=tuple(sorted(sysfs.rdma_names.get(name, ()))),
        iommu_group="",
        software=software,
        num_vfs=0,
    )


def _devices(sysfs: SysfsSnapshot, home: str, netdevs: list[Netdev]) -> tuple[RdmaDevice, ...]:
    return tuple(
        RdmaDevice(
            name=name,
            node_guid=sysfs.text(f"class/infiniband/{name}/node_guid"),
            uverbs=sysfs.uverbs.get(name),
            ports=tuple(
                _port(sysfs, name, number, netdevs)
                for number in sysfs.indexes(f"class/infiniband/{name}/ports")
            ),
        )
        for name in sorted(sysfs.rdma.get(home, ()))
    )


def _port(sysfs: SysfsSnapshot, rdma: str, number: int, own: list[Netdev]) -> Port:
    at = f"class/infiniband/{rdma}/ports/{number}"
    guid = sysfs.text(f"{at}/gids/0")[-19:]
    link_layer = sysfs.text(f"{at}/link_layer")
    pkeys = (sysfs.number(f"{at}/pkeys/{index}") for index in sysfs.indexes(f"{at}/pkeys"))
    return Port(
        number=number,
        link_layer=link_layer,
        state=sysfs.text(f"{at}/state").partition(": ")[2],
        physical_state=sysfs.text(f"{at}/phys_state").partition(": ")[2],
        rate=sysfs.text(f"{at}/rate"),
        lid=sysfs.number(f"{at}/lid") or 0,
        sm_lid=sysfs.number(f"{at}/sm_lid") or 0,
        guid=guid if guid.strip("0:") else "",
        pkeys=tuple(pkey for pkey in pkeys if pkey),
        netdevs=(
            _with_guid(sysfs, guid, own)
            if link_layer == "InfiniBand"
            else _in_gid_table(sysfs, f"{at}/gid_attrs/ndevs", number, own)
        ),
        umad=sysfs.mad.get((rdma, str(number), "umad")),
        issm=sysfs.mad.get((rdma, str(number), "issm")),
    )


def _with_guid(sysfs: SysfsSnapshot, guid: str, own: list[Netdev]) -> tuple[str, ...]:
    """IPoIB's interfaces on a port: its address ends in the port's GUID, never the node's."""
    digits = guid.replace(":", "")
    if not digits.strip("0"):
        return ()
    # An HCA that is no PCI function may have its interfaces on another device, or on none.
    some = own or [sysfs.netdev(name) for name in sorted(sysfs.visible)]
    found = [one for one in some if one.guid == digits and not one.foreign]
    return tuple(one.name for one in found)


def _in_gid_table(
    sysfs: SysfsSnapshot, ndevs: str, number: int, own: list[Netdev]
) -> tuple[str, ...]:
    """The interfaces that a RoCE port's GIDs name; while there are none, by the port's number.

    A VLAN or bond on the port is in the table, too, but counts only where nothing below it does.
    """
    named = {sysfs.text(f"{ndevs}/{index}") for index in sysfs.indexes(ndevs)}
    if direct := [one.name for one in own if one.name in named]:
        return tuple(direct)
    if others := sorted(named & sysfs.visible):
        return tuple(others)
    by_number = (one for one in own if one.dev_port == number - 1)
    return tuple(one.name for one in by_number if one.link_type == "ether")


def _link_types(netdevs: list[Netdev]) -> tuple[str, ...]:
    return tuple(sorted({one.link_type for one in netdevs if one.link_type}))


def _numa(sysfs: SysfsSnapshot, *devices: str) -> int | None:
    """The NUMA node of the first of these devices that has one: -1 is the kernel's "unknown"."""
    found = (sysfs.number(f"{device}/numa_node") for device in devices)
    return next((numa for numa in found if numa is not None and numa >= 0), None)
