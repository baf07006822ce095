"""Examines a device before an ADD, and refuses a device that cannot satisfy the options."""

from collections.abc import Sequence

import msgspec

from base.paths import Paths
from cni.spec.errors import CNIError, Code
from cni.sriov import vf_settings
from cni.sriov.option_values import ETHERNET
from cni.sriov.options import SriovOptions
from host.errors import HostError
from host.netlink import interface_addresses, links, rdma
from host.netlink.links import ARPHRD_ETHER, ARPHRD_INFINIBAND, Link
from host.netlink.rdma import NetlinkRdmaDevice
from host.netlink.sockets import Rtnetlink
from host.netlink.vfs import VF
from host.sysfs import attribute_files, infiniband, pci
from host.sysfs.pci import Function

NO_GUIDS = ("00:00:00:00:00:00:00:00", "ff:ff:ff:ff:ff:ff:ff:ff")
_ASK_THE_KUBELET = (
    'check that "deviceID" comes from the device plugin, and that the VFs were created after the '
    "last boot"
)


class DevicePlan(msgspec.Struct, frozen=True, kw_only=True):
    """A device that can satisfy the options, and its state before the ADD."""

    function: Function
    link: Link | None  # the device's interface on the host; `None` with a userspace driver
    vf: VF | None  # the PF's settings for the device; `None` unless the device is a VF
    rdma: tuple[NetlinkRdmaDevice, ...] = ()  # RDMA devices to move with the interface

    @property
    def infiniband(self) -> bool:
        return self.link is not None and self.link.link_type == ARPHRD_INFINIBAND


class DeviceUnfit(CNIError):
    """This device cannot serve the attachment, but another device might."""

    def __init__(self, message: str, code: int = Code.INVALID_CONFIG) -> None:
        super().__init__(code, message)


def plan_of(host: Rtnetlink, paths: Paths, address: str, options: SriovOptions) -> DevicePlan:
    """The device at `address`, checked against `options`. Raises DeviceUnfit, HostError."""
    function = pci.find(paths, address)
    if function is None:
        raise DeviceUnfit(f'device "{address}" is not on this node: {_ASK_THE_KUBELET}')
    _require_kind(paths, function, options)
    link = None if function.userspace else interface_of(host, paths, function)
    if link is not None:
        _require_unused(host, paths, link)
    vf = _vf(host, paths, function, link) if function.is_vf else None
    plan = DevicePlan(function=function, link=link, vf=vf)
    _require_link_layer(plan, options)
    return _with_rdma_devices(paths, plan, options)


def interface_of(host: Rtnetlink, paths: Paths, function: Function) -> Link:
    """The device's interface on the host. Raises DeviceUnfit if there is none."""
    names: Sequence[str] = function.netdevs
    if not function.is_vf and ":" in function.address:
        # In switchdev mode a PF's netdevs include the representors of its VFs and SFs.
        names = [name] if (name := pci.pf_netdev(paths, function.address)) else []
    for name in names:
        link = links.find(host, name)
        if link is not None and not link.parent and link.device in ("", function.address):
            return link
    if not function.driver:
        raise DeviceUnfit(
            f"device {function.address} has no driver: bind a network driver, or vfio-pci for DPDK"
        )
    raise DeviceUnfit(
        f"device {function.address} (driver {function.driver}) has no interface on the host: "
        "try again if another network namespace has the interface, or bind a network driver",
        Code.TRY_AGAIN,
    )


def _require_unused(host: Rtnetlink, paths: Paths, link: Link) -> None:
    """Refuse an interface that the host uses.

    DEL cannot restore the addresses and routes of an interface.
    """
    if master := attribute_files.target(f"{paths.sys}/class/net/{link.name}/master"):
        raise DeviceUnfit(
            f'"{link.name}" of device {link.device} belongs to "{master}" on the host: '
            f"run `ip link set {link.name} nomaster`, or choose another device"
        )
    if used := interface_addresses.of_users(host, link):
        raise DeviceUnfit(
            f'the host uses "{link.name}" of device {link.device} ({used[0]}): choose another '
            "device, or let the host's network manager ignore this interface and run `ip "
            f"address flush dev {link.name}; ip route flush dev {link.name}`"
        )


def guid_of(link: Link) -> str:
    """An InfiniBand interface's port GUID, which is the last 8 bytes of its address."""
    return link.mac[-23:]


def _require_kind(paths: Paths, function: Function, options: SriovOptions) -> None:
    address = function.address
    if options.pf_only:
        if function.is_vf:
            raise DeviceUnfit(f'"pfOnly": {address} is a VF of {function.pf}: remove "pfOnly"')
        if pci.vf_count(paths, address)[0]:
            raise DeviceUnfit(
                f'"pfOnly": the PF {address} has VFs: write 0 to its sriov_numvfs first'
            )
    elif not function.is_vf and ":" in address:
        raise DeviceUnfit(
            f'device {address} is not a VF: set "pfOnly": true to move the whole PF into the pod'
        )
    if options.vfio_pci_mode is True and not function.userspace:
        raise DeviceUnfit(
            f'"vfioPciMode" is true, but device {address} has driver '
            f'"{function.driver}": bind vfio-pci first'
        )
    if not function.is_vf:
        for name in (key for key in options.vf if key != "mac"):
            raise DeviceUnfit(
                f'"{name}" is an option for VFs, but device {address} is not a VF: remove the key'
            )
    if function.userspace:
        for name in ("mtu", "allmulti", "promisc"):
            if getattr(options, name) is not None:
                raise DeviceUnfit(
                    f'"{name}" needs an interface, but device {address} with driver '
                    f"{function.driver} has none: remove the key"
                )


