"""What the rows of `bench.leases` print of ADDs, requests and the auditor."""

import statistics
import time
from collections import Counter
from collections.abc import Sequence

from bench.lease_cluster import LeaseCluster, audit
from bench.lease_nodes import Did

SETTLES = 60.0  # seconds within which stores and objects agree


def say(what: str, value: object) -> None:
    """A line of the row."""
    print(f"    {what:<40} {value}", flush=True)


def times(seconds: Sequence[float]) -> str:
    """Quantiles of how long calls took, in milliseconds."""
    if len(seconds) < 2:
        return f"{len(seconds)} calls"
    p50, p99 = statistics.median(seconds), statistics.quantiles(seconds, n=100)[98]
    return (
        f"p50 {p50 * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms, longest {max(seconds) * 1e3:.0f} ms "
        f"({len(seconds)} calls)"
    )


def _seconds(done: Sequence[Did]) -> list[float]:
    return [each.seconds for did in done for each in did.took]


def _summed(done: Sequence[Did]) -> tuple[list[float], Counter[int], list[str]]:
    seconds = _seconds(done)
    errors: Counter[int] = Counter()
    for did in done:
        errors += did.errors
    return seconds, errors, [text for did in done for text in did.failed]


def told(done: Sequence[Did], began: float | None = None) -> list[float]:
    """Print what ADDs did, and if they all `began` then, how long the last one took."""
    seconds, errors, failed = _summed(done)
    if began is not None:
        say("until the last", f"{max(did.ended for did in done) - began:.2f} s")
    say("ADD", times(seconds))
    say("answers with an error, by code", dict(errors) or "none")
    say("ADDs that failed for good", failed[:2] or "none")
    return seconds


def told_of(when: str, done: list[Did]) -> list[Did]:
    """Print how long ADDs took, and how much CPU time; answers them."""
    say(f"ADD {when}", times(_seconds(done)))
    say("    its CPU time", times([each.cpu for did in done for each in did.took]))
    return done


def requested(cluster: LeaseCluster, before: Counter[str]) -> int:
    """Print and count the requests about our objects since `before`."""
    counted = cluster.requests() - before
    say("requests about our objects", ", ".join(f"{n} {v}" for v, n in sorted(counted.items())))
    return counted.total()


def cpu(cluster: LeaseCluster, before: Counter[str], seconds: float) -> None:
    """Print the CPU time since `before`, so many seconds ago: others have the rest of the CPUs."""
    used = cluster.cpu() - before
    spent = ", ".join(f"{what} {ms / 1e3:.1f} s" for what, ms in sorted(used.items()))
    say("CPU time", f"{spent}, {used.total() / 1e3:.1f} s in all, in {seconds:.1f} s")


def audited(cluster: LeaseCluster) -> None:
    """Stores and objects are read one after the other, and nodes may lease ahead meanwhile."""
    end = time.monotonic() + SETTLES
    while True:
        found = audit(cluster)
        wrong = {what: count for what, count in found.items() if what != "addresses" and count}
        if not wrong or found["duplicates"] or time.monotonic() > end:
            break
        time.sleep(1.0)
    say("auditor", found)
    assert not wrong, wrong
