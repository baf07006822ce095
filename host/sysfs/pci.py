"""Reads PCI functions and auxiliary devices from sysfs (PF, VF, driver, netdevs). Binds drivers.

A device's directory `net/` lists only the interfaces in the network namespace of the sysfs mount.
In the RDMA subsystem's exclusive mode, `infiniband/` lists only the RDMA devices in the same
namespace. The driver, `physfn` and `virtfn*` are visible in every namespace. A device that vanishes
while it is read counts as absent.

Sources: Documentation/ABI/testing/sysfs-bus-pci, sysfs-class-net, stable/sysfs-class-infiniband,
drivers/base/bus.c.
"""

import errno
import os
import re
from functools import lru_cache
from pathlib import Path

import msgspec

from base.paths import Paths
from base.types import Bdf
from host.errors import HostError, explained
from host.sysfs import attribute_files

_UIO = frozenset(("uio_pci_generic", "igb_uio"))

_BDF = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}:[01][0-9a-f]\.[0-7])", re.IGNORECASE)
_AUXILIARY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*\.[A-Za-z0-9_-]+\.[0-9]+")  # module.name.id
_last_index: dict[str, int] = {}  # the last number by a VF's address; verified before each use
_NAME_MAX = 256  # bytes of a file's name with its final zero
_VIRTFN = re.compile(r"virtfn([0-9]+)")

# phys_port_name in switchdev mode (devlink, net/devlink/port.c): "p0", and "p0s1" for a split
# port, are uplinks; "pf0vf3", "pf0sf88", "c1pf0vf3" are representors of a function.
_UPLINK = re.compile(r"(p[0-9]+(s[0-9]+)?)?")
_REPRESENTOR = re.compile(r"(c[0-9]+)?pf[0-9]+.*")


class Function(msgspec.Struct, frozen=True, kw_only=True):
    """A PCI function, or an auxiliary device (a scalable function), in sysfs.

    A VF whose interface is in a pod has no `netdevs`. The `netdevs` of a PF include representors.
    """

    address: str  # "0000:af:06.0", or "mlx5_core.sf.6"
    driver: str  # "" if no driver is bound
    pf: str  # address of the PF if this is a VF, else ""
    index: int | None  # number of the VF at its PF
    netdevs: tuple[str, ...]  # sorted
    rdma: tuple[str, ...]  # names of hardware RDMA devices and of Soft-RoCE on a netdev, sorted
    above: str = ""  # address of the PCI function that an auxiliary device is on

    @property
    def is_vf(self) -> bool:
        """Whether this is a VF with a visible PF. In a virtual machine the PF is not visible."""
        return self.pf != ""

    @property
    def userspace(self) -> bool:
        """Whether the driver is for DPDK or virtual machines and so makes no netdev."""
        return for_userspace(self.driver)


def for_userspace(driver: str) -> bool:
    """Whether the driver is for userspace programs: UIO, vfio-pci or a vendor's variant of it."""
    return driver in _UIO or driver.replace("-", "_").endswith("vfio_pci")


def is_representor(phys_port_name: str) -> bool:
    """Whether a netdev with this port name is a switchdev representor of a function."""
    return _REPRESENTOR.fullmatch(phys_port_name) is not None


def canonical(text: str) -> Bdf | None:
    """The address as sysfs spells it: "AF:06.0" becomes "0000:af:06.0". `None` if invalid."""
    return _canonical(text) if len(text) < _NAME_MAX else None


@lru_cache(8192)  # one ADD converts every id that the node's device plugins offer
def _canonical(text: str) -> Bdf | None:
    if bdf := _BDF.fullmatch(text):
        return Bdf(f"{int(bdf[1] or '0', 16):04x}:{bdf[2].lower()}")
    return Bdf(text) if _AUXILIARY.fullmatch(text) else None


def find(paths: Paths, address: str) -> Function | None:
    """The device with that address, in any spelling; `None` if it does not exist."""
    bdf = canonical(address)
    if bdf is None:
        return None
    return _read(paths, bdf, *place_of_vf(paths, bdf), None)


