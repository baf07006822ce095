"""Adopts attachments of sriov-cni and ib-sriov-cni, so that their DEL restores the VF as for ours.

Both keep a file per attachment, `<container>-<interface>`, with the configuration of the ADD and
the VF's former state (SaveNetConf in pkg/utils/utils.go of both). sriov-cni also keeps a file per
VF in use, `pci/<BDF>`, and makes both directories with mode 0600. Only root can write to them.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec

from base import files
from base.decoding import decode
from base.paths import Paths
from cni.attachments.journal import Journal, JournalEntry
from cni.spec.attachment import Attachment
from cni.spec.notes import note
from cni.spec.request import Request
from cni.sriov import devices, settings
from cni.sriov.plan import NO_GUIDS
from cni.sriov.record import DeviceRecord, MovedRdmaDevice
from cni.sriov.unrecorded import device_in, is_inhabited
from host import links, pci, rdma, sysfs, vfs
from host.errors import HostError, NamespaceGone
from host.namespaces import NetworkNamespace
from host.netdev_move import Origin
from host.netlink import Rtnetlink, netlink
from host.pci import Function
from host.vfs import VF


class _VfState(msgspec.Struct, frozen=True, rename="pascal"):
    """sriov-cni's VfState: the VF before the ADD."""

    host_if_name: str = msgspec.field(name="HostIFName", default="")
    spoof_chk: bool = False
    trust: bool = False
    admin_mac: str = msgspec.field(name="AdminMAC", default="")
    effective_mac: str = msgspec.field(name="EffectiveMAC", default="")
    vlan: int = 0
    vlan_qos: int = msgspec.field(name="VlanQoS", default=0)
    vlan_proto: int = 0
    min_tx_rate: int = 0
    max_tx_rate: int = 0
    link_state: int = 0
    mtu: int = msgspec.field(name="MTU", default=0)


class _RuntimeConfig(msgspec.Struct, frozen=True):
    infinibandGUID: str = ""


class _RdmaState(msgspec.Struct, frozen=True):
    sandboxRdmaDevName: str = ""


class _FormerArguments(msgspec.Struct, frozen=True):
    cni: dict[str, str] | None = None


class FormerState(msgspec.Struct, frozen=True):
    """A file of sriov-cni or ib-sriov-cni, as far as a DEL needs it."""

    deviceID: str
    state: _VfState = msgspec.field(name="OrigVfState", default=_VfState())
    mac: str = msgspec.field(name="MAC", default="")
    vlan: int | None = None
    vlan_qos: int | None = msgspec.field(name="vlanQoS", default=None)
    vlan_proto: str | None = msgspec.field(name="vlanProto", default=None)
    min_tx_rate: int | None = None
    max_tx_rate: int | None = None
    spoofchk: str = ""
    trust: str = ""
    link_state: str = ""
    # of ib-sriov-cni
    host_names: str = msgspec.field(name="HostIFNames", default="")
    host_guid: str = msgspec.field(name="HostIFGUID", default="")
    rdma: _RdmaState = msgspec.field(name="RdmaNetState", default=_RdmaState())
    runtime: _RuntimeConfig = msgspec.field(name="runtimeConfig", default=_RuntimeConfig())
    args: _FormerArguments = _FormerArguments()

    @property
    def host_name(self) -> str:
        """The interface's name on the host; "" with a userspace driver."""
        return self.state.host_if_name or self.host_names

    @property
    def guid(self) -> str:
        """The GUID that the ADD set, "" for none; the file has it only as the runtime gave it."""
        given = self.runtime.infinibandGUID or (self.args.cni or {}).get("guid", "")
        return given.lower() if self.host_guid else ""


def adopt(
    journal: Journal, paths: Paths, attachment: Attachment, request: Request
) -> JournalEntry | None:
    """Write the journal's entry of such an attachment. None if there is no file of it, or if
    another attachment has the VF by now. HostError if its interface is in another living namespace.
    """
    _make_searchable(paths)
    found = _read(paths, attachment)
    if found is None:
        return None
    path, former = found
    address = former.deviceID
    with journal.device_locked(address):
        taken = any(True for _ in journal.holders(address))
        if taken or _is_outdated(paths, path, address):
            note(f"{path} is of an earlier use of device {address}, which stays as it is")
            path.unlink(missing_ok=True)
            return None
        with netlink() as host:
            entry = _entry(host, paths, request, former, address)
        journal.write(entry)
    return entry


