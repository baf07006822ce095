"""Rows of `bench.leases`: nodes that die, and Node objects that are recreated."""

import time
from collections.abc import Callable

from bench.lease_cluster import LeaseCluster, audited, machine_ids, say, told
from ipam.controller.death_proofs import OUT_OF_SERVICE
from ipam.leases.objects import ReclaimSpec
from ipam.leases.sticky import is_let_go

GONE_AFTER, OFFLINE, MARGIN = 10.0, 30.0, 3.0  # seconds, in place of 10, 30 and 5 min
TAINTED_FOR = 60.0
LATE = 10.0  # seconds by which the controller may exceed these
SHORT = ReclaimSpec(node_gone_after=f"{GONE_AFTER:.0f}s", max_offline=f"{OFFLINE:.0f}s")
SILENT_FOR = 180.0  # seconds after which the controller examines the blocks of a silent node
NODES_MADE_AGAIN, CHURNING = 100, 90.0  # minimum seconds of the row


def a7(cluster: LeaseCluster) -> None:
    """Four nodes with a pod each; three die: Node deleted, tainted out-of-service, silent only.
    nodeGoneAfter 10 s, maxOffline 30 s, margin 3 s"""
    cluster.start_controller(MARGIN)
    ipam = cluster.pool("10.7.0.0/20", "a7", reclaim=SHORT)
    places = cluster.new_places(4)
    cluster.resume(places, processes=4)
    cluster.all("pods", ["pod"], [ipam])
    gone, tainted, silent, well = (place.name for place in places)
    for process in cluster.nodes[:3]:
        process.kill()
    cluster.nodes = cluster.nodes[3:]
    server, began = cluster.server, time.monotonic()
    server.remove_node(gone, pods=True)
    server.silent(tainted)
    server.silent(silent)
    taint = {"key": OUT_OF_SERVICE, "value": "nodeshutdown", "effect": "NoExecute"}
    _, node = server.send("GET", f"/api/v1/nodes/{tainted}")
    code, _ = server.send("PUT", f"/api/v1/nodes/{tainted}", {**node, "spec": {"taints": [taint]}})
    assert code == 200
    freed: dict[str, float] = {}
    while time.monotonic() - began < SILENT_FOR:
        holders = {each.spec.holder.node for each in cluster.blocks() if not is_let_go(each)}
        for name in {gone, tainted} - holders - freed.keys():
            freed[name] = time.monotonic() - began
        assert {silent, well} <= holders
        time.sleep(0.5)
    whole = GONE_AFTER + OFFLINE + MARGIN
    say(f"Node deleted: free after (at least {whole:.0f} s)", f"{freed[gone]:.1f} s")
    say(f"tainted: free after (at least {TAINTED_FOR:.0f} s)", f"{freed[tainted]:.1f} s")
    audited(cluster)
    assert whole <= freed[gone] <= whole + LATE
    assert TAINTED_FOR <= freed[tainted] <= TAINTED_FOR + LATE


def a8(cluster: LeaseCluster) -> None:
    """4 nodes, ADD and DEL in a loop; the Node of one is deleted and recreated 100 times"""
    cluster.start_controller(MARGIN)
    ipam = cluster.pool("10.8.0.0/20", "a8", reclaim=SHORT)
    places = cluster.new_places(4)
    cluster.resume(places, processes=4)
    cluster.all("pods", ["stays"], [ipam])
    name = places[0].name
    before = _leases(cluster, name)
    for each in cluster.nodes:
        each.ask("churn", CHURNING, 0.05, [ipam])
    for number in range(NODES_MADE_AGAIN):
        cluster.server.remove_node(name, pods=False)
        time.sleep(12.0 if number % 25 == 24 else 0.2)  # sometimes longer than nodeGoneAfter
        cluster.server.machine(name, **machine_ids(name))
        time.sleep(0.2)
    told(done := [did for each in cluster.nodes for did in each.answer()])
    after = _leases(cluster, name)
    say("blocks before and after with the same uid", f"{len(before.keys() & after.keys())}")
    audited(cluster)
    assert before.items() <= after.items()
    assert not any(did.errors for did in done)


def _leases(cluster: LeaseCluster, node: str) -> dict[str, str]:
    blocks = [each for each in cluster.blocks() if each.spec.holder.node == node]
    return {each.metadata.name: each.metadata.uid for each in blocks}


ROWS: dict[str, Callable[[LeaseCluster], None]] = {"a7": a7, "a8": a8}
