"""Adopts attachments of sriov-cni and ib-sriov-cni, so that a DEL restores their VFs.

Both plugins write a file `<container>-<interface>` for each attachment. The file has the ADD's
configuration and the VF's earlier state (SaveNetConf in pkg/utils/utils.go). sriov-cni also writes
a file `pci/<BDF>` for each VF in use. Only root can write to the plugins' directories.
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
from cni.sriov import candidates, unrecorded, vf_settings
from cni.sriov.device_record import DeviceRecord
from cni.sriov.plan import NO_GUIDS
from host.errors import HostError, NamespaceGone
from host.namespaces import NetworkNamespace
from host.netdev_move import Origin
from host.netlink import links, vfs
from host.netlink.sockets import Rtnetlink, netlink
from host.netlink.vfs import VF
from host.sysfs import attribute_files, pci
from host.sysfs.pci import Function


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


class FormerState(msgspec.Struct, frozen=True):
    """The fields that a DEL needs from a plugin's file."""

    deviceID: str
    state: _VfState | None = msgspec.field(name="OrigVfState", default=None)  # of sriov-cni
    # Settings of the ADD.
    mac: str = msgspec.field(name="MAC", default="")
    spoofchk: str = ""
    trust: str = ""
    link_state: str = ""
    # Of ib-sriov-cni.
    host_name: str = msgspec.field(name="HostIFNames", default="")
    host_guid: str = msgspec.field(name="HostIFGUID", default="")


def adopt(
    journal: Journal, paths: Paths, attachment: Attachment, request: Request
) -> JournalEntry | None:
    """Write an attachment's journal entry, unless another attachment now has the VF.

    Raises HostError if a namespace with processes, not the host's or the pod's, has the VF.
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
            note(f"{path} is from an earlier use of device {address}, which DEL does not change")
            path.unlink(missing_ok=True)
            return None
        with netlink() as host:
            entry = _entry(host, paths, request, former, address)
        journal.write(entry)
    return entry


def forget(paths: Paths, attachment: Attachment, device: str) -> None:
    """Remove the files that sriov-cni or ib-sriov-cni wrote for an attachment."""
    _make_searchable(paths)
    for path in _paths(paths, attachment):
        path.unlink(missing_ok=True)
    if device:  # otherwise an earlier DEL released the device
        (paths.cni_state / "sriov/pci" / device).unlink(missing_ok=True)


def _make_searchable(paths: Paths) -> None:
    """Give sriov-cni's directories mode 0700, because mode 0600 requires CAP_DAC_OVERRIDE."""
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
        note(f"{path} cannot be read, so the device's earlier state is unknown: {error}")
        return None


def _is_outdated(paths: Paths, path: Path, device: str) -> bool:
    """Whether the file is older than the last boot, or than another file for the same VF."""
    written = path.stat().st_mtime
    if written < time.time() - time.clock_gettime(time.CLOCK_BOOTTIME):
        return True
    for directory in (paths.cni_state / "sriov", paths.cni_state / "ib-sriov"):
        for name in attribute_files.names(str(directory)):
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
            record = _record(host, paths, function, former)
        boot_id = paths.boot_id()
        entry = JournalEntry.begun("sriov", request, namespace, boot_id, record, None, address)
    return entry.attached(record, ())


def _require_not_elsewhere(address: str, *own: NetworkNamespace | None) -> None:
    """Raise HostError if a namespace with processes has the VF. Skips the namespaces in `own`."""
    inodes = [namespace.inode for namespace in own if namespace is not None]
    for namespace in NetworkNamespace.every():
        with namespace:
            if namespace.inode in inodes:
                continue
            if unrecorded.device_in(namespace, address) and unrecorded.is_inhabited(namespace):
                raise HostError(
                    f'device {address} is in network namespace "{namespace.path}", where '
                    "processes still run: end these processes, or move the device to the host"
                )


def _record(host: Rtnetlink, paths: Paths, function: Function, former: FormerState) -> DeviceRecord:
    """A record from which the DEL restores all settings that differ from the file."""
    infiniband = candidates.is_infiniband(host, paths, function)
    now = None
    if function.index is not None:
        with vf_settings.vf_of(paths, host, function.pf, function.index) as (_, now):
            pass
    return DeviceRecord(
        device=function.address,
        driver=function.driver,
        pf=function.pf,
        origin=_origin(former, infiniband=infiniband),
        before=_before(now, former) if now is not None else None,
        applied=_applied(now, former) if now is not None else None,
        infiniband=infiniband,
        rdma=unrecorded.rdma_of(paths, function.address),
    )


def _origin(former: FormerState, *, infiniband: bool) -> Origin | None:
    """The interface before the ADD; `None` if the VF had a userspace driver.

    A property that is not in the file gets the value of a new device.
    """
    state = former.state or _VfState()
    name = state.host_if_name or former.host_name
    if not name:
        return None
    given = state.admin_mac if state.admin_mac != vf_settings.NO_MAC else ""
    return Origin(
        name=name,
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
    """The VF's settings before the ADD. A setting that the file lacks has the current value."""
    if guid := former.host_guid.lower():
        guid = vf_settings.NO_GUID if guid in NO_GUIDS else guid
        now = msgspec.structs.replace(now, node_guid=guid, port_guid=guid)
    state = former.state
    if state is None:  # a file of ib-sriov-cni, which keeps no link state
        auto = former.link_state and now.link_state is not None
        return msgspec.structs.replace(now, link_state="auto") if auto else now
    return msgspec.structs.replace(
        now,
        mac=(state.admin_mac if former.mac else "") or now.mac,
        vlan=state.vlan,
        qos=state.vlan_qos,
        proto="802.1ad" if state.vlan_proto == vfs.PROTOCOLS["802.1ad"] else "802.1q",
        min_tx_rate=state.min_tx_rate,
        max_tx_rate=state.max_tx_rate,
        # The file has arbitrary values for settings that the driver does not report.
        spoofchk=None if now.spoofchk is None else state.spoof_chk,
        trust=None if now.trust is None else state.trust,
        link_state=None
        if now.link_state is None
        else dict(enumerate(vfs.LINK_STATES)).get(state.link_state, "auto"),
    )


def _applied(now: VF, former: FormerState) -> VF:
    """The VF's current settings. A setting that the driver does not report has the ADD's value."""
    written = {"spoofchk": former.spoofchk == "on", "trust": former.trust == "on"}
    values = {**written, "link_state": former.link_state}
    hidden = (key for key in values if getattr(former, key) and getattr(now, key) is None)
    return msgspec.structs.replace(now, **{key: values[key] for key in hidden})
