"""The largest allowed result costs one dump of the kernel's tables."""

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cni.attachments.results import Expected
from cni.spec import limits
from cni.spec.errors import CNIError
from cni.spec.result import Interface, IPConfig, Result, Route
from host.errors import HostError
from host.namespaces import NetworkNamespace
from host.netlink import interface_addresses, links
from host.netlink.interface_addresses import Hop, Routes
from host.netlink.links import Link
from host.netlink.sockets import Rtnetlink, netlink
from tests.netns import IP, namespace

CIDRS = [f"10.9.{number}.1/24" for number in range(limits.ADDRESSES)]
HOPS = [
    Hop(destination=f"10.{100 + number % 100}.{number}.0/24", gateway=f"10.9.{number % 64}.2")
    for number in range(limits.ROUTES)
]


class Pod:
    """A namespace with one end of a veth pair."""

    def __init__(self, path: Path, space: NetworkNamespace, route: Rtnetlink) -> None:
        self.path = path
        self.route = route
        interface_addresses.configure(route, space, links.require(route, "near"), CIDRS)
        self.link: Link = links.require(route, "near")

    def routes(self) -> list[tuple[str, str]]:
        """Destination and gateway of each route, as ip(8) shows them."""
        command = [IP, "-n", self.path.name, "-j", "route"]
        listed = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        return [(route["dst"], route.get("gateway", "")) for route in listed]


@pytest.fixture
def pod() -> Iterator[Pod]:
    with namespace() as path:
        link = ("link", "add", "near", "type", "veth", "peer", "far")
        subprocess.run([IP, "-n", path.name, *link], check=True)
        subprocess.run([IP, "-n", path.name, "link", "set", "far", "up"], check=True)
        with NetworkNamespace.open(str(path)) as space, netlink(space) as route:
            yield Pod(path, space, route)


def test_requested_routes_are_added(pod: Pod) -> None:
    hops = [
        *HOPS[:3],
        Hop(destination="0.0.0.0/0", gateway="192.0.2.1"),
        Hop(destination="10.200.0.0/16"),
        Hop(destination="10.201.0.0/16", gateway="10.9.0.2", table=1000, priority=7),
        Hop(destination="fd00:1::/64", gateway="fe80::1"),
    ]
    interface_addresses.add_routes(pod.route, pod.link, hops)
    seen = Routes(pod.route)
    assert all(seen.has(hop) for hop in hops)
    assert seen.has(Hop(destination="10.201.0.0/16", table=1000))
    for other in (
        Hop(destination="10.202.0.0/16"),
        Hop(destination=HOPS[0].destination, gateway="10.9.0.3"),
        Hop(destination=HOPS[0].destination, table=1000),
        Hop(destination="10.201.0.0/16", table=1000, priority=8),
        Hop(destination="10.201.0.0/16"),
        Hop(destination="::/0"),
    ):
        assert not seen.has(other)
    assert {("default", "192.0.2.1"), ("10.200.0.0/16", "")} <= set(pod.routes())


def test_many_routes_and_addresses_cost_one_look_at_the_kernel(pod: Pod) -> None:
    """No dump for each route, neither in ADD nor in CHECK."""
    started = time.thread_time()
    interface_addresses.add_routes(pod.route, pod.link, HOPS)
    expected = Expected(
        Result(
            ips=tuple(IPConfig(cidr, interface=0) for cidr in CIDRS),
            routes=tuple(Route(hop.destination, hop.gateway) for hop in HOPS),
        ),
        0,
        Interface("near"),
    )
    expected.compare_addresses(pod.route, pod.link)
    # It takes 0.1 s of CPU; with a dump for each route it takes more than 5 s.
    assert time.thread_time() - started < 1.0
    assert {(hop.destination, hop.gateway) for hop in HOPS} <= set(pod.routes())
    subprocess.run([IP, "-n", pod.path.name, "route", "delete", HOPS[200].destination], check=True)
    with pytest.raises(CNIError, match="is gone from the pod"):
        expected.compare_addresses(pod.route, pod.link)


def test_route_that_the_kernel_refuses_is_named(pod: Pod) -> None:
    with pytest.raises(HostError, match=rf"adding route {HOPS[1].destination} via "):
        interface_addresses.add_routes(pod.route, pod.link, [HOPS[0], HOPS[1], HOPS[1], HOPS[2]])
