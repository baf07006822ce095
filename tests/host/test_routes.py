"""Routes of several networks in one pod: the pod's first route stays in use."""

import json
from collections.abc import Iterator

import msgspec
import pytest

from host.namespaces import NetworkNamespace
from host.netlink import interface_addresses, links
from host.netlink.interface_addresses import Hop, Routes
from host.netlink.sockets import Rtnetlink, netlink
from tests.netns import ip, namespace

NETWORKS = ("eth0", "net1", "net2")
BOTH_FAMILIES = pytest.mark.parametrize(
    ("network", "default", "far"),
    [("10.1.0.{}/24", "0.0.0.0/0", "192.0.2.{}"), ("fd01::{}/64", "::/0", "2001:db8::{}")],
    ids=["ipv4", "ipv6"],
)


class Pod:
    """A namespace with three interfaces, whose networks have one prefix."""

    def __init__(self, name: str, space: NetworkNamespace, route: Rtnetlink) -> None:
        self.name = name
        self._space = space
        self.route = route

    def attach(self, interface: str, cidr: str, *hops: Hop) -> None:
        self.ip("link", "add", "name", interface, "type", "veth", "peer", f"{interface}-far")
        self.ip("link", "set", f"{interface}-far", "up")
        link = links.require(self.route, interface)
        link = interface_addresses.configure(self.route, self._space, link, [cidr])
        interface_addresses.add_routes(self.route, link, hops)

    def ip(self, *arguments: str) -> str:
        return ip("-n", self.name, *arguments)

    def ways_to(self, far: str) -> set[str]:
        """The interfaces through which the kernel sends to 32 addresses."""
        addresses = (far.format(number) for number in range(1, 33))
        return {json.loads(self.ip("-j", "route", "get", each))[0]["dev"] for each in addresses}

    def has(self, *hops: Hop) -> bool:
        seen = Routes(self.route)
        return all(seen.has(hop) for hop in hops)


@pytest.fixture
def pod() -> Iterator[Pod]:
    with (
        namespace() as path,
        NetworkNamespace.open(str(path)) as space,
        netlink(space) as route,
    ):
        yield Pod(path.name, space, route)


@BOTH_FAMILIES
@pytest.mark.parametrize("through_gateway", [True, False])
@pytest.mark.parametrize("priority", [0, 50])
def test_first_network_keeps_the_traffic_until_it_is_detached(
    pod: Pod, network: str, default: str, far: str, through_gateway: bool, priority: int
) -> None:
    gateway = network.format(1).partition("/")[0] if through_gateway else None
    hop = Hop(destination=default, gateway=gateway, priority=priority)
    for number, name in enumerate(NETWORKS):
        pod.attach(name, network.format(10 + number), hop)
        assert pod.has(hop)
    for number, name in enumerate(NETWORKS):
        assert pod.ways_to(far) == {name}
        assert pod.has(hop)
        pod.ip("link", "delete", NETWORKS[number])
    assert not pod.has(hop)


@BOTH_FAMILIES
def test_route_without_priority_is_behind_one_with_a_higher_metric(
    pod: Pod, network: str, default: str, far: str
) -> None:
    gateway = network.format(1).partition("/")[0]
    pod.attach("eth0", network.format(10))
    family = "-6" if ":" in far else "-4"
    metric = ("via", gateway, "dev", "eth0", "metric", "4000")
    pod.ip(family, "route", "add", "default", *metric)
    pod.ip(family, "route", "add", "unreachable", "default", "metric", str(0xFFFFFFFF))
    pod.attach("net1", network.format(11), Hop(destination=default, gateway=gateway))
    assert pod.ways_to(far) == {"eth0"}


def test_routes_of_two_families_and_tables_do_not_touch_each_other(pod: Pod) -> None:
    hops = [
        Hop(destination=destination, table=table)
        for destination in ("0.0.0.0/0", "::/0", "fd02::/64")
        for table in (None, 100)
    ]
    pod.attach("eth0", "fd01::1/64", *hops)
    listed = json.loads(pod.ip("-6", "-j", "route", "show", "table", "all", "proto", "static"))
    assert {(each["dst"], each["metric"]) for each in listed} == {
        ("default", 1024),
        ("fd02::/64", 1024),
    }


def test_check_finds_a_route_inside_a_multipath_route(pod: Pod) -> None:
    """The kernel makes such a route if another plugin appends a route to ours."""
    hop = Hop(destination="fd09::/64", gateway="fd01::1")
    pod.attach("net1", "fd01::10/64", hop)
    pod.attach("net2", "fd01::11/64")
    append = ("-6", "route", "append", "fd09::/64", "dev", "net2", "via")
    pod.ip(*append, "fd01::2")
    pod.ip(*append, "fd01::3")
    (listed,) = json.loads(pod.ip("-6", "-j", "route", "show", "fd09::/64"))
    assert len(listed["nexthops"]) == 3
    others = [msgspec.structs.replace(hop, gateway=f"fd01::{number}") for number in (2, 3, 4)]
    assert pod.has(hop, *others[:2])
    assert not pod.has(others[2])