def forget(paths: Paths, attachment: Attachment, device: str) -> None:
    """Remove the files of an attachment whose VF is restored."""
    _make_searchable(paths)
    for path in _paths(paths, attachment):
        path.unlink(missing_ok=True)
    if device:  # else it was released by an earlier DEL
        (paths.cni_state / "sriov/pci" / device).unlink(missing_ok=True)


def _make_searchable(paths: Paths) -> None:
    """Let a process without CAP_DAC_OVERRIDE find and remove sriov-cni's files."""
    with suppress(FileNotFoundError, NotADirectoryError):
        for directory in ("sriov", "sriov/pci"):
            (paths.cni_state / directory).chmod(0o700)


def _paths(paths: Paths, attachment: Attachment) -> Iterator[Path]:
    for plugin in ("sriov", "ib-sriov"):
        yield paths.cni_state / plugin / f"{attachment.container_id}-{attachment.ifname}"


def _read(paths: Paths, attachment: Attachment) -> tuple[Path, FormerState] | None:
    for path in _paths(paths, attachment):
        state = _decoded(path)
        if state is not None:
            return path, state
    return None


def _decoded(path: Path) -> FormerState | None:
    try:
        state = decode(files.read(str(path)), FormerState)
        address = pci.canonical(state.deviceID)
        if address is None:
            raise msgspec.ValidationError(f'"{state.deviceID}" is not a device')
        return msgspec.structs.replace(state, deviceID=address)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except msgspec.MsgspecError as error:
        note(f"{path} cannot be read, so the device's former state is unknown: {error}")
        return None


def _is_outdated(paths: Paths, path: Path, device: str) -> bool:
    """Whether an earlier boot wrote the file, or the VF has got another attachment since."""
    written = path.stat().st_mtime
    if written < time.time() - time.clock_gettime(time.CLOCK_BOOTTIME):
        return True
    for directory in (paths.cni_state / "sriov", paths.cni_state / "ib-sriov"):
        for name in sysfs.names(str(directory)):
            other = directory / name
            if other != path and other.is_file() and other.stat().st_mtime >= written:
                state = _decoded(other)
                if state is not None and state.deviceID == device:
                    return True
    return False


def _entry(
    host: Rtnetlink, paths: Paths, request: Request, former: FormerState, address: str
) -> JournalEntry:
    with ExitStack() as opened:
        namespace = None
        with suppress(NamespaceGone):
            namespace = NetworkNamespace.open(request.netns, request.netns_descriptor)
            opened.enter_context(namespace).look_at_path()
        if not pci.netdevs(paths, address):
            home = opened.enter_context(NetworkNamespace.own())
            _require_not_elsewhere(address, home, namespace)
        function = pci.find(paths, address)
        record = DeviceRecord(device=address, driver="")
        if function is not None:
            record = _record(host, paths, function, former, namespace)
        boot_id = paths.boot_id()
        entry = JournalEntry.begun("sriov", request, namespace, boot_id, record, None, address)
    return entry.attached(record, ())


def _require_not_elsewhere(address: str, *own: NetworkNamespace | None) -> None:
    """Raise HostError if a namespace with processes has the VF, other than the pod's and ours."""
    inodes = [namespace.inode for namespace in own if namespace is not None]
    for namespace in NetworkNamespace.every():
        with namespace:
            if namespace.inode in inodes:
                continue
            if device_in(namespace, address) is not None and is_inhabited(namespace):
                raise HostError(
                    f'device {address} is in "{namespace.path}", which has processes: it is '
                    "restored once they have ended or moved it to the host"
                )


