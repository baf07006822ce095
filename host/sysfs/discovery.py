"""Finds the HCAs of this node in sysfs, for the device plugin's pools and for policies.

An HCA is a PCI network function (PF or VF), an auxiliary device (SF), or a software RDMA device. An
HCA with an address has the address as its id, because a reboot may change the name `mlx5_N`.

Interfaces and RDMA devices are visible only in their own network namespace. uverbs devices are
visible everywhere, so `HCA.rdma_names` also has RDMA devices that are in pods.

Every entry of a bus or class directory is a link into /sys/devices. The directories above the
link's target are the parent devices. Sources: Documentation/ABI (sysfs-class-infiniband,
sysfs-class-net, sysfs-bus-pci), drivers/infiniband.
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
    """The name and the numbers that sysfs has for a character device."""

    name: str  # "uverbs0"; its node is /dev/infiniband/uverbs0
    major: int
    minor: int


class Port(msgspec.Struct, frozen=True, kw_only=True):
    """A port of an RDMA device."""

    number: int
    link_layer: str  # "InfiniBand" or "Ethernet"
    state: str  # "ACTIVE", "DOWN"
    physical_state: str  # "LinkUp", "Polling"
    rate: str  # "400 Gb/sec (4X NDR)"
    guid: str  # "0011:2233:4455:6677"; "" if the port has none
    pkeys: tuple[int, ...]  # without the empty slots of the table
    netdevs: tuple[str, ...]  # the host's interfaces on this port, sorted; no IPoIB children
    umad: CharacterDevice | None
    issm: CharacterDevice | None


class RdmaDevice(msgspec.Struct, frozen=True, kw_only=True):
    """An RDMA device (struct ib_device) in sysfs. smi* devices carry no data and are omitted."""

    name: str  # "mlx5_0"; another device may have this name after a reboot (probe order)
    uverbs: CharacterDevice | None
    ports: tuple[Port, ...]


class HCA(msgspec.Struct, frozen=True, kw_only=True):
    """A device that a pool can offer."""

    id: str  # the address; for a software device, which has no address, the RDMA device's name
    address: str = ""  # "0000:3b:00.0", "mlx5_core.sf.4"; "" for a software device
    vendor: str = ""  # "15b3", as in sysfs without 0x; of the PF for an SF; "" if unknown
    device: str = ""  # "101e"
    driver: str = ""
    pf: str = ""  # address of the PF if this is a VF or an SF, else ""
    pf_netdevs: tuple[str, ...] = ()  # names of the PF's own interfaces, if this is a VF or an SF
    pf_rdma_names: tuple[str, ...] = ()  # like `rdma_names`, of the PF
    index: int | None = None  # number of a VF at its PF, or the sfnum of an SF
    aux_type: str = ""  # "sf" for mlx5_core.sf.4; "" if this is not an auxiliary device
    numa: int | None = None  # `None` if unknown (-1 in sysfs)
    acpi_index: str = ""
    netdevs: tuple[str, ...] = ()  # visible in this network namespace, sorted
    link_types: tuple[str, ...] = ()  # their types: "ether", "infiniband"
    rdma: tuple[RdmaDevice, ...] = ()  # visible in this network namespace, sorted
    rdma_names: tuple[str, ...] = ()  # all its RDMA devices, in any network namespace, sorted
    iommu_group: str = ""  # "37" if a userspace driver such as vfio-pci is bound; else ""
    software: bool = False  # Soft-RoCE or siw: software on a netdev
    num_vfs: int = 0

    @property
    def working(self) -> bool:
        """Whether one of its ports can carry traffic now."""
        return any(port.state == "ACTIVE" for rdma in self.rdma for port in rdma.ports)


def unknown(name: str) -> HCA:
    """An HCA that is not in sysfs. Only its id is known."""
    return HCA(id=name, address=pci.canonical(name) or "")


class Netdev(NamedTuple):
    """An interface in this network namespace."""

    name: str
    link_type: str  # "ether", "infiniband", or ""
    guid: str  # the port's GUID of an IPoIB interface, 16 digits
    dev_port: int
    foreign: bool  # not the device's own: an IPoIB child or a representor


class SysfsSnapshot:
    """The bus and class directories at one moment. An attribute is read each time it is used.

    Paths are relative to /sys. Directories are relative to /sys/devices: "pci0000:17/0000:17:01.0".
    """

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
        self.rdma_names: dict[str, set[str]] = {}  # like `rdma`, but in all network namespaces
        self.software: set[str] = set()  # names of software RDMA devices
        self.above: dict[str, str] = {}  # the directory of an RDMA device's parent device
        self.uverbs: dict[str, CharacterDevice] = {}  # by RDMA device
        # By RDMA device, port, "umad" or "issm".
        self.mad: dict[tuple[str, str, str], CharacterDevice] = {}
        self._read_rdma()
        self._read_character_devices()

    def own(self, directory: str) -> list[Netdev]:
        """A device's own interfaces by name, without IPoIB children and representors."""
        netdevs = (self.netdev(name) for name in sorted(self._netdevs.get(directory, ())))
        return [netdev for netdev in netdevs if not netdev.foreign]

    def netdev(self, name: str) -> Netdev:
        netdev = self._by_name.get(name)
        if netdev is None:
            at = f"class/net/{name}"
            link_type = _ARPHRD.get(self.text(f"{at}/type"), "")
            if link_type == "infiniband":
                # Only children created through sysfs have `parent`; all have their parent's iflink.
                index, link = self.text(f"{at}/ifindex"), self.text(f"{at}/iflink")
                foreign = self.text(f"{at}/parent") != "" or index != link
            else:
                foreign = pci.is_representor(self.text(f"{at}/phys_port_name"))
            address = self.text(f"{at}/address").replace(":", "")
            guid = address[-16:] if len(address) == 40 else ""
            dev_port = self.number(f"{at}/dev_port") or 0
            netdev = self._by_name[name] = Netdev(name, link_type, guid, dev_port, foreign)
        return netdev

    def indexes_of_vfs(self, pf: str) -> dict[str, int]:
        """The number of each VF of a PF, by the VF's address."""
        if pf not in self._indexes:
            self._indexes[pf] = {vf: index for index, vf in pci.indexed_vfs(self._paths, pf)}
        return self._indexes[pf]

    def text(self, path: str) -> str:
        return attribute_files.text(f"{self._sys}/{path}", errors="replace")

    def number(self, path: str) -> int | None:
        return attribute_files.number(f"{self._sys}/{path}")

    def numa_node(self, *devices: str) -> int | None:
        return attribute_files.numa_node(*(f"{self._sys}/{device}" for device in devices))

    def names(self, path: str) -> list[str]:
        return attribute_files.names(f"{self._sys}/{path}")

    def indexes(self, path: str) -> list[int]:
        """The decimal names in a directory, as sorted integers."""
        return sorted(int(name) for name in self.names(path) if name.isdecimal())

    def target(self, path: str) -> str:
        return attribute_files.target(f"{self._sys}/{path}")

    def _directories(self, at: str) -> dict[str, str]:
        links = (
            (name, attribute_files.link(f"{self._sys}/{at}/{name}")) for name in self.names(at)
        )
        directories = ((name, link.partition("devices/")[2]) for name, link in links)
        return {name: directory for name, directory in directories if directory}

    def _read_netdevs(self) -> None:
        for name, directory in self._directories("class/net").items():
            device = directory.rpartition("/net/")[0] or "virtual"
            above, _, last = device.rpartition("/")
            if last.startswith("virtio"):  # the netdev is on a device of the virtio bus
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

    def _read_character_devices(self) -> None:
        for name, directory in self._directories("class/infiniband_verbs").items():
            rdma = self.text(f"class/infiniband_verbs/{name}/ibdev")
            if rdma and not _SMI.fullmatch(rdma):
                above = self.above.get(rdma, directory.rpartition("/infiniband_verbs/")[0])
                self.rdma_names.setdefault(self._home(rdma, above), set()).add(rdma)
                if node := node_at(f"{self._sys}/class/infiniband_verbs/{name}"):
                    self.uverbs[rdma] = node
        for name in self.names("class/infiniband_mad"):
            at = f"class/infiniband_mad/{name}"
            if (rdma := self.text(f"{at}/ibdev")) and (node := node_at(f"{self._sys}/{at}")):
                self.mad[rdma, self.text(f"{at}/port"), name.rstrip("0123456789")] = node

    def _home(self, name: str, above: str) -> str:
        """The id of an RDMA device's HCA: the nearest address above the device, else its name."""
        if above == "virtual":
            self.software.add(name)
        while above:
            if (address := self.addresses.get(above)) is not None:
                return address
            above = above.rpartition("/")[0]
        return name


