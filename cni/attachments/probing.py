"""Probes the addresses that a lost machine may still use, on the pod's interface, before they are
set there (`ipam.cluster.probing`)."""

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
