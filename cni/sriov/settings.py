"""What a PF sets for its VF: what is wanted, what differs, how it is written and taken back.

Everything here is done under the PF's lock: drivers refuse, or mix up, settings of several VFs
at the same time.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from base import locks
from base.paths import Paths
from cni.sriov.options import SriovOptions
from host import links, pci, vfs
from host.errors import HostError, LinkMissing
from host.links import Link
from host.netlink import Rtnetlink
from host.vfs import VF

NO_MAC = "00:00:00:00:00:00"
NO_GUID = "ff:ff:ff:ff:ff:ff:ff:ff"  # what a VF without a GUID is given back
# What a VF has to begin with, where its driver does not report it.
UNREPORTED = {
    "spoofchk": True,
    "trust": False,
    "link_state": "auto",
    "node_guid": NO_GUID,
    "port_guid": NO_GUID,
}
ATTEMPTS, PAUSE = 20, 0.1  # of reading back: drivers pass an address on to their firmware


@contextmanager
def pf_of(paths: Paths, host: Rtnetlink, pf: str) -> Iterator[Link]:
    """The interface of the PF at that address, which is the caller's alone in the block.

    HostError where the PF has none on the host.
    """
    with locks.locked(paths.locks / f"pf-{pf}", f"the PF {pf}"):
        name = pci.pf_netdev(paths, pf)
        link = links.find(host, name) if name else None
        if link is None:
            raise LinkMissing(
                f"the PF {pf} has no interface on the host: is its driver bound, and the "
                "interface in the host's network namespace?"
            )
        yield link


def wanted(before: VF, options: SriovOptions) -> VF:
    """The VF's settings with the options, everything that they leave out as it is."""
    after = before
    if options.vlan is not None:
        tag = options.vlan
        after = msgspec.structs.replace(after, vlan=tag.id, qos=tag.qos, proto=tag.proto)
    if options.min_tx_rate is not None or options.max_tx_rate is not None:
        rates = options.min_tx_rate or 0, options.max_tx_rate or 0
        after = msgspec.structs.replace(after, min_tx_rate=rates[0], max_tx_rate=rates[1])
    given: dict[str, object] = {
        "mac": options.mac or None,
        "spoofchk": options.spoofchk,
        "trust": options.trust,
        "link_state": options.link_state or None,
        "node_guid": options.guid or None,
        "port_guid": options.guid or None,
    }
    set_ones = {key: value for key, value in given.items() if value is not None}
    return msgspec.structs.replace(after, **set_ones)


def apply(host: Rtnetlink, pf: Link, now: VF, target: VF, *, all_of_it: bool = False) -> None:
    """Write what differs. The address first: with spoofchk on, the wrong one's frames drop.

    HostError for the first refusal; if `all_of_it` is to be tried, for all of them at the end.
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
    """The settings to go back to: as before in all that was applied, and in the address.

    The rest stays as it is now: an administrator may have changed it meanwhile. An address that
    the PF had goes back in any case, since a VF that is trusted changes it. One that is all
    zeros is none: the PF shows a VF's own there once that is up.
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


def differences(found: VF, right: VF) -> dict[str, tuple[object, object]]:
    """(found, right) of every setting that differs, by the name of its option.

    What the driver does not report cannot be compared.
    """
    pairs = {
        "mac": (found.mac, right.mac),
        "vlan, vlanQoS, vlanProto": (_tag(found), _tag(right)),
        "min_tx_rate, max_tx_rate": (_rates(found), _rates(right)),
        "spoofchk": (found.spoofchk, right.spoofchk),
        "trust": (found.trust, right.trust),
        "link_state": (found.link_state, right.link_state),
        "guid": (found.node_guid, right.node_guid),
        "guid of the port": (found.port_guid, right.port_guid),
    }
    return {what: pair for what, pair in pairs.items() if pair[0] not in (None, pair[1])}


def _set_mac(host: Rtnetlink, pf: Link, target: VF) -> None:
    vfs.set_mac(host, pf, target.index, target.mac)
    for _ in range(ATTEMPTS):
        found = vfs.read(host, pf, target.index).mac
        if found == target.mac:
            return
        time.sleep(PAUSE)
    raise HostError(
        f'the PF "{pf.name}" still shows hardware address {found} of VF {target.index} after '
        f"{target.mac} was set"
    )


def _tag(vf: VF) -> tuple[int, int, str]:
    return (vf.vlan, vf.qos, vf.proto) if vf.vlan else (0, 0, "802.1q")


def _rates(vf: VF) -> tuple[int, int]:
    return vf.min_tx_rate, vf.max_tx_rate


def _guids(vf: VF) -> tuple[str | None, str | None]:
    return vf.node_guid, vf.port_guid