def is_present(paths: Paths, address: str) -> bool:
    """Whether the device with that canonical address exists."""
    return attribute_files.exists(_device(paths, address))


def driver_of(paths: Paths, address: str) -> str:
    """The driver of the device with that canonical address, or ""."""
    return attribute_files.target(f"{_device(paths, address)}/driver")


def netdevs(paths: Paths, address: str) -> list[str]:
    """The netdevs that the device at this canonical address has in this namespace."""
    return list(_netdevs(_device(paths, address)))


def place_of_vf(paths: Paths, address: str) -> tuple[str, int | None]:
    """The PF and number of the VF with that canonical address; ("", `None`) if it is no VF."""
    device = _device(paths, address)
    pf = attribute_files.target(f"{device}/physfn")
    return pf, _index(paths, pf, address) if pf else None


def vfs(paths: Paths, pf: str) -> list[Function]:
    """The VFs of the PF with that address, in the order of their numbers; [] without VFs."""
    bdf = canonical(pf)
    if bdf is None:
        return []
    soft = _soft_rdma(paths)
    functions = (
        _read(paths, address, bdf, index, soft) for index, address in indexed_vfs(paths, bdf)
    )
    return [function for function in functions if function is not None]


def indexed_vfs(paths: Paths, pf: str) -> list[tuple[int, str]]:
    """The number and address of each VF, in order. `pf` is a canonical address."""
    found = []
    for entry, link in _below(_device(paths, pf)).items():
        if (name := _VIRTFN.fullmatch(entry)) and (address := attribute_files.target(link)):
            found.append((int(name[1]), address))
    return sorted(found)


def vf_count(paths: Paths, pf: str) -> tuple[int, int]:
    """The number of VFs that a device has, and can have (sriov_numvfs, sriov_totalvfs)."""
    bdf = canonical(pf)
    if bdf is None:
        return (0, 0)
    device = _device(paths, bdf)
    existing = attribute_files.number(f"{device}/sriov_numvfs")
    possible = attribute_files.number(f"{device}/sriov_totalvfs")
    return (existing or 0, possible or 0)


def pf_netdev(paths: Paths, pf: str) -> str:
    """The name of the netdev of the PF's first port; "" if this namespace does not have it."""
    bdf = canonical(pf)
    if bdf is None:
        return ""
    uplinks = []
    for name, directory in _netdevs(_device(paths, bdf)).items():
        # EOPNOTSUPP outside switchdev mode
        port = attribute_files.text(f"{directory}/phys_port_name")
        if not is_representor(port):
            # Unknown port names, such as "0" for representors of older mlx5 drivers, come last.
            foreign = _UPLINK.fullmatch(port) is None
            uplinks.append((foreign, attribute_files.number(f"{directory}/dev_port") or 0, name))
    return min(uplinks)[2] if uplinks else ""


def of_netdev(paths: Paths, netdev: str) -> Function | None:
    """The function of a netdev on the host, if any. The function of a representor is the PF."""
    address = _address_under(paths, "net", netdev)
    return find(paths, address) if address else None


def holder_of_rdma(paths: Paths, rdma: str) -> str:
    """The address of an RDMA device's function.

    For Soft-RoCE, the address of the netdev's function. Returns "" if there is none.
    """
    device = _rdma(paths, rdma)
    if _is_virtual(device):
        netdev = _netdev_of_soft(device)
        return _address_under(paths, "net", netdev) if netdev else ""
    return _address_under(paths, "infiniband", rdma)


def rdma_of(paths: Paths, address: str) -> tuple[str, ...]:
    """The names of a function's hardware RDMA devices in any network namespace, sorted."""
    # uverbs devices are visible in every namespace
    entries = _below(f"{_device(paths, canonical(address) or address)}/infiniband_verbs")
    names = {attribute_files.text(f"{entry}/ibdev") for entry in entries.values()}
    return tuple(sorted(names - {""}))


