"""Finds the HCAs of this node, which device plugin pools can offer, from sysfs.

An HCA is a PCI network function (PF or VF), an auxiliary device (SF), or a software RDMA device,
with its netdevs, RDMA devices, ports and character devices. Its id stays the same over reboots
and driver reloads, so it is the PCI address and not `mlx5_N`.

Interfaces and RDMA devices are visible only in their own network namespace, uverbs devices in all
of them. `HCA.rdma_names` has both, so it also names RDMA devices that are in pods.
"""

import msgspec

from base.paths import Paths
from host.sysfs import pci
from host.sysfs.tree import CharacterDevice as CharacterDevice
from host.sysfs.tree import Netdev, SysfsSnapshot, node_at


class Port(msgspec.Struct, frozen=True, kw_only=True):
    """A port of an RDMA device. States are sysfs's: "ACTIVE", "DOWN"; "LinkUp", "Polling"."""

    number: int
    link_layer: str  # "InfiniBand" or "Ethernet"
    state: str
    physical_state: str
    rate: str  # "400 Gb/sec (4X NDR)"
    guid: str  # "0011:2233:4455:6677"; "" if the port has none
    pkeys: tuple[int, ...]  # without the empty slots of the table
    netdevs: tuple[str, ...]  # the host's interfaces on this port, sorted; no IPoIB children
    umad: CharacterDevice | None
    issm: CharacterDevice | None


class RdmaDevice(msgspec.Struct, frozen=True, kw_only=True):
    """An RDMA device (struct ib_device) in sysfs. smi* devices carry no data and are omitted."""

    name: str  # "mlx5_0"; depends on probe order, so another device may have it after a reboot
    uverbs: CharacterDevice | None
    ports: tuple[Port, ...]


class HCA(msgspec.Struct, frozen=True, kw_only=True):
    """A device that a pool can offer."""

    id: str  # the address; for software devices, which have none, the RDMA device's name
    address: str = ""  # "0000:3b:00.0", "mlx5_core.sf.4"; "" for a software device
    vendor: str = ""  # "15b3", as in sysfs without 0x; an SF has its PF's; "" if unknown
    device: str = ""  # "101e"
    driver: str = ""
    pf: str = ""  # address of the PF if this is a VF or an SF, else ""
    pf_netdevs: tuple[str, ...] = ()  # names of the PF's own interfaces, if this is a VF or an SF
    index: int | None = None  # number of a VF at its PF, or the sfnum of an SF
    aux_type: str = ""  # "sf" for mlx5_core.sf.4; "" if this is not an auxiliary device
    numa: int | None = None  # None if the kernel does not know (-1)
    acpi_index: str = ""
    netdevs: tuple[str, ...] = ()  # visible in this network namespace, sorted
    link_types: tuple[str, ...] = ()  # their types: "ether", "infiniband"
    rdma: tuple[RdmaDevice, ...] = ()  # visible in this network namespace, sorted
    rdma_names: tuple[str, ...] = ()  # of its RDMA devices in any network namespace, sorted
    iommu_group: str = ""  # "37" if a userspace driver such as vfio-pci is bound; else ""
    software: bool = False  # Soft-RoCE or siw: software on a netdev
    num_vfs: int = 0  # how many VFs it has now

    @property
    def working(self) -> bool:
        """Whether one of its ports can carry traffic now."""
        return any(port.state == "ACTIVE" for rdma in self.rdma for port in rdma.ports)


def unknown(name: str) -> HCA:
    """An HCA of which nothing is known but its id: one that is not in sysfs, or not any more."""
    return HCA(id=name, address=pci.canonical(name) or "")


