"""What the journal keeps of a device: how it was, what an ADD was to make of it."""

import msgspec

from cni.spec.attachment import Attachment
from cni.sriov import settings
from cni.sriov.options import SriovOptions
from cni.sriov.plan import SOFT_KINDS, DevicePlan
from host import links
from host.netdev_move import ALIAS_PREFIX, MODES, Mark, Origin, origin_of
from host.vfs import VF


class MovedRdmaDevice(msgspec.Struct, frozen=True):
    """An RDMA device that goes with the interface."""

    index: int
    name: str


class SoftRdmaDevice(msgspec.Struct, frozen=True):
    """A software RDMA device on the interface, which is made anew wherever that goes."""

    kind: str  # "rxe", "siw"
    name: str


class DeviceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Enough to find the device and to make it what it was."""

    device: str
    driver: str
    pf: str = ""  # address of the PF whose VF this is
    above: str = ""  # address of the PCI function whose scalable function this is
    origin: Origin | None = None  # the interface on the host, if there is one
    before: VF | None = None
    applied: VF | None = None
    mac: str = ""  # what its own address was set to
    mtu: int = 0
    modes: tuple[int, int] = (0, 0)  # of IFF_PROMISC, IFF_ALLMULTI: set, among those asked for
    infiniband: bool = False
    pkey: int | None = None  # of an InfiniBand interface, as the kernel shows it
    rdma: tuple[MovedRdmaDevice, ...] = ()
    soft: tuple[SoftRdmaDevice, ...] = ()

    @property
    def segment(self) -> str:
        """The link that the device is on: its PF's, and the VLAN or the partition there."""
        pf = self.pf or self.above or self.device
        if self.pkey is not None:
            return f"{pf} {self.pkey | 0x8000:#06x}"  # both members of a partition
        vlan = self.applied.vlan if self.applied is not None else 0
        return f"{pf} vlan {vlan}" if vlan else pf


def record_of(plan: DevicePlan, options: SriovOptions) -> DeviceRecord:
    """The record of an ADD before it has changed anything."""
    function = plan.function
    on = among = 0
    for flag, given in (
        (links.IFF_PROMISC, options.promisc),
        (links.IFF_ALLMULTI, options.allmulti),
    ):
        if given is not None:
            among |= flag
            on |= flag if given else 0
    return DeviceRecord(
        device=function.address,
        driver=function.driver,
        pf=function.pf,
        above=function.above,
        origin=_origin(plan),
        before=plan.vf,
        applied=settings.wanted(plan.vf, options) if plan.vf is not None else None,
        mac=options.mac if plan.link is not None else "",
        mtu=options.mtu or 0,
        modes=(on & MODES, among & MODES),
        infiniband=plan.infiniband,
        pkey=plan.link.pkey if plan.link is not None else None,
        rdma=tuple(MovedRdmaDevice(device.index, device.name) for device in plan.rdma),
        soft=tuple(
            SoftRdmaDevice(SOFT_KINDS[device.protocol], device.name) for device in plan.soft
        ),
    )


def _origin(plan: DevicePlan) -> Origin | None:
    """What the interface is to be again. Not what an attachment that nobody knows made of it."""
    if plan.link is None:
        return None
    origin = origin_of(plan.link)
    if origin.alias.startswith(ALIAS_PREFIX):
        origin = msgspec.structs.replace(origin, alias="")
    if plan.vf is not None and not plan.infiniband and plan.vf.mac != settings.NO_MAC:
        # An address that the PF has set is the VF's, at the latest when its driver is reset; and
        # a VF that is not trusted may have no other.
        origin = msgspec.structs.replace(origin, mac=plan.vf.mac)
    return origin


def mark_of(attachment: Attachment) -> Mark:
    """What an attachment's interface is known by."""
    return Mark(attachment.key)