class HCAsByName:
    """The HCAs of the node at one moment. Each HCA is read when it is first used."""

    def __init__(self, paths: Paths) -> None:
        self._snapshot = SysfsSnapshot(paths)
        self._read: dict[str, HCA | None] = {}

    def get(self, name: str) -> HCA | None:
        if name not in self._read:
            snapshot, hca = self._snapshot, None
            if directory := snapshot.functions.get(name) or snapshot.sfs.get(name):
                hca = _on_a_device(snapshot, name, directory)
            elif name in snapshot.rdma_names:
                hca = _without_address(snapshot, name)
            self._read[name] = hca
        return self._read[name]


def hcas(paths: Paths) -> list[HCA]:
    """Every HCA of the node, sorted by id.

    HCAs are network functions (class 02), functions with RDMA devices, mlx5's SFs, and other RDMA
    devices. An HCA that vanishes while it is read is left out.
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
    without_address = with_rdma - snapshot.functions.keys() - snapshot.sfs.keys()
    hcas += [_without_address(snapshot, name) for name in without_address]
    return sorted(hcas, key=lambda hca: hca.id)


def rdma_cm(paths: Paths) -> CharacterDevice | None:
    """The device node of the RDMA connection manager; `None` without the module rdma_ucm."""
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
        pf_rdma_names=tuple(sorted(snapshot.rdma_names.get(pf, ()))),
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
    """The HCA of an RDMA device without a PCI function: software, or a device on another bus."""
    software = name in snapshot.software
    rdma = _devices(snapshot, name, [] if software else snapshot.own(snapshot.above.get(name, "")))
    names = {netdev for device in rdma for port in device.ports for netdev in port.netdevs}
    # Only rdma_rxe has `parent`, and no link to its driver. Its GID table is empty while the
    # interface is down.
    parent = snapshot.text(f"class/infiniband/{name}/parent")
    if parent in snapshot.visible:
        names.add(parent)
    netdevs = [snapshot.netdev(netdev) for netdev in sorted(names)]
    return HCA(
        id=name,
        driver="rdma_rxe" if parent else snapshot.target(f"class/infiniband/{name}/device/driver"),
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
    """The IPoIB interfaces on a port. Their addresses end in the port's GUID, not in the node's."""
    digits = guid.replace(":", "")
    if not digits.strip("0"):
        return ()
    # If an HCA is not a PCI function, its interfaces may be on another device, or on no device.
    netdevs = own or [snapshot.netdev(name) for name in sorted(snapshot.visible)]
    return tuple(netdev.name for netdev in netdevs if netdev.guid == digits and not netdev.foreign)


def _in_gid_table(
    snapshot: SysfsSnapshot, ndevs: str, number: int, own: list[Netdev]
) -> tuple[str, ...]:
    """The interfaces in a RoCE port's GID table, or else the interfaces with the port's number.

    VLANs and bonds in the table count only if the table has no interface of the device.
    """
    named = {snapshot.text(f"{ndevs}/{index}") for index in snapshot.indexes(ndevs)}
    if direct := [netdev.name for netdev in own if netdev.name in named]:
        return tuple(direct)
    if indirect := sorted(named & snapshot.visible):
        return tuple(indirect)
    by_number = (netdev for netdev in own if netdev.dev_port == number - 1)
    return tuple(netdev.name for netdev in by_number if netdev.link_type == "ether")


def _link_types(netdevs: list[Netdev]) -> tuple[str, ...]:
    return tuple(sorted({netdev.link_type for netdev in netdevs if netdev.link_type}))


def node_at(entry: str) -> CharacterDevice | None:
    """The character device of a class entry, or `None`."""
    major, _, minor = attribute_files.text(f"{entry}/dev").partition(":")
    if not (major.isdecimal() and minor.isdecimal()):
        return None
    return CharacterDevice(entry.rpartition("/")[2], int(major), int(minor))