class HCAsByName:
    """The HCAs of the node at one moment, each read when it is asked for."""

    def __init__(self, paths: Paths) -> None:
        self._snapshot = SysfsSnapshot(paths)
        self._read: dict[str, HCA | None] = {}

    def get(self, name: str) -> HCA | None:
        """The HCA with an id; None if there is none."""
        if name not in self._read:
            self._read[name] = self._hca(name)
        return self._read[name]

    def _hca(self, name: str) -> HCA | None:
        snapshot = self._snapshot
        directory = snapshot.functions.get(name) or snapshot.sfs.get(name)
        if directory is not None:
            return _on_a_device(snapshot, name, directory)
        if name in snapshot.rdma_names:
            return _without_address(snapshot, name)
        return None


def hcas(paths: Paths) -> list[HCA]:
    """Every HCA of the node, sorted by id.

    These are PCI functions of class 02 (network) or with an RDMA device, mlx5's SFs, and RDMA
    devices on neither, such as software and other buses. An HCA that cannot be read does not
    hide the others. One that vanishes meanwhile is left out.
    """
    snapshot = SysfsSnapshot(paths)
    with_rdma = snapshot.rdma_names.keys()
    hcas = []
    for address, directory in (snapshot.functions | snapshot.sfs).items():
        network = snapshot.text(f"devices/{directory}/class").startswith("0x02")
        if network or address in with_rdma or address in snapshot.sfs:
            hca = _on_a_device(snapshot, address, directory)
            # If the device has gone by now, `hca` may be incomplete.
            if (paths.sys / "devices" / directory).exists():
                hcas.append(hca)
    others = with_rdma - snapshot.functions.keys() - snapshot.sfs.keys()
    hcas += [_without_address(snapshot, name) for name in others]
    return sorted(hcas, key=lambda hca: hca.id)


def rdma_cm(paths: Paths) -> CharacterDevice | None:
    """The node of the RDMA connection manager; None if the module rdma_ucm is not loaded."""
    return node_at(f"{paths.sys}/class/misc/rdma_cm")


def _on_a_device(snapshot: SysfsSnapshot, address: str, directory: str) -> HCA:
    device = f"devices/{directory}"
    is_sf = address in snapshot.sfs
    if is_sf:
        pf = snapshot.addresses.get(directory.rpartition("/")[0], "")
        index = snapshot.number(f"{device}/sfnum")
    else:
        pf = snapshot.target(f"{device}/physfn")
        index = snapshot.indexes_of_vfs(pf).get(address) if pf else None
    pf_directory = snapshot.functions.get(pf, "")
    pci_device = f"devices/{pf_directory}" if is_sf else device
    driver = snapshot.target(f"{device}/driver")
    netdevs = snapshot.own(directory)
    return HCA(
        id=address,
        address=address,
        vendor=snapshot.text(f"{pci_device}/vendor").removeprefix("0x"),
        device=snapshot.text(f"{pci_device}/device").removeprefix("0x"),
        driver=driver,
        pf=pf,
        pf_netdevs=tuple(netdev.name for netdev in snapshot.own(pf_directory)),
        index=index,
        aux_type="sf" if is_sf else "",
        numa=snapshot.numa_node(device, f"devices/{pf_directory}"),
        acpi_index=snapshot.text(f"{device}/acpi_index"),
        netdevs=tuple(netdev.name for netdev in netdevs),
        link_types=_link_types(netdevs),
        rdma=_devices(snapshot, address, netdevs),
        rdma_names=tuple(sorted(snapshot.rdma_names.get(address, ()))),
        iommu_group=snapshot.target(f"{device}/iommu_group") if pci.for_userspace(driver) else "",
        num_vfs=snapshot.number(f"{device}/sriov_numvfs") or 0,
    )


