"""The settings that a PF has for a VF: compute, apply, restore and compare them.

The caller holds the PF's lock (`pf_of`, `vf_of`), because drivers refuse or mix up settings of
several VFs at the same time.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from base import locks
from base.paths import Paths
from base.waiting import wait_until
from cni.sriov.options import SriovOptions
from host import links, pci, vfs
from host.errors import HostError, LinkMissing
from host.links import Link
from host.netlink import Rtnetlink
from host.vfs import VF

NO_MAC = "00:00:00:00:00:00"
NO_GUID = "ff:ff:ff:ff:ff:ff:ff:ff"  # what a VF without a GUID gets when it is restored
# A new VF's values, for settings that its driver does not report.
UNREPORTED = {
    "spoofchk": True,
    "trust": False,
    "link_state": "auto",
    "node_guid": NO_GUID,
    "port_guid": NO_GUID,
}
MAC_TIME, PAUSE = 2.0, 0.1  # seconds to read an address back: drivers pass it to their firmware


@contextmanager
def pf_of(paths: Paths, host: Rtnetlink, pf: str) -> Iterator[Link]:
    """The interface of the PF at that address, with the PF's lock held in the block.

    Raises LinkMissing if the PF has no interface on the host, and Busy.
    """
    with _locked(paths, pf):
        name = pci.pf_netdev(paths, pf)
        link = links.find(host, name) if name else None
        if link is None:
            raise _missing(pf)
        yield link


@contextmanager
def vf_of(paths: Paths, host: Rtnetlink, pf: str, index: int) -> Iterator[tuple[Link, VF]]:
    """The same, and the settings that the PF has for its VF of that number.

    Raises also HostError if the PF's driver does not report that VF.
    """
    with _locked(paths, pf):
        name = pci.pf_netdev(paths, pf)
        found = vfs.find(host, name, index) if name else None
        if found is None:
            raise _missing(pf)
        yield found


def _locked(paths: Paths, pf: str) -> locks.LockFile:
    return locks.locked(f"{paths.locks}/pf-{pf}", f"the PF {pf}")


def _missing(pf: str) -> LinkMissing:
    return LinkMissing(
        f"the PF {pf} has no interface on the host: is its driver bound, and the interface in the "
        "host's network namespace?"
    )


def wanted(before: VF, options: SriovOptions) -> VF:
    """The VF's settings with those in the options; the others stay as they are."""
    after = before
    if options.vlan is not None:
        tag = options.vlan
        after = msgspec.structs.replace(after, vlan=tag.id, qos=tag.qos, proto=tag.proto)
    if options.min_tx_rate is not None or options.max_tx_rate is not None:
        rates = options.min_tx_rate or 0, options.max_tx_rate or 0
        after = msgspec.structs.replace(after, min_tx_rate=rates[0], max_tx_rate=rates[1])
    values: dict[str, object] = {
        "mac": options.mac or None,
        "spoofchk": options.spoofchk,
        "trust": options.trust,
        "link_state": options.link_state or None,
        "node_guid": options.guid or None,
        "port_guid": options.guid or None,
    }
    changed = {key: value for key, value in values.items() if value is not None}
    return msgspec.structs.replace(after, **changed)


def apply(host: Rtnetlink, pf: Link, now: VF, target: VF, *, all_of_it: bool = False) -> None:
    """Write the settings that differ between `now` and `target`.

    The address comes first, because with spoofchk on the PF drops frames from another one. Raises
    HostError for the first refusal; with `all_of_it` it tries all settings and then raises for
    all refusals.
    """
    failures = []
    for change in _changes(host, pf, now, target):
        try:
            change()
        except HostError as error:
            if not all_of_it:
                raise
            failures.append(str(error))
    if failures:
        raise HostError("; ".join(failures))


def _changes(host: Rtnetlink, pf: Link, now: VF, target: VF) -> Iterator[Callable[[], None]]:
    index = target.index
    if now.mac != target.mac:
        yield lambda: _set_mac(host, pf, target)
    if _tag(now) != _tag(target):
        yield lambda: vfs.set_vlan(host, pf, index, target.vlan, target.qos, target.proto)
    if _rates(now) != _rates(target):
        yield lambda: vfs.set_rate(host, pf, index, target.min_tx_rate, target.max_tx_rate)
    spoofchk, trust, state = target.spoofchk, target.trust, target.link_state
    if spoofchk is not None and now.spoofchk != spoofchk:
        yield lambda: vfs.set_spoofchk(host, pf, index, spoofchk)
    if trust is not None and now.trust != trust:
        yield lambda: vfs.set_trust(host, pf, index, trust)
    if state is not None and now.link_state != state:
        yield lambda: vfs.set_link_state(host, pf, index, state)
    if _guids(now) != _guids(target):
        yield lambda: vfs.set_guids(host, pf, index, target.node_guid, target.port_guid)


def restored(now: VF, before: VF, applied: VF) -> VF:
    """The settings to restore: those before the ADD, where the ADD changed them.

    The others stay as they are now, since an administrator may have changed them meanwhile. The
    PF's address for the VF is restored in any case, because a trusted VF can change it. An
    address of zeros means none: there the PF shows the VF's own address once the VF is up.
    """
    changed = {
        name: getattr(before, name)
        for name in VF.__struct_fields__
        if getattr(before, name) != getattr(applied, name)
    }
    if changed.keys() & {"vlan", "qos", "proto"}:
        changed |= {"vlan": before.vlan, "qos": before.qos, "proto": before.proto}
    if changed.keys() & {"min_tx_rate", "max_tx_rate"}:
        changed |= {"min_tx_rate": before.min_tx_rate, "max_tx_rate": before.max_tx_rate}
    for name in changed.keys() & UNREPORTED.keys():
        if changed[name] is None:
            changed[name] = UNREPORTED[name]
    if len(before.mac) == len(NO_MAC) and before.mac != NO_MAC:
        changed["mac"] = before.mac
    return msgspec.structs.replace(now, **changed)


def differences(now: VF, expected: VF) -> dict[str, tuple[object, object]]:
    """(now, expected) for every setting that differs, by the name of its option.

    Settings that the driver does not report are left out.
    """
    pairs = {
        "mac": (now.mac, expected.mac),
        "vlan, vlanQoS, vlanProto": (_tag(now), _tag(expected)),
        "min_tx_rate, max_tx_rate": (_rates(now), _rates(expected)),
        "spoofchk": (now.spoofchk, expected.spoofchk),
        "trust": (now.trust, expected.trust),
        "link_state": (now.link_state, expected.link_state),
        "guid": (now.node_guid, expected.node_guid),
        "guid of the port": (now.port_guid, expected.port_guid),
    }
    return {what: pair for what, pair in pairs.items() if pair[0] not in (None, pair[1])}


def _set_mac(host: Rtnetlink, pf: Link, target: VF) -> None:
    vfs.set_mac(host, pf, target.index, target.mac)
    if not wait_until(lambda: vfs.read(host, pf, target.index).mac == target.mac, MAC_TIME, PAUSE):
        shown = vfs.read(host, pf, target.index).mac
        raise HostError(
            f'the PF "{pf.name}" still shows hardware address {shown} of VF {target.index} after '
            f"{target.mac} was set"
        )


def _tag(vf: VF) -> tuple[int, int, str]:
    return (vf.vlan, vf.qos, vf.proto) if vf.vlan else (0, 0, "802.1q")


def _rates(vf: VF) -> tuple[int, int]:
    return vf.min_tx_rate, vf.max_tx_rate


def _guids(vf: VF) -> tuple[str | None, str | None]:
    return vf.node_guid, vf.port_guid