def _vf(host: Rtnetlink, paths: Paths, function: Function, link: Link | None) -> VF:
    if function.index is None:
        raise DeviceUnfit(
            f"device {function.address} is not among the VFs of {function.pf}: try again"
        )
    with vf_settings.vf_of(paths, host, function.pf, function.index) as (_, vf):
        pass
    if link is None or link.link_type != ARPHRD_INFINIBAND:
        return vf
    # Linux before 5.5 reports no GUIDs, and mlx5's PF reports only GUIDs that were set since the PF
    # was bound. Then the VF's GUIDs are those that its driver has read.
    port = vf.port_guid or _valid(guid_of(link))
    nodes = [infiniband.node_guid(paths, name) for name in function.rdma]
    node = vf.node_guid or next(filter(_valid, nodes), port)
    return msgspec.structs.replace(vf, node_guid=node, port_guid=port)


def _valid(guid: str) -> str | None:
    return guid if guid and guid not in NO_GUIDS else None


def _require_link_layer(plan: DevicePlan, options: SriovOptions) -> None:
    link, address = plan.link, plan.function.address
    if link is None:
        return
    if plan.infiniband:
        for name in (key for key in options.vf if key in ETHERNET):
            instead = {"vlan": ' and use "pkey"', "mac": ' and use "guid"'}
            raise DeviceUnfit(
                f'"{name}" is an option for Ethernet, but the link layer of device {address} is '
                f"InfiniBand: remove the option{instead.get(name, '')}"
            )
        if options.ipam_type == "dhcp":
            raise DeviceUnfit(
                '"ipam.type": the dhcp plugin cannot serve InfiniBand: use "podfabric-ipam"'
            )
        guid = (plan.vf.port_guid if plan.vf is not None else None) or guid_of(link)
        if plan.function.is_vf and "guid" not in options.vf and guid in NO_GUIDS:
            raise DeviceUnfit(
                f'VF {address} has no valid GUID ({guid}): set "guid", use ib-kubernetes, or '
                "run `ip link set PF vf N node_guid GUID` and `ip link set PF vf N port_guid "
                "GUID` on the host with the same GUID"
            )
        return
    if link.link_type != ARPHRD_ETHER:
        raise DeviceUnfit(
            f'"{link.name}" of device {address} has link type {link.link_type_name}: choose an '
            "Ethernet or InfiniBand device"
        )
    for name, is_set in (("guid", "guid" in options.vf), ("pkey", options.pkey is not None)):
        if is_set:
            raise DeviceUnfit(
                f'"{name}" is an option for InfiniBand, but the link layer of device {address} is '
                "Ethernet: remove the option"
            )


def _with_rdma_devices(paths: Paths, plan: DevicePlan, options: SriovOptions) -> DevicePlan:
    address, names = plan.function.address, plan.function.rdma
    for name in names:
        if pci.is_software(paths, name):
            raise DeviceUnfit(
                f"software RDMA device {name} uses the interface of device {address}: run "
                f"`rdma link delete {name}` first"
            )
    if not options.rdma_isolation:
        return plan
    require_isolation()
    away = pci.rdma_of(paths, address)
    if not names and away:
        raise DeviceUnfit(
            f'"rdmaIsolation": RDMA device {away[0]} of {address} is in another network '
            "namespace, perhaps of a deleted pod: try again",
            Code.TRY_AGAIN,
        )
    if not names:
        raise DeviceUnfit(
            f'"rdmaIsolation": device {address} has no RDMA device: load the driver\'s RDMA '
            "module, or remove the option"
        )
    with rdma.rdma() as socket:
        visible = {device.name: device for device in rdma.devices(socket)}
    for name in names:
        if name not in visible:
            text = f"RDMA device {name} of {address} has gone from the host: try again"
            raise DeviceUnfit(text, Code.TRY_AGAIN)
    return msgspec.structs.replace(plan, rdma=tuple(visible[name] for name in names))


def require_isolation(user: str = '"rdmaIsolation"') -> None:
    """Raise DeviceUnfit unless the RDMA subsystem is in exclusive mode, which `user` needs."""
    try:
        with rdma.rdma() as socket:
            mode = rdma.mode(socket)
    except HostError as error:
        raise DeviceUnfit(f"{user}: {error}") from None
    if mode != "exclusive":
        raise DeviceUnfit(
            f"{user}: RDMA devices of this node are in {mode} mode: run `rdma system set netns "
            "exclusive` before any pod runs, or write `options ib_core netns_mode=0` to a file in "
            f"/etc/modprobe.d and reboot, or remove {user}"
        )
