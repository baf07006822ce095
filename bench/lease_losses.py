"""Rows of `bench.leases`: nodes that lose touch, or die, or come back under their name."""

import re
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence

from bench.lease_cluster import LeaseCluster, machine_ids
from bench.lease_nodes import Answer, NodeProcess, Place
from bench.lease_report import audited, say
from cni.spec.errors import Code
from ipam.cluster.controller.machines import OUT_OF_SERVICE
from ipam.cluster.objects import ReclaimSpec
from tests.cluster.control_plane import free_port
from tests.waiting import until

GONE_AFTER, OFFLINE, MARGIN = 10.0, 30.0, 3.0  # seconds, in place of 10, 30 and 5 min
TAINTED_FOR = 60.0
LATE = 10.0  # seconds that the controller may take beyond these
SHORT = ReclaimSpec(node_gone_after=f"{GONE_AFTER:.0f}s", max_offline=f"{OFFLINE:.0f}s")
SILENT_FOR = 180.0  # seconds after which the blocks of a silent node are looked at
NODES_MADE_AGAIN = 100


def a6(cluster: LeaseCluster) -> None:
    """8 nodes, the API server away, half an hour of the nodes' clocks: what new and old pods get"""
    ipam = cluster.pool("10.6.0.0/20", "a6")
    cluster.start(8)
    cluster.all("pods", ["old"], [ipam])
    first: list[Answer] = cluster.all("tried", "old-too", "old-too-1", ipam)
    cluster.server.plane.stop_api_server()
    cluster.all("forward", 1790.0)
    within: list[Answer] = cluster.all("tried", "within", "within-1", ipam)
    say("new pods within maxOffline", _codes(within))
    cluster.all("forward", 20.0)
    beyond: list[Answer] = cluster.all("tried", "new", "new-1", ipam)
    say("new pods beyond it, by code", _codes(beyond))
    say("one of the errors", beyond[0].text)
    again: list[Answer] = cluster.all("tried", "old-too", "old-too-2", ipam)
    same = sum(one.address == two.address for one, two in zip(first, again, strict=True))
    say("new sandboxes of old pods with their address", f"{same} of {len(again)}")
    cluster.server.plane.start_api_server()
    began = time.monotonic()
    while any(each.code for each in cluster.all("tried", "new", "new-1", ipam)):
        assert time.monotonic() - began < 60.0
    say("from the server's return until new pods run", f"{time.monotonic() - began:.1f} s")
    audited(cluster)
    assert all(each.address for each in within)
    assert {each.code for each in beyond} == {Code.TRY_AGAIN}
    assert same == len(again)


def _codes(answers: Sequence[Answer]) -> str:
    return ", ".join(sorted({f"{each.code}" if each.code else "an address" for each in answers}))


def a7(cluster: LeaseCluster) -> None:
    """Four nodes with a pod each; three die: Node deleted, tainted out-of-service, silent only.
    nodeGoneAfter 10 s, maxOffline 30 s, margin 3 s"""
    metrics = f"127.0.0.1:{free_port()}"
    cluster.start_controller(MARGIN, metrics)
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
        holders = {block.spec.holder.node for block in cluster.blocks()}
        for name in {gone, tainted} - holders - freed.keys():
            freed[name] = time.monotonic() - began
        assert {silent, well} <= holders
        time.sleep(0.5)
    whole = GONE_AFTER + OFFLINE + MARGIN
    say(f"Node deleted: free after (at least {whole:.0f} s)", f"{freed[gone]:.1f} s")
    say(f"tainted: free after (at least {TAINTED_FOR:.0f} s)", f"{freed[tainted]:.1f} s")
    say("silent: its block after 180 s", "is there")
    text = _scraped(metrics)
    say(
        "blocks quarantined, by the metric",
        _value(text, "podfabric_cluster_pool_blocks_quarantined"),
    )
    say(
        "blocks of silent nodes",
        _value(text, 'podfabric_cluster_blocks_by_holder{standing="silent"'),
    )
    audited(cluster)
    assert whole <= freed[gone] <= whole + LATE
    assert TAINTED_FOR <= freed[tainted] <= TAINTED_FOR + LATE