def is_software(paths: Paths, rdma: str) -> bool:
    """Whether an RDMA device is software on a netdev, such as Soft-RoCE."""
    return _is_virtual(_rdma(paths, rdma))


def uverbs_of(paths: Paths, rdma: str) -> str:
    """An RDMA device's character device ("uverbs0"), or "". A bind may change the name."""
    for uverbs, entry in _below(f"{paths.sysfs}/class/infiniband_verbs").items():
        if attribute_files.text(f"{entry}/ibdev") == rdma:
            return uverbs
    return ""


def uverbs_numbers(paths: Paths) -> dict[str, tuple[str, int, int]]:
    """The character device of each RDMA device: {"mlx5_0": ("uverbs0", 231, 192)}."""
    return _uverbs_in(f"{paths.sysfs}/class/infiniband_verbs")


def uverbs_number(paths: Paths, rdma: str) -> tuple[str, int, int] | None:
    """The character device of an RDMA device, as in `uverbs_numbers`, or `None`."""
    # The directory of the device has one entry; the node's directory may have a hundred.
    numbers = _uverbs_in(f"{_rdma(paths, rdma)}/device/infiniband_verbs")
    return numbers.get(rdma) or uverbs_numbers(paths).get(rdma)


def _uverbs_in(directory: str) -> dict[str, tuple[str, int, int]]:
    numbers = {}
    for uverbs, entry in _below(directory).items():
        major, _, minor = attribute_files.text(f"{entry}/dev").partition(":")
        rdma = attribute_files.text(f"{entry}/ibdev")
        if rdma and major.isdecimal() and minor.isdecimal():
            numbers[rdma] = (uverbs, int(major), int(minor))
    return numbers


def unbind(paths: Paths, function: Function) -> None:
    """Unbind the function's driver, if it has one. Raises HostError."""
    if not function.driver:
        return
    driver_directory = _driver_directory(paths, function.address, function.driver)
    try:
        attribute_files.write(f"{driver_directory}/unbind", function.address)
    except OSError as error:
        if driver_of(paths, function.address) == function.driver:
            what = f"cannot unbind {function.address} from driver {function.driver}"
            raise _refused(what, error) from None


def bind(paths: Paths, function: Function, driver: str) -> None:
    """Bind an unbound function to `driver`. Raises HostError.

    A driver that does not match the function's PCI IDs (vfio-pci) needs `driver_override`.
    """
    override = f"{_device(paths, function.address)}/driver_override"
    driver_directory = _driver_directory(paths, function.address, driver)
    what = f"cannot bind {function.address} to driver {driver}"
    if not attribute_files.exists(driver_directory):
        raise HostError(f"{what}: the kernel has no such driver: load the driver's kernel module")
    try:
        if attribute_files.text(override) not in ("", "(null)", driver):
            attribute_files.write(override, "\n")  # else the kernel refuses every other driver
        try:
            attribute_files.write(f"{driver_directory}/bind", function.address)
        except OSError as error:
            # ENODEV: the driver's IDs do not match. The auxiliary bus has no override.
            if error.errno != errno.ENODEV or not attribute_files.exists(override):
                raise
            _bind_overriding(override, driver_directory, function.address, driver)
    except OSError as error:
        if driver_of(paths, function.address) != driver:
            raise _refused(what, error) from None


def _bind_overriding(override: str, driver_directory: str, address: str, driver: str) -> None:
    attribute_files.write(override, driver)
    try:
        attribute_files.write(f"{driver_directory}/bind", address)
    except OSError:
        attribute_files.write(override, "\n")
        raise


def _refused(what: str, error: OSError) -> HostError:
    return explained(what, error.errno or errno.EIO)


