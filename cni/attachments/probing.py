"""What a pod's neighbours know of its addresses, asked before these are set and told afterwards.

The addresses to ask for are those that a lost machine may still use (`ipam.cluster.probing`).
"""

from cni.spec.notes import note
from host import address_probe, announce
from host.links import Link
from host.namespaces import NetworkNamespace
from host.netlink import Rtnetlink
from ipam.delegation import IpamCall

CARRIER_WAIT = 2.0  # seconds


def probe(ipam: IpamCall, pod: Rtnetlink, namespace: NetworkNamespace, link: Link) -> None:
    """Ask the link for the addresses of `ipam` that are to be probed. The interface is up.

    CNIError 11 if another machine has one. Without carrier no answer can come: then the pod gets
    the addresses unprobed, and an event says so.
    """
    ready = announce.await_carrier(pod, link, CARRIER_WAIT)
    if not ready.carrier:
        ipam.pass_unprobed(f'"{link.name}" has no carrier')
        return
    ipam.settle_probes(address_probe.answers(namespace, ready, ipam.unprobed))


def announce_addresses(namespace: NetworkNamespace, link: Link, cidrs: list[str]) -> None:
    """Announce these addresses if the interface has carrier. A failure becomes a note."""
    if link.carrier:
        for failure in announce.announce(namespace, link, cidrs):
            note(failure)
