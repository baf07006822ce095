"""`python -m bench.leases [ROW ...]`: cluster-wide addresses on a real etcd and API server.

The nodes are the plugin, the store and the lessee of agents, in some processes of this machine; the
API server, etcd and the controller run beside them, on the same CPUs. After each row an auditor
compares all stores with all objects.
"""

import argparse
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence

from bench.lease_cluster import LeaseCluster, audit, lease_cluster
from bench.lease_nodes import Did
from ipam.addresses import parse

SETTLES = 60.0  # seconds within which stores and objects agree


def main() -> None:
    """Do the rows that the command line names, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", choices=[[], *ROWS], metavar="ROW")
    parser.add_argument("--cold", type=int, default=128, help="nodes of rows a2 (default: 128)")
    arguments = parser.parse_args()
    for name in arguments.rows or list(ROWS):
        # Each has an API server of its own: what one leaves behind costs the next nothing.
        with lease_cluster() as cluster:
            cluster.cold = arguments.cold
            print(f"\n{name}: {ROWS[name].__doc__}", flush=True)
            ROWS[name](cluster)


def _say(what: str, value: object) -> None:
    print(f"    {what:<40} {value}", flush=True)


def _times(seconds: Sequence[float]) -> str:
    if len(seconds) < 2:
        return f"{len(seconds)} calls"
    p50, p99 = statistics.median(seconds), statistics.quantiles(seconds, n=100)[98]
    return (
        f"p50 {p50 * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms, longest {max(seconds) * 1e3:.0f} ms "
        f"({len(seconds)} calls)"
    )


def _summed(done: Sequence[Did]) -> tuple[list[float], Counter[int], list[str]]:
    seconds = [each for did in done for each in did.seconds]
    errors: Counter[int] = Counter()
    for did in done:
        errors += did.errors
    return seconds, errors, [text for did in done for text in did.failed]


def _told(done: Sequence[Did], began: float | None = None) -> list[float]:
    """Print what ADDs did, and if they all `began` then, how long the last one took."""
    seconds, errors, failed = _summed(done)
    if began is not None:
        _say("until the last", f"{max(did.ended for did in done) - began:.2f} s")
    _say("ADD", _times(seconds))
    _say("answers with an error, by code", dict(errors) or "none")
    _say("ADDs that failed for good", failed[:2] or "none")
    return seconds


def _told_of(when: str, done: list[Did]) -> list[Did]:
    _say(f"ADD {when}", _times([each for did in done for each in did.seconds]))
    return done


def _calls(cluster: LeaseCluster, before: Counter[str]) -> int:
    counted = cluster.requests() - before
    _say("requests about our objects", ", ".join(f"{n} {v}" for v, n in sorted(counted.items())))
    return counted.total()


def _audited(cluster: LeaseCluster) -> None:
    """Stores and objects are read one after the other, and nodes may lease ahead meanwhile."""
    end = time.monotonic() + SETTLES
    while True:
        found = audit(cluster)
        wrong = {what: count for what, count in found.items() if what != "addresses" and count}
        if not wrong or found["duplicates"] or time.monotonic() > end:
            break
        time.sleep(1.0)
    _say("auditor", found)
    assert not wrong, wrong


def a1(cluster: LeaseCluster) -> None:
    """64 nodes, warm, each ADD and DEL in a closed loop for 60 s."""
    _churn(cluster, [cluster.pool("10.0.0.0/16", "a1")], nodes=64)


def a20(cluster: LeaseCluster) -> None:
    """64 nodes, IPv6 /64 and dual stack (an IPv4 pool beside it), as A1."""
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
    seconds = _told(cluster.all("churn", 60.0, 0.0, ipams))
    calls = _calls(cluster, before)
    _say("ADDs (and as many DELs) a second", f"{len(seconds) / 60:.0f}")
    _say("requests for each ADD", f"{calls / len(seconds):.5f}")
    states = cluster.states()
    claims, lost = sum(each.claims for each in states), sum(each.conflicts for each in states)
    _say("claims, and those that others won", f"{claims}, {lost}")
    _say("tries of a claim, at the node with most", max(1 + each.conflicts for each in states))
    _audited(cluster)


def a2(cluster: LeaseCluster) -> None:
    """128 nodes, cold: one pod with 16 interfaces on each, all at once. One pool."""
    one = cluster.pool("10.0.0.0/15", "one")
    _cold(cluster, [one] * 16)


def a2_pools(cluster: LeaseCluster) -> None:
    """The same with 16 pools, an interface of each."""
    many = [cluster.pool(f"10.{16 + each}.0.0/16", f"rail{each}") for each in range(16)]
    _cold(cluster, many)


def a2_rails(cluster: LeaseCluster) -> None:
    """The same with one pool of 16 rails: a pod has the same index on all."""
    ranges = [f"10.{32 + rail}.0.0/16" for rail in range(16)]
    rails = [cluster.pool(ranges[0], "rails", rails=tuple(ranges[1:]))]
    rails += [cluster.pool(range_, "rails") for range_ in ranges[1:]]
    _cold(cluster, rails)
    indexes = [{parse(address) & 0xFFFF for _, address in each.held} for each in cluster.states()]
    _say(
        "nodes whose pod has one index",
        f"{sum(len(each) == 1 for each in indexes)} of {cluster.cold}",
    )
    assert all(len(each) == 1 for each in indexes)
    assert len(set.union(*indexes)) == len(indexes)


def _cold(cluster: LeaseCluster, ipams: Sequence[dict[str, object]]) -> None:
    cluster.start(cluster.cold)
    before, used, began = cluster.requests(), cluster.cpu(), time.monotonic()
    _told(cluster.all("pods", ["cold"], ipams), began)
    used = cluster.cpu() - used
    _calls(cluster, before)
    spent = ", ".join(f"{what} {ms / 1e3:.1f} s" for what, ms in sorted(used.items()))
    _say("CPU time", f"{spent}, {used.total() / 1e3:.1f} s in all")
    _audited(cluster)


def a3(cluster: LeaseCluster) -> None:
    """512 DELs at once on 16 nodes: 30 % of the requests fail, and the server restarts once."""
    pods, interfaces = [f"p{number}" for number in range(8)], 4
    ipam = cluster.pool("10.0.0.0/20", "a3", block_size=8)
    cluster.start(16)
    cluster.all("pods", pods, [ipam] * interfaces)
    _audited(cluster)
    cluster.all("faults", 0.3)
    for each in cluster.nodes:
        each.ask("deletions", pods, interfaces)
    began = time.monotonic()
    cluster.server.plane.stop_api_server()
    took = [one for each in cluster.nodes for node in each.answer() for one in node]
    _say("DEL", _times(took))
    _say("until the last", f"{time.monotonic() - began:.2f} s")
    cluster.server.plane.start_api_server()
    _say("addresses that stores still hold", sum(len(each.held) for each in cluster.states()))
    for _ in range(30):
        cluster.all("forward", 30.0)
        time.sleep(2.0)
    cluster.all("faults", 0.0)
    time.sleep(30.0)
    left = Counter(each.spec.holder.node for each in cluster.blocks())
    _say("blocks 15 min later, most on a node", f"{left.total()}, {max(left.values(), default=0)}")
    _audited(cluster)
    assert max(left.values(), default=0) <= 1


def a5(cluster: LeaseCluster) -> None:
    """The API server stands still for 60 s and is away for 60 s, at 10 min of the nodes' clocks; 16
    nodes with 1 ADD/s each. The agents of half of them are killed meanwhile."""
    ipam = cluster.pool("10.0.0.0/16", "a5")
    cluster.start(16)
    cluster.all("pods", ["stays"], [ipam])
    before = _told(cluster.all("churn", 30.0, 1.0, [ipam]))
    assert before
    plane = cluster.server.plane
    plane.send_signal("kube-apiserver", signal.SIGSTOP)
    cluster.all("forward", 600.0)
    done = _told_of("while it stands still", cluster.all("churn", 30.0, 1.0, [ipam]))
    half = cluster.nodes[: len(cluster.nodes) // 2]
    for each in half:
        each.kill()
        cluster.nodes.remove(each)
    for each in half:
        cluster.resume_blindly(each.places)
    done += _told_of("after half were killed", cluster.all("churn", 30.0, 1.0, [ipam]))
    plane.stop_api_server()
    done += _told_of("while it is away", cluster.all("churn", 60.0, 1.0, [ipam]))
    _told(done)
    began = time.monotonic()
    plane.start_api_server()
    ready = time.monotonic()
    while any(each.confirmed is None or each.confirmed > 60 for each in cluster.states()):
        time.sleep(0.2)
    _say("the server's start", f"{ready - began:.1f} s")
    _say("from then until all nodes are confirmed", f"{time.monotonic() - ready:.1f} s")
    total = cluster.requests().total()  # the server has counted from its start
    _say("requests a second since its start", f"{total / (time.monotonic() - began):.1f}")
    _audited(cluster)


def a12(cluster: LeaseCluster) -> None:
    """16 nodes, a pod in each of two ranges that overlap; then with a private one of each, whose
    addresses the others may have, too."""
    ranges = ("10.12.0.0/23", "10.12.0.0/24")
    for network, shared in (("a12", True), ("a12-private", False)):
        ipams = [cluster.pool(range_, network, shared=shared) for range_ in ranges]
        cluster.start(16)
        _told(cluster.all("pods", ["stays", "stays-too"], ipams))
        _told(cluster.all("churn", 60.0, 0.0, ipams))
        states = cluster.states()
        _say("addresses of pods", len({each for state in states for each in state.held}))
        given = [address for state in states for _, address in state.held]
        _say("of these, in both ranges", sum(count > 1 for count in Counter(given).values()))
        assert not shared or len(set(given)) == len(given)
        _audited(cluster)


def a16(cluster: LeaseCluster) -> None:
    """etcd is put back to a copy, after 16 nodes added pods. Others lease before these look."""
    ipam = cluster.pool("10.0.0.0/20", "a16", block_size=8)
    cluster.start(16)
    cluster.all("pods", [f"old{number}" for number in range(6)], [ipam])
    copy = cluster.server.plane.directory / "copy"
    cluster.server.plane.save_etcd(copy)
    cluster.all("pods", [f"new{number}" for number in range(40)], [ipam])
    _audited(cluster)
    before = {(each.instance, name) for each in cluster.states() for name in each.rows}
    cluster.server.plane.restore_etcd(copy)
    kept = {(each.spec.holder.instance, each.metadata.name) for each in cluster.blocks()}
    _say("blocks, and those that the API server forgot", f"{len(before)}, {len(before - kept)}")
    old, cluster.nodes = cluster.nodes, []
    cluster.resume(cluster.new_places(4))
    cluster.all("pods", [f"thief{number}" for number in range(100)], [ipam])
    cluster.nodes = old + cluster.nodes
    began = time.monotonic()
    cluster.all("forward", 460.0)  # a confirmation is due; the runbook restarts the agents
    while not _settled(cluster):
        assert time.monotonic() - began < 120.0
        time.sleep(0.5)
    _say("until each block is leased again or lost", f"{time.monotonic() - began:.1f} s")
    found = audit(cluster)
    states = cluster.states()
    lost = {name for each in states for name, row in each.rows.items() if row[1] == "lost"}
    _say("auditor", found)
    _say("blocks lost to others", len(lost))
    while not lost <= _named(cluster):
        assert time.monotonic() - began < 120.0
        time.sleep(1.0)
    _say("until events name all of them", f"{time.monotonic() - began:.1f} s")
    assert found["duplicates"] <= 8 * len(lost)
    assert not found["rows without object"]


def _named(cluster: LeaseCluster) -> set[str]:
    """The blocks whose loss an event tells."""
    events = cluster.server.send("GET", "/api/v1/events")[1]["items"]
    return {
        each["involvedObject"]["name"] for each in events if each["reason"] == "AddressBlockLost"
    }


def _settled(cluster: LeaseCluster) -> bool:
    found = audit(cluster)
    return not found["rows without object"] and not found["objects without row"]


def a21(cluster: LeaseCluster) -> None:
    """128 nodes with a pod each, 10 min idle by their clocks; then the controller, 60 s."""
    ipam = cluster.pool("10.0.0.0/16", "a21")
    cluster.start(128, leases=False)
    cluster.all("pods", ["stays"], [ipam])
    cluster.all("idle", 60)
    before = sum(sum(each.calls.values()) for each in cluster.states())
    cluster.all("idle", 600)
    states = cluster.states()
    calls = sum(sum(each.calls.values()) for each in states) - before
    _say("requests of 128 nodes a second", f"{calls / 600:.2f}")
    earlier = cluster.requests()
    time.sleep(60.0)
    counted = cluster.requests() - earlier
    _say("requests of the controller a second", f"{counted.total() / 60:.2f}")
    _audited(cluster)


ROWS: dict[str, Callable[[LeaseCluster], None]] = {
    "a1": a1,
    "a2": a2,
    "a2-pools": a2_pools,
    "a2-rails": a2_rails,
    "a3": a3,
    "a5": a5,
    "a12": a12,
    "a16": a16,
    "a20": a20,
    "a21": a21,
}

if __name__ == "__main__":
    main()
