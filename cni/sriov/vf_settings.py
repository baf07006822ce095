"""Computes, applies, restores and compares the settings that a PF has for a VF.

The caller holds the PF's lock (`pf_of`, `vf_of`). Without the lock, a driver may refuse settings,
or mix up the settings of several VFs.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

import msgspec

from base import locks
from base.interrupts import wait_until
from base.paths import Paths
from cni.sriov.options import SriovOptions
from host.errors import HostError, LinkMissing
from host.netlink import links, vfs
from host.netlink.links import Link
from host.netlink.sockets import Rtnetlink
from host.netlink.vfs import VF
from host.sysfs import pci

T = TypeVar("T")

NO_MAC = "00:00:00:00:00:00"
NO_GUID = "ff:ff:ff:ff:ff:ff:ff:ff"  # restored for a VF that had no GUID
NEW = VF(
    index=0,
    mac=NO_MAC,
    vlan=0,
    qos=0,
    proto="802.1q",
    min_tx_rate=0,
    max_tx_rate=0,
    spoofchk=True,
    trust=False,
    link_state="auto",
    node_guid=NO_GUID,
    port_guid=NO_GUID,
)
"""A new VF. A setting that the driver does not report is restored to the value in `NEW`."""
_OPTIONS = {"qos": "vlanQoS", "proto": "vlanProto", "node_guid": "guid", "port_guid": "guid"}
"""The names of options that differ from the names of the VF's fields."""
_SHOWN = {"port_guid": "guid of the port"}
_TAG = ("vlan", "qos", "proto")
MAC_TIME, PAUSE = 2.0, 0.1  # seconds to read an address back: drivers pass it to their firmware


def pf_of(paths: Paths, host: Rtnetlink, pf: str) -> AbstractContextManager[Link]:
    """Lock the PF at the address `pf`, and yield its interface. Raises LinkMissing, Busy."""
    return _of_pf(paths, pf, lambda name: links.find(host, name))


def vf_of(
    paths: Paths, host: Rtnetlink, pf: str, index: int
) -> AbstractContextManager[tuple[Link, VF]]:
    """Like `pf_of`, but yields the interface and the VF's settings. Raises HostError, Busy."""
    return _of_pf(paths, pf, lambda name: vfs.find(host, name, index))


@contextmanager
def _of_pf(paths: Paths, pf: str, find: Callable[[str], T | None]) -> Iterator[T]:
    with locks.locked(f"{paths.locks}/pf-{pf}", f"the PF {pf}"):
        name = pci.pf_netdev(paths, pf)
        found = find(name) if name else None
        if found is None:
            raise LinkMissing(
                f"PF {pf} has no interface on the host: bind the PF to its driver, or move the "
                "interface from another network namespace to the host"
            )
        yield found


def wanted(before: VF, options: SriovOptions) -> VF:
    """The settings `before`, with the options' values in the changed places."""
    fields = ((name, _OPTIONS.get(name, name)) for name in VF.__struct_fields__)
    changed = {name: options.vf[key] for name, key in fields if key in options.vf}
    return msgspec.structs.replace(before, **changed)


def apply(host: Rtnetlink, pf: Link, now: VF, target: VF, *, all_of_it: bool = False) -> None:
    """Write the settings that differ. With `all_of_it`, an error does not stop other requests."""
    failures = []
    for names, request in _requests():
        values = [getattr(target, name) for name in names]
        if _compared(now, names) == _compared(target, names) or set(values) == {None}:
            continue
        try:
            request(host, pf, target.index, *values)
        except HostError as error:
            if not all_of_it:
                raise
            failures.append(str(error))
    if failures:
        raise HostError("; ".join(failures))


def restored(now: VF, before: VF, applied: VF) -> VF:
    """The current settings, with the old value of each setting that the ADD changed.

    Other settings stay, because an administrator may have changed them. If the driver did not
    report the old value, the setting gets the value of a new VF. A trusted VF can change its
    address at the PF, so an address that was set before the ADD is always restored.
    """
    changed: dict[str, object] = {}
    for names, _ in _requests():
        if _compared(before, names) != _compared(applied, names):
            changed |= {name: getattr(before, name) for name in names}
    changed |= {name: getattr(NEW, name) for name, value in changed.items() if value is None}
    if len(before.mac) == len(NO_MAC) and before.mac != NO_MAC:
        changed["mac"] = before.mac
    return msgspec.structs.replace(now, **changed)


def differences(now: VF, expected: VF) -> dict[str, tuple[object, object]]:
    """The reported settings that differ, as pairs (now, expected) by the option's name."""
    different = {}
    for names, _ in _requests():
        pairs = zip(names, _compared(now, names), _compared(expected, names), strict=True)
        for name, present, right in pairs:
            if present not in (None, right):
                different[_SHOWN.get(name) or _OPTIONS.get(name, name)] = (present, right)
    return different


def _requests() -> tuple[tuple[tuple[str, ...], Callable[..., None]], ...]:
    """The requests, in the order in which they are sent.

    Each request has the names of VF fields, and the function that sets these fields.
    """
    return (
        # Before spoofchk, with which the PF drops frames from other addresses.
        (("mac",), _set_mac),
        (_TAG, vfs.set_vlan),
        (("min_tx_rate", "max_tx_rate"), vfs.set_rate),
        (("spoofchk",), vfs.set_spoofchk),
        (("trust",), vfs.set_trust),
        (("link_state",), vfs.set_link_state),
        (("node_guid", "port_guid"), vfs.set_guids),
    )


def _compared(vf: VF, names: tuple[str, ...]) -> tuple[object, ...]:
    """The values of these fields. Without a VLAN, the values of QoS and protocol do not matter."""
    if names == _TAG and not vf.vlan:
        return (0, 0, "802.1q")
    return tuple(getattr(vf, name) for name in names)


def _set_mac(host: Rtnetlink, pf: Link, index: int, mac: str) -> None:
    vfs.set_mac(host, pf, index, mac)
    if not wait_until(lambda: vfs.read(host, pf, index).mac == mac, MAC_TIME, PAUSE):
        shown = vfs.read(host, pf, index).mac
        raise HostError(
            f'the PF "{pf.name}" still shows MAC address {shown} for VF {index}, although '
            f"{mac} was set: see dmesg for errors of the PF's driver"
        )