def _record(
    host: Rtnetlink,
    paths: Paths,
    function: Function,
    former: FormerState,
    namespace: NetworkNamespace | None,
) -> DeviceRecord:
    infiniband = devices.is_infiniband(host, paths, function)
    before = applied = None
    if function.index is not None:
        with settings.vf_of(paths, host, function.pf, function.index) as (_, now):
            before = _before(now, former)
        applied = _applied(before, former, now)
    return DeviceRecord(
        device=function.address,
        driver=function.driver,
        pf=function.pf,
        origin=_origin(former, infiniband=infiniband) if former.host_name else None,
        before=before,
        applied=applied,
        infiniband=infiniband,
        rdma=_rdma_devices(paths, function, former, namespace),
    )


def _origin(former: FormerState, *, infiniband: bool) -> Origin:
    """The interface as it was on the host. What the plugins do not keep becomes a new device's.

    They leave it down. The host's alternative names cannot be told from those of the pod.
    """
    state = former.state
    given = state.admin_mac if state.admin_mac != settings.NO_MAC else ""
    return Origin(
        name=former.host_name,
        kind="ipoib" if infiniband else "",
        mac="" if infiniband else given or state.effective_mac,
        mtu=state.mtu,
        up=False,
        device=former.deviceID,
        flags=links.FLAGS["multicast"],
        flags_known=sum(links.FLAGS.values()),
        broadcast="" if infiniband else "ff:ff:ff:ff:ff:ff",
        xdp=(),
    )


def _before(now: VF, former: FormerState) -> VF:
    """The VF before the ADD: what the file does not have is as now."""
    state, guid = former.state, former.host_guid.lower()
    if guid in NO_GUIDS:
        guid = settings.NO_GUID
    return msgspec.structs.replace(
        now,
        mac=state.admin_mac or now.mac,
        vlan=state.vlan,
        qos=state.vlan_qos,
        proto="802.1ad" if state.vlan_proto == vfs.PROTOCOLS["802.1ad"] else "802.1q",
        min_tx_rate=state.min_tx_rate,
        max_tx_rate=state.max_tx_rate,
        # For what its driver does not report the file has arbitrary values.
        spoofchk=None if now.spoofchk is None else state.spoof_chk,
        trust=None if now.trust is None else state.trust,
        link_state=None
        if now.link_state is None
        else dict(enumerate(vfs.LINK_STATES)).get(state.link_state, "auto"),
        node_guid=guid or now.node_guid,
        port_guid=guid or now.port_guid,
    )


def _applied(before: VF, former: FormerState, now: VF) -> VF:
    """What the ADD made of it: only what differs is restored."""
    changes: dict[str, object] = {}
    if former.vlan is not None:
        proto = (former.vlan_proto or "802.1q").lower()
        changes |= {"vlan": former.vlan, "qos": former.vlan_qos or 0, "proto": proto}
    if former.mac:
        changes["mac"] = former.mac.lower()
    if former.min_tx_rate is not None or former.max_tx_rate is not None:
        rates = former.min_tx_rate or 0, former.max_tx_rate or 0
        changes |= dict(zip(("min_tx_rate", "max_tx_rate"), rates, strict=True))
    changes |= {
        name: value == "on"  # anything else is off to sriov-cni
        for name, value in (("spoofchk", former.spoofchk), ("trust", former.trust))
        if value
    }
    if former.link_state:
        changes["link_state"] = former.link_state
    if former.host_guid:
        guid = former.guid or now.port_guid
        changes |= {"node_guid": guid, "port_guid": guid}
    return msgspec.structs.replace(before, **changes)


def _rdma_devices(
    paths: Paths, function: Function, former: FormerState, namespace: NetworkNamespace | None
) -> tuple[MovedRdmaDevice, ...]:
    """The function's RDMA devices, in the pod or on the host, with their names on the host."""
    names = pci.rdma_of(paths, function.address)
    if not names:
        return ()
    with rdma.rdma(namespace) as socket:
        present = [device for device in rdma.devices(socket) if device.name in names]
    former_name = former.rdma.sandboxRdmaDevName if len(present) == 1 else ""
    return tuple(MovedRdmaDevice(device.index, former_name or device.name) for device in present)