def _scraped(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
    return text


def _value(text: str, series: str) -> str:
    (line,) = re.findall(rf"^{re.escape(series)}.* (\S+)$", text, re.MULTILINE)
    return str(line)


def a8(cluster: LeaseCluster) -> None:
    """4 nodes, ADD and DEL in a loop; the Node of one is deleted and made again 100 times. Then
    another machine gets the name"""
    cluster.start_controller(MARGIN)
    ipam = cluster.pool("10.8.0.0/20", "a8", reclaim=SHORT)
    places = cluster.new_places(4)
    cluster.resume(places, processes=4)
    cluster.all("pods", ["stays"], [ipam])
    name = places[0].name
    before = _leases(cluster, name)
    churns = _Churns(cluster.nodes, ipam)
    for number in range(NODES_MADE_AGAIN):
        cluster.server.remove_node(name, pods=False)
        time.sleep(12.0 if number % 25 == 24 else 0.2)  # longer than nodeGoneAfter now and then
        cluster.server.machine(name, **machine_ids(name))
        time.sleep(0.2)
    added = churns.ended()
    say("ADDs meanwhile, and answers with an error", f"{added[0]}, {added[1]}")
    after = _leases(cluster, name)
    say("blocks before and after with the same uid", f"{len(before.keys() & after.keys())}")
    audited(cluster)
    assert before.items() <= after.items()
    assert not added[1]
    _another_machine(cluster, places[0], ipam)


class _Churns:
    """ADD and DEL on all nodes, in threads, until `ended`."""

    def __init__(self, nodes: Sequence[NodeProcess], ipam: object) -> None:
        self._over = threading.Event()
        self._added = [[0, 0] for _ in nodes]
        self._threads = [
            threading.Thread(target=self._run, args=(node, ipam, counts))
            for node, counts in zip(nodes, self._added, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, node: NodeProcess, ipam: object, counts: list[int]) -> None:
        while not self._over.is_set():
            node.ask("churn", 1.0, 0.05, [ipam])
            for did in node.answer():
                counts[0] += len(did.seconds)
                counts[1] += did.errors.total()

    def ended(self) -> tuple[int, int]:
        self._over.set()
        for thread in self._threads:
            thread.join()
        return sum(each[0] for each in self._added), sum(each[1] for each in self._added)


def _leases(cluster: LeaseCluster, node: str) -> dict[str, str]:
    blocks = [each for each in cluster.blocks() if each.spec.holder.node == node]
    return {each.metadata.name: each.metadata.uid for each in blocks}


def _another_machine(cluster: LeaseCluster, place: Place, ipam: object) -> None:
    """Row A9."""
    old = _leases(cluster, place.name)
    (process,) = [each for each in cluster.nodes if place in each.places]
    process.kill()
    cluster.nodes.remove(process)
    cluster.server.remove_node(place.name, pods=True)
    began = time.monotonic()
    cluster.resume([cluster.new_place(place.name, "another-machine")], processes=1)
    cluster.nodes[-1].ask("pods", ["first"], [ipam])
    (did,) = cluster.nodes[-1].answer()
    assert not did.failed, did.failed
    new = _leases(cluster, place.name).keys() - old.keys()
    say("another machine of the name: new blocks", len(new))
    quarantined = old.keys() & _leases(cluster, place.name).keys()
    say("of the former one, quarantined", f"{len(quarantined)} of {len(old)}")
    until(lambda: not old.keys() & _leases(cluster, place.name).keys(), 120.0, pause=0.5)
    waited = time.monotonic() - began
    whole = GONE_AFTER + OFFLINE + MARGIN
    say(f"these are free after (at least {whole:.0f} s)", f"{waited:.1f} s")
    audited(cluster)
    assert new
    assert quarantined == old.keys()
    assert whole <= waited <= whole + LATE


ROWS: dict[str, Callable[[LeaseCluster], None]] = {"a6": a6, "a7": a7, "a8": a8}
