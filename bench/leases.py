"""`python -m bench.leases [ROW ...]`: cluster-wide addresses on a real etcd and API server.

The nodes are the plugin, the store and the lessee of agents, in some processes of this machine. The
API server, etcd and the controller run on the same CPUs. After each row an auditor
compares all stores with all objects.
"""

import argparse
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from bench import lease_full, lease_losses
from bench.lease_cluster import (
    LeaseCluster,
    audit,
    audited,
    cpu,
    lease_cluster,
    requested,
    say,
    times,
    told,
)
from bench.processes import in_threads
from ipam.addresses import MAPPED_FIRST, text
from ipam.leases.block_layout import block_name
from ipam.leases.objects import AddressBlock, BlockSpec, Holder
from kube.resources import Meta


def main() -> None:
    """Run the rows that the command line names, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", choices=[[], *ROWS], metavar="ROW")
    arguments = parser.parse_args()
    for name in arguments.rows or list(ROWS):
        # Each row has its own API server, so that no row leaves load for the next.
        with lease_cluster() as cluster:
            load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
            print(f"\n{name}: {ROWS[name].__doc__}\n    load average {load}", flush=True)
            ROWS[name](cluster)


def a0(cluster: LeaseCluster) -> None:
    """Leases that 1 and 16 clients make and give back for 15 s, with no address management. All
    other rates are relative to this ceiling."""
    kubeconfig = cluster.server.plane.kubeconfig("admin")
    for clients in (1, 16):
        took: list[float] = []
        end = time.monotonic() + 15.0

        def lease(number: int) -> None:
            first = MAPPED_FIRST | 10 << 24 | number << 8
            holder = Holder(instance="bench", node="bench")
            spec = BlockSpec(pool="bench-10.0.0.0-8", range=f"{text(first)}/27", holder=holder)
            block = AddressBlock(metadata=Meta(name=block_name("bench", first, 27)), spec=spec)
            client = cluster.server.client(kubeconfig)
            while time.monotonic() < end:  # noqa: B023
                began = time.monotonic()
                made = client.create(block)
                took.append(time.monotonic() - began)  # noqa: B023
                client.delete(made)

        in_threads(lease, range(clients))
        say(f"leases a second of {clients} clients", f"{len(took) / 15:.0f}")
        say("POST", times(took))


def a1(cluster: LeaseCluster) -> None:
    """64 nodes, warm, each ADD and DEL in a closed loop for 60 s."""
    _churn(cluster, [cluster.pool("10.0.0.0/16", "a1")], nodes=64)


def a20(cluster: LeaseCluster) -> None:
    """64 nodes, IPv6 /64 and dual stack (with an additional IPv4 pool), as A1."""
    _churn(cluster, [cluster.pool("fd00:20::/64", "a20")], nodes=64)
    both: dict[str, object] = {
        "ipRanges": [{"range": "10.20.0.0/16"}, {"range": "fd00:21::/64"}],
        "network_name": "both",
    }
    for range_ in ("10.20.0.0/16", "fd00:21::/64"):
        cluster.pool(range_, "both")
    _churn(cluster, [both], nodes=64)


def _churn(cluster: LeaseCluster, ipams: Sequence[dict[str, object]], nodes: int) -> None:
    cluster.start(nodes)
    cluster.all("pods", ["first"], ipams)
    before = cluster.requests()
    seconds = told(cluster.all("churn", 60.0, 0.0, ipams))
    calls = requested(cluster, before)
    say("ADDs (and as many DELs) a second", f"{len(seconds) / 60:.0f}")
    say("requests for each ADD", f"{calls / len(seconds):.5f}")
    states = cluster.states()
    claims, lost = sum(each.claims for each in states), sum(each.conflicts for each in states)
    say("claims, and those that others won", f"{claims}, {lost}")
    say("tries of a claim, at the node with most", max(1 + each.conflicts for each in states))
    audited(cluster)


def a2(cluster: LeaseCluster) -> None:
    """128 nodes, cold: one pod with 16 interfaces on each, all at once. One pool."""
    one = cluster.pool("10.0.0.0/15", "one")
    _cold(cluster, [one] * 16)


def a2_pools(cluster: LeaseCluster) -> None:
    """The same with 16 pools; each pod has an interface in each pool."""
    many = [cluster.pool(f"10.{16 + each}.0.0/16", f"rail{each}") for each in range(16)]
    _cold(cluster, many)


def _cold(cluster: LeaseCluster, ipams: Sequence[dict[str, object]]) -> None:
    cluster.start(128)
    before, used, began = cluster.requests(), cluster.cpu(), time.monotonic()
    told(cluster.all("pods", ["cold"], ipams), began=began)
    took = time.monotonic() - began
    requested(cluster, before)
    cpu(cluster, used, took)
    audited(cluster)


def a3(cluster: LeaseCluster) -> None:
    """512 DELs at once on 16 nodes: 30 % of the requests fail, and the server restarts once."""
    pods, interfaces = [f"p{number}" for number in range(8)], 4
    ipam = cluster.pool("10.0.0.0/20", "a3", block_size=8)
    cluster.start(16)
    cluster.all("pods", pods, [ipam] * interfaces)
    audited(cluster)
    cluster.all("faults", 0.3)
    for each in cluster.nodes:
        each.ask("deletions", pods, interfaces)
    began = time.monotonic()
    cluster.server.plane.stop_api_server()
    took = [one for each in cluster.nodes for node in each.answer() for one in node]
    say("DEL", times(took))
    say("until the last", f"{time.monotonic() - began:.2f} s")
    cluster.server.plane.start_api_server()
    say("addresses that stores still hold", sum(len(each.held) for each in cluster.states()))
    for _ in range(30):
        cluster.all("forward", 30.0)
        time.sleep(2.0)
    cluster.all("faults", 0.0)
    time.sleep(30.0)
    left = Counter(each.spec.holder.node for each in cluster.blocks())
    say("blocks 15 min later, most on a node", f"{left.total()}, {max(left.values(), default=0)}")
    audited(cluster)
    assert max(left.values(), default=0) <= 1


def a5(cluster: LeaseCluster) -> None:
    """The API server hangs for 60 s, then is down for 60 s, at 10 min of the nodes' clocks; 16
    nodes with 1 ADD/s each. The agents of half of the nodes are killed meanwhile."""
    ipam = cluster.pool("10.0.0.0/16", "a5")
    cluster.start(16)
    cluster.all("pods", ["stays"], [ipam])
    churn = partial(cluster.all, "churn", 30.0, 1.0, [ipam])
    told(churn(), "before")
    plane = cluster.server.plane
    plane.send_signal("kube-apiserver", signal.SIGSTOP)
    cluster.all("forward", 600.0)
    told(churn(), "while it stands still")
    half = cluster.nodes[: len(cluster.nodes) // 2]
    for each in half:
        each.kill()
        cluster.nodes.remove(each)
    for each in half:
        cluster.resume_blindly(each.places)
    told(churn(), "after half were killed")
    plane.stop_api_server()
    told(churn() + churn(), "while it is away")
    began = time.monotonic()
    plane.start_api_server()
    ready = time.monotonic()
    while any(each.confirmed is None or each.confirmed > 60 for each in cluster.states()):
        time.sleep(0.2)
    say("the server's start", f"{ready - began:.1f} s")
    say("from then until all nodes are confirmed", f"{time.monotonic() - ready:.1f} s")
    total = cluster.requests().total()  # since the server's start
    say("requests a second since its start", f"{total / (time.monotonic() - began):.1f}")
    audited(cluster)


def a12(cluster: LeaseCluster) -> None:
    """16 nodes, a pod in each of two ranges that overlap; then with a private range of each,
    whose addresses pods of other domains may have too."""
    ranges = ("10.12.0.0/23", "10.12.0.0/24")
    for network, shared in (("a12", True), ("a12-private", False)):
        ipams = [cluster.pool(range_, network, shared=shared) for range_ in ranges]
        cluster.start(16)
        told(cluster.all("pods", ["stays", "stays-too"], ipams))
        told(cluster.all("churn", 60.0, 0.0, ipams))
        states = cluster.states()
        say("addresses of pods", len({each for state in states for each in state.held}))
        given = [address for state in states for _, address in state.held]
        say("of these, in both ranges", sum(count > 1 for count in Counter(given).values()))
        assert not shared or len(set(given)) == len(given)
        audited(cluster)


def a16(cluster: LeaseCluster) -> None:
    """etcd is restored from a copy, after 16 nodes added pods. Other nodes lease before these
    check."""
    ipam = cluster.pool("10.0.0.0/20", "a16", block_size=8)
    cluster.start(16)
    cluster.all("pods", [f"old{number}" for number in range(6)], [ipam])
    copy = cluster.server.plane.directory / "copy"
    cluster.server.plane.save_etcd(copy)
    cluster.all("pods", [f"new{number}" for number in range(40)], [ipam])
    audited(cluster)
    before = {(each.instance, name) for each in cluster.states() for name in each.rows}
    cluster.server.plane.restore_etcd(copy)
    kept = {(each.spec.holder.instance, each.metadata.name) for each in cluster.blocks()}
    say("blocks, and those that the API server forgot", f"{len(before)}, {len(before - kept)}")
    old, cluster.nodes = cluster.nodes, []
    cluster.resume(cluster.new_places(4))
    cluster.all("pods", [f"thief{number}" for number in range(100)], [ipam])
    cluster.nodes = old + cluster.nodes
    began = time.monotonic()
    cluster.all("forward", 460.0)  # a confirmation is due; the runbook restarts the agents
    while not _settled(cluster):
        assert time.monotonic() - began < 120.0
        time.sleep(0.5)
    say("until each block is leased again or lost", f"{time.monotonic() - began:.1f} s")
    found = audit(cluster)
    states = cluster.states()
    lost = {name for each in states for name, row in each.rows.items() if row[1] == "lost"}
    say("auditor", found)
    say("blocks lost to others", len(lost))
    while not lost <= _named(cluster):
        assert time.monotonic() - began < 120.0
        time.sleep(1.0)
    say("until events name all of them", f"{time.monotonic() - began:.1f} s")
    assert found["duplicates"] <= 8 * len(lost)
    assert not found["rows without object"]


def _named(cluster: LeaseCluster) -> set[str]:
    """The blocks whose loss an event reports."""
    events = cluster.server.send("GET", "/api/v1/events")[1]["items"]
    return {
        each["involvedObject"]["name"] for each in events if each["reason"] == "AddressBlockLost"
    }


def _settled(cluster: LeaseCluster) -> bool:
    found = audit(cluster)
    return not found["rows without object"] and not found["objects without row"]


def a21(cluster: LeaseCluster) -> None:
    """128 nodes with a pod each, idle for 10 min of their clocks; then the controller, 60 s."""
    ipam = cluster.pool("10.0.0.0/16", "a21")
    cluster.start(128, leases=False)
    cluster.all("pods", ["stays"], [ipam])
    cluster.all("idle", 60)
    before = sum(sum(each.calls.values()) for each in cluster.states())
    cluster.all("idle", 600)
    states = cluster.states()
    calls = sum(sum(each.calls.values()) for each in states) - before
    say("requests of 128 nodes a second", f"{calls / 600:.2f}")
    earlier = cluster.requests()
    time.sleep(60.0)
    counted = cluster.requests() - earlier
    say("requests of the controller a second", f"{counted.total() / 60:.2f}")
    audited(cluster)


ROWS: dict[str, Callable[[LeaseCluster], None]] = {
    "a0": a0,
    "a1": a1,
    "a2": a2,
    "a2-pools": a2_pools,
    "a3": a3,
    "a5": a5,
    "a12": a12,
    "a16": a16,
    "a20": a20,
    "a21": a21,
    **lease_losses.ROWS,
    **lease_full.ROWS,
}

if __name__ == "__main__":
    main()
