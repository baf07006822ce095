"""The journal's record of a device: the device's state before the ADD, and the ADD's settings."""

import msgspec

from cni.sriov import vf_settings
from cni.sriov.options import SriovOptions
from cni.sriov.plan import DevicePlan
from host.netdev_move import ALIAS_PREFIX, MODES, Origin, origin_of
from host.netlink import links
from host.netlink.vfs import VF


class MovedRdmaDevice(msgspec.Struct, frozen=True):
    index: int
    name: str


class DeviceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The data to find the device and to restore it."""

    device: str
    driver: str
    pf: str = ""  # address of the VF's PF
    above: str = ""  # address of the scalable function's PCI function
    origin: Origin | None = None  # the interface as it was on the host, if there was one
    ethtool: dict[str, str] = {}  # its driver's settings (host.ethtool)
    before: VF | None = None
    applied: VF | None = None
    mac: str = ""  # the address that the ADD sets on the interface
    mtu: int = 0
    modes: tuple[int, int] = (0, 0)  # flags of IFF_PROMISC, IFF_ALLMULTI: switched on, configured
    infiniband: bool = False
    pkey: int | None = None  # the kernel's value for an InfiniBand interface
    rdma: tuple[MovedRdmaDevice, ...] = ()

    @property
    def segment(self) -> str:
        """The device's network segment: its PF, and its VLAN or P_Key."""
        pf = self.pf or self.above or self.device
        if self.pkey is not None:
            return f"{pf} {self.pkey | 0x8000:#06x}"  # full and limited members of one partition
        vlan = self.applied.vlan if self.applied is not None else 0
        return f"{pf} vlan {vlan}" if vlan else pf


def record_of(plan: DevicePlan, options: SriovOptions) -> DeviceRecord:
    """The record of an ADD that has changed nothing yet."""
    function = plan.function
    on = mask = 0
    for flag, wanted in (
        (links.FLAGS["promisc"], options.promisc),
        (links.FLAGS["allmulti"], options.allmulti),
    ):
        if wanted is not None:
            mask |= flag
            on |= flag if wanted else 0
    return DeviceRecord(
        device=function.address,
        driver=function.driver,
        pf=function.pf,
        above=function.above,
        origin=_origin(plan),
        before=plan.vf,
        applied=vf_settings.wanted(plan.vf, options) if plan.vf is not None else None,
        mac=options.vf.get("mac", "") if plan.link is not None else "",
        mtu=options.mtu or 0,
        modes=(on & MODES, mask & MODES),
        infiniband=plan.infiniband,
        pkey=plan.link.pkey if plan.link is not None else None,
        rdma=tuple(MovedRdmaDevice(device.index, device.name) for device in plan.rdma),
    )


def _origin(plan: DevicePlan) -> Origin | None:
    """The interface's state that the DEL restores; a lost attachment's alias is left out."""
    if plan.link is None:
        return None
    origin = origin_of(plan.link)
    if origin.alias.startswith(ALIAS_PREFIX):
        origin = msgspec.structs.replace(origin, alias="")
    if plan.vf is not None and not plan.infiniband and plan.vf.mac != vf_settings.NO_MAC:
        # After a reset of its driver, a VF has the address that its PF has set.
        origin = msgspec.structs.replace(origin, mac=plan.vf.mac)
    return origin