def _without_address(snapshot: SysfsSnapshot, name: str) -> HCA:
    """The HCA for an RDMA device that is on no PCI function: software, or on another bus."""
    software = name in snapshot.software
    rdma = _devices(snapshot, name, [] if software else snapshot.own(snapshot.above.get(name, "")))
    names = {netdev for device in rdma for port in device.ports for netdev in port.netdevs}
    # Only rdma_rxe has `parent`; its GID table is empty while the interface is down.
    if (parent := snapshot.text(f"class/infiniband/{name}/parent")) in snapshot.visible:
        names.add(parent)
    netdevs = [snapshot.netdev(netdev) for netdev in sorted(names)]
    return HCA(
        id=name,
        driver=snapshot.target(f"class/infiniband/{name}/device/driver"),
        numa=snapshot.numa_node(f"class/infiniband/{name}/device"),
        netdevs=tuple(netdev.name for netdev in netdevs),
        link_types=_link_types(netdevs),
        rdma=rdma,
        rdma_names=tuple(sorted(snapshot.rdma_names.get(name, ()))),
        software=software,
    )


def _devices(snapshot: SysfsSnapshot, home: str, netdevs: list[Netdev]) -> tuple[RdmaDevice, ...]:
    return tuple(
        RdmaDevice(
            name=name,
            uverbs=snapshot.uverbs.get(name),
            ports=tuple(
                _port(snapshot, name, number, netdevs)
                for number in snapshot.indexes(f"class/infiniband/{name}/ports")
            ),
        )
        for name in sorted(snapshot.rdma.get(home, ()))
    )


def _port(snapshot: SysfsSnapshot, rdma: str, number: int, own: list[Netdev]) -> Port:
    at = f"class/infiniband/{rdma}/ports/{number}"
    guid = snapshot.text(f"{at}/gids/0")[-19:]
    link_layer = snapshot.text(f"{at}/link_layer")
    pkeys = (snapshot.number(f"{at}/pkeys/{index}") for index in snapshot.indexes(f"{at}/pkeys"))
    return Port(
        number=number,
        link_layer=link_layer,
        state=snapshot.text(f"{at}/state").partition(": ")[2],
        physical_state=snapshot.text(f"{at}/phys_state").partition(": ")[2],
        rate=snapshot.text(f"{at}/rate"),
        guid=guid if guid.strip("0:") else "",
        pkeys=tuple(pkey for pkey in pkeys if pkey),
        netdevs=(
            _with_guid(snapshot, guid, own)
            if link_layer == "InfiniBand"
            else _in_gid_table(snapshot, f"{at}/gid_attrs/ndevs", number, own)
        ),
        umad=snapshot.mad.get((rdma, str(number), "umad")),
        issm=snapshot.mad.get((rdma, str(number), "issm")),
    )


def _with_guid(snapshot: SysfsSnapshot, guid: str, own: list[Netdev]) -> tuple[str, ...]:
    """The IPoIB interfaces on a port: their addresses end in the port's GUID, not the node's."""
    digits = guid.replace(":", "")
    if not digits.strip("0"):
        return ()
    # The interfaces of an HCA that is not a PCI function may be on another device, or on none.
    netdevs = own or [snapshot.netdev(name) for name in sorted(snapshot.visible)]
    return tuple(netdev.name for netdev in netdevs if netdev.guid == digits and not netdev.foreign)


def _in_gid_table(
    snapshot: SysfsSnapshot, ndevs: str, number: int, own: list[Netdev]
) -> tuple[str, ...]:
    """The interfaces in a RoCE port's GID table; if it is empty, those with the port's number.

    The table also has VLANs and bonds on the port. They count only if no interface of the device
    itself is in the table.
    """
    named = {snapshot.text(f"{ndevs}/{index}") for index in snapshot.indexes(ndevs)}
    if direct := [netdev.name for netdev in own if netdev.name in named]:
        return tuple(direct)
    if others := sorted(named & snapshot.visible):
        return tuple(others)
    by_number = (netdev for netdev in own if netdev.dev_port == number - 1)
    return tuple(netdev.name for netdev in by_number if netdev.link_type == "ether")


def _link_types(netdevs: list[Netdev]) -> tuple[str, ...]:
    return tuple(sorted({netdev.link_type for netdev in netdevs if netdev.link_type}))
