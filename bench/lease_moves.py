"""A row of `bench.leases`: pods of whereabouts end on nodes that have moved over."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from bench.lease_cluster import LeaseCluster
from bench.lease_report import audited, say, times
from ipam.cluster.objects import Meta
from ipam.cluster.whereabouts.objects import (
    IPAllocation,
    IPPool,
    IPPoolSpec,
    OverlappingRangeIPReservation,
    OverlappingReservationSpec,
)
from tests.api.whereabouts import NAMESPACE, install_kinds

NODES = 16
SANDBOXES = 512
FAULTY = 0.3  # of the requests
RANGE = "10.4.0.0/22"


def a4(cluster: LeaseCluster) -> None:
    """512 DELs at once on 16 nodes, of sandboxes of whereabouts (`Read`): 30 % of the requests
    fail, and the server restarts once"""
    install_kinds(cluster.server)
    ipam = {**cluster.pool(RANGE, compat="Read"), "type": "whereabouts"}
    _hold(cluster)
    places = cluster.new_places(NODES, compat="Read")
    cluster.resume(places)
    by_node: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    for number in range(1, SANDBOXES + 1):
        by_node[places[number % NODES].name].append((f"old{number}", _container(number)))
    cluster.all("faults", FAULTY)
    for each in cluster.nodes:
        each.ask("departed", dict(by_node), ipam)
    began = time.monotonic()
    cluster.server.plane.stop_api_server()
    took = [one for each in cluster.nodes for node in each.answer() for one in node]
    say("DEL", times(took))
    say("until the last", f"{time.monotonic() - began:.2f} s")
    cluster.server.plane.start_api_server()
    cluster.all("faults", 0.0)
    began = time.monotonic()
    left: Mapping[str, int] = {}
    while (left := _left(cluster)) and time.monotonic() - began < 600.0:
        time.sleep(0.5)
    waited = time.monotonic() - began
    say("from the server's return until the objects are empty", f"{waited:.1f} s")
    say("left in them", dict(left) or "nothing")
    audited(cluster)
    assert not left


def _container(number: int) -> str:
    return f"{number:064x}"


def _hold(cluster: LeaseCluster) -> None:
    """What whereabouts holds: an entry and a reservation for each sandbox."""
    admin = cluster.server.admin
    held = {
        str(number): IPAllocation(id=_container(number), podref=f"ns/old{number}", ifname="net0")
        for number in range(1, SANDBOXES + 1)
    }
    name = RANGE.replace("/", "-")
    spec = IPPoolSpec(range=RANGE, allocations=held)
    admin.create(IPPool(metadata=Meta(name=name, namespace=NAMESPACE), spec=spec))
    for number, each in held.items():
        meta = Meta(name=f"10.4.{int(number) // 256}.{int(number) % 256}", namespace=NAMESPACE)
        reserved = OverlappingReservationSpec(podref=each.podref, ifname=each.ifname)
        admin.create(OverlappingRangeIPReservation(metadata=meta, spec=reserved))


def _left(cluster: LeaseCluster) -> Mapping[str, int]:
    admin = cluster.server.admin
    pools: Sequence[IPPool] = admin.list(IPPool).items
    counted = {
        "entries": sum(len(pool.spec.allocations or {}) for pool in pools),
        "reservations": len(admin.list(OverlappingRangeIPReservation).items),
    }
    return {what: count for what, count in counted.items() if count}


ROWS: dict[str, Callable[[LeaseCluster], None]] = {"a4": a4}