def _read(
    paths: Paths, address: str, pf: str, index: int | None, soft: dict[str, list[str]] | None
) -> Function | None:
    device = _device(paths, address)
    netdevs = tuple(sorted(_netdevs(device)))
    rdma = set(attribute_files.names(f"{device}/infiniband"))
    if netdevs:
        soft = _soft_rdma(paths) if soft is None else soft
        rdma.update(name for netdev in netdevs for name in soft.get(netdev, ()))
    function = Function(
        address=address,
        driver=driver_of(paths, address),
        pf=pf,
        index=index,
        netdevs=netdevs,
        rdma=tuple(sorted(rdma)),
        above="" if ":" in address else _function_above(device),
    )
    return function if attribute_files.exists(device) else None


def _function_above(device: str) -> str:
    above = Path(os.path.realpath(device)).parts[:-1]
    return next((part for part in reversed(above) if ":" in part and canonical(part)), "")


def _bus(paths: Paths, address: str) -> str:
    return f"{paths.sysfs}/bus/{'pci' if ':' in address else 'auxiliary'}"


def _device(paths: Paths, address: str) -> str:
    return f"{_bus(paths, address)}/devices/{address}"


def _driver_directory(paths: Paths, address: str, driver: str) -> str:
    return f"{_bus(paths, address)}/drivers/{driver}"


def _rdma(paths: Paths, name: str) -> str:
    return f"{paths.sysfs}/class/infiniband/{name}"


def _index(paths: Paths, pf: str, vf: str) -> int | None:
    """The number of a VF at its PF. Checks the last result first: a PF may have 127 VFs."""
    last = _last_index.get(vf)
    if last is None or attribute_files.target(f"{_device(paths, pf)}/virtfn{last}") != vf:
        last = next((index for index, address in indexed_vfs(paths, pf) if address == vf), None)
        if last is not None:
            _last_index[vf] = last
    return last


def _netdevs(device: str) -> dict[str, str]:
    """The directories of a device's netdevs, by name."""
    netdevs = _below(f"{device}/net")
    if not netdevs and ":" in device.rpartition("/")[2]:
        for name in attribute_files.names(device):
            if name.startswith("virtio"):  # the netdevs are on a device of the virtio bus
                netdevs |= _below(f"{device}/{name}/net")
    return netdevs


def _below(directory: str) -> dict[str, str]:
    """The paths of a directory's entries, by name."""
    return {name: f"{directory}/{name}" for name in attribute_files.names(directory)}


def _address_under(paths: Paths, kind: str, name: str) -> str:
    """The PCI address of the device behind a netdev or RDMA device. Returns "" if it has none."""
    link = f"{paths.sysfs}/class/{kind}/{name}/device"
    device = attribute_files.target(link)
    if device.startswith("virtio"):  # the PCI function is the parent of this device
        device = os.path.basename(os.path.dirname(os.path.realpath(link)))  # noqa: PTH119, PTH120
    address = canonical(device)
    return address if address and attribute_files.exists(_device(paths, address)) else ""


def soft_rdma_of(paths: Paths, netdev: str) -> tuple[str, ...]:
    """The names of the software RDMA devices on a netdev, sorted."""
    return tuple(sorted(_soft_rdma(paths).get(netdev, ())))


def _soft_rdma(paths: Paths) -> dict[str, list[str]]:
    """Software RDMA devices, such as Soft-RoCE, by their netdev."""
    by_netdev: dict[str, list[str]] = {}
    for name, device in _below(f"{paths.sysfs}/class/infiniband").items():
        if _is_virtual(device) and (netdev := _netdev_of_soft(device)):
            by_netdev.setdefault(netdev, []).append(name)
    return by_netdev


def _is_virtual(device: str) -> bool:
    return "/devices/virtual/" in attribute_files.link(device)


def _netdev_of_soft(device: str) -> str:
    # Only rdma_rxe has `parent`. Every driver has the GID table, which is empty while the
    # interface is down.
    return attribute_files.text(f"{device}/parent") or attribute_files.text(
        f"{device}/ports/1/gid_attrs/ndevs/0"
    )
