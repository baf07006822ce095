"""Probes a pod's addresses before they are set on the interface, and announces them afterwards.

By default the probes cover only addresses that a lost machine may still use
(`ipam.store.block_rows`). With `"probe": "always"` all addresses are probed.
"""

from cni.spec.notes import note
from cni.spec.result import Result
from host import address_probe, announce
from host.namespaces import NetworkNamespace
from host.netlink import links
from host.netlink.links import Link
from host.netlink.sockets import Rtnetlink
from ipam.delegation import IpamCall

CARRIER_WAIT = 2.0  # seconds


def probed(
    answer: Result, ipam: IpamCall, pod: Rtnetlink, namespace: NetworkNamespace, link: Link
) -> Result:
    """The first answer of `ipam` with addresses that no other machine uses.

    Raises CNIError 11 if a machine answers and `ipam` reserves no other addresses. The interface
    must be up. Without carrier the pod gets the addresses unprobed, and an event says so.
    """
    ready = links.await_carrier(pod, link, CARRIER_WAIT)
    if not ready.carrier:
        ipam.pass_unprobed(f'"{link.name}" has no carrier')
        return answer
    while True:
        other = ipam.settle_probes(address_probe.answers(namespace, ready, ipam.unprobed))
        if other is None:
            return answer
        answer = other


def announce_addresses(namespace: NetworkNamespace, link: Link, cidrs: list[str]) -> None:
    """Announce these addresses if the interface has carrier. A failure becomes a note."""
    if link.carrier:
        for failure in announce.announce(namespace, link, cidrs):
            note(failure)
