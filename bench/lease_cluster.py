"""A real API server, the controller, and many nodes for `bench.leases`, with their auditor and
their output."""

import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench.lease_nodes import Did, NodeProcess, Place, State
from bench.processes import Cpu
from ipam.controller.reclaim import MARGIN
from ipam.leases.block_layout import pool_name
from ipam.leases.objects import AddressBlock, AddressPool, PoolSpec
from kube.resources import Meta
from tests.api.server import ApiServer, api_server
from tests.waiting import until

SETTLES = 60.0  # seconds within which stores and objects agree
CHECKOUT = Path(__file__).resolve().parents[1]
_REQUESTS = re.compile(r"^apiserver_request_total\{(.*)\} (\d+)", re.MULTILINE)


class LeaseCluster:
    """The API server, and nodes in some processes. Each row has networks of its own."""

    def __init__(self, server: ApiServer, directory: Path, processes: int) -> None:
        self.server = server
        request = {"expirationSeconds": 7200}
        self._account = server.kubeconfig("controller", request, account="podfabric-controller")
        self._controller: subprocess.Popen[bytes] | None = None
        self._directory = directory
        self._processes = processes
        self.nodes: list[NodeProcess] = []
        self._made = 0

    def start_controller(self, margin: float = MARGIN) -> int:
        """Start `podfabric controller` in place of the running one; returns its pid. It waits
        for `margin` seconds beyond maxOffline."""
        self.stop_controller()
        program = (
            "from ipam.controller.rounds import Rounds; "
            f"Rounds.__init__.__kwdefaults__['margin'] = {margin}; "
            "from cli.main import main; main()"
        )
        words = ["controller", "--kubeconfig", str(self._account), "--metrics", ""]
        with (self._directory / "controller.log").open("ab") as log:
            self._controller = subprocess.Popen(
                [sys.executable, "-c", program, *words], cwd=CHECKOUT, stderr=log
            )
        return self._controller.pid

    def stop_controller(self) -> None:
        """Stop the controller. It gives its Lease back, so the next one leads immediately."""
        if self._controller is not None:
            self._controller.terminate()
            self._controller.wait()
            self._controller = None

    def pool(
        self,
        range_: str,
        network: str = "",
        *,
        shared: bool = True,
        **spec: Any,  # noqa: ANN401
    ) -> dict[str, object]:
        """A pool that is Ready, and the `ipam` object of its definition."""
        made = AddressPool(
            metadata=Meta(name=pool_name(network, range_, shared=shared)),
            spec=PoolSpec(range=range_, network_name=network, shared=shared, **spec),
        )
        self.server.admin.create(made)
        until(lambda: self._is_ready(made.metadata.name), what=f"Ready {made.metadata.name}")
        private = {} if shared else {"enable_overlapping_ranges": False}
        return {"range": range_, "network_name": network, **private}

    def _is_ready(self, name: str) -> bool:
        conditions = self.server.admin.get(AddressPool, name).status.conditions
        return any(each.type == "Ready" and each.status == "True" for each in conditions)

    def start(self, count: int, *, leases: bool = True) -> None:
        """Start new nodes; the nodes of the last row end."""
        self.stop()
        self.resume(self.new_places(count, leases=leases))

    def new_places(self, count: int, *, leases: bool = True) -> list[Place]:
        """Node objects, tokens and directories of nodes."""
        places = []
        for _ in range(count):
            self._made += 1
            name = f"n{self._made}"
            self.server.node(name, **machine_ids(name)).close()
            kubeconfig = self.server.plane.directory / f"{name}.kubeconfig"
            places.append(Place(name, kubeconfig, self._directory / name, leases=leases))
        return places

    def resume(self, places: Sequence[Place], processes: int = 0) -> None:
        """Start agents of these nodes over their existing stores."""
        self.resume_blindly(places, processes or self._processes)
        if all(place.leases for place in places):
            until(lambda: all(each.confirmed is not None for each in self.states()), pause=0.5)

    def resume_blindly(self, places: Sequence[Place], processes: int = 1) -> None:
        """Do the same as `resume`, without waiting until the agents are confirmed."""
        number = min(processes, len(places))
        self.nodes += [NodeProcess(places[index::number]) for index in range(number)]

    def stop(self) -> None:
        for each in self.nodes:
            each.kill()
        self.nodes = []

    def all(self, order: str, *arguments: object) -> list[Any]:
        """Give all nodes the order at once; returns the answer of each."""
        for each in self.nodes:
            each.ask(order, *arguments)
        return [answer for each in self.nodes for answer in each.answer()]

    def states(self) -> list[State]:
        return self.all("state")

    def requests(self) -> Counter[str]:
        """The number of requests about our objects at the API server, by verb and kind."""
        text = self.server.kubectl("get", "--raw", "/metrics")
        counted: Counter[str] = Counter()
        for labels, count in _REQUESTS.findall(text):
            found = dict(re.findall(r'(\w+)="([^"]*)"', labels))
            if found["group"] == "ipam.podfabric.io" and found["verb"] != "WATCH":
                counted[f"{found['verb']} {found['resource']}"] += int(count)
        return counted

    def cpu(self) -> Counter[str]:
        """Milliseconds of CPU that the processes have used, by their role."""
        of = [*self.server.plane.pids().items()]
        if self._controller is not None:
            of.append(("controller", self._controller.pid))
        of += [("nodes", each.pid) for each in self.nodes]
        used: Counter[str] = Counter()
        for what, pid in of:
            used[what] += round(Cpu.of(pid).total * 1e3)
        return used

    def blocks(self) -> tuple[AddressBlock, ...]:
        return self.server.admin.list(AddressBlock).items


def machine_ids(machine: str) -> dict[str, str]:
    """The identities of a machine in its Node object."""
    return {"machineID": f"m-{machine}", "systemUUID": f"s-{machine}", "bootID": "boot-1"}


def audit(cluster: LeaseCluster) -> Mapping[str, int]:
    """Counts that must be 0: addresses that two nodes hold, rows without their object, and
    objects without their row."""
    states = cluster.states()
    objects = {each.metadata.name: each for each in cluster.blocks()}
    held = Counter(each for state in states for each in set(state.held))
    rows = {(state.instance, name): row for state in states for name, row in state.rows.items()}
    instances = {state.instance for state in states}
    leases = {
        (each.spec.holder.instance, name): each.metadata.uid
        for name, each in objects.items()
        if each.spec.holder.instance in instances
    }
    usable = {key: uid for key, (uid, state) in rows.items() if state == "usable"}
    return {
        "addresses": len(held),
        "duplicates": sum(count > 1 for count in held.values()),
        "rows without object": sum(leases.get(key) != uid for key, uid in usable.items()),
        "objects without row": sum(key not in rows for key in leases),
    }


def say(what: str, value: object) -> None:
    """Print a line of the row."""
    print(f"    {what:<40} {value}", flush=True)


def times(seconds: Sequence[float]) -> str:
    """Quantiles of the calls' durations, in milliseconds."""
    if len(seconds) < 2:
        return f"{len(seconds)} calls"
    p50, p99 = statistics.median(seconds), statistics.quantiles(seconds, n=100)[98]
    return (
        f"p50 {p50 * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms, longest {max(seconds) * 1e3:.0f} ms "
        f"({len(seconds)} calls)"
    )


def told(done: Sequence[Did], when: str = "", *, began: float | None = None) -> list[float]:
    """Print the ADDs' results `when`. If they all `began` then, print the time of the last one
    too."""
    seconds = [each for did in done for each in did.seconds]
    errors: Counter[int] = Counter()
    for did in done:
        errors += did.errors
    if began is not None:
        say("until the last", f"{max(did.ended for did in done) - began:.2f} s")
    say(f"ADD {when}", times(seconds))
    say("answers with an error, by code", dict(errors) or "none")
    say("ADDs that failed for good", [text for did in done for text in did.failed][:2] or "none")
    return seconds


def requested(cluster: LeaseCluster, before: Counter[str]) -> int:
    """Print and count the requests about our objects since `before`."""
    counted = cluster.requests() - before
    say("requests about our objects", ", ".join(f"{n} {v}" for v, n in sorted(counted.items())))
    return counted.total()


def cpu(cluster: LeaseCluster, before: Counter[str], seconds: float) -> None:
    """Print the CPU time since `before`, `seconds` ago. Other programs use the rest of the CPUs."""
    used = cluster.cpu() - before
    spent = ", ".join(f"{what} {ms / 1e3:.1f} s" for what, ms in sorted(used.items()))
    say("CPU time", f"{spent}, {used.total() / 1e3:.1f} s in all, in {seconds:.1f} s")


def audited(cluster: LeaseCluster) -> None:
    """Print the audit. It reads stores first and objects second; nodes may lease ahead
    meanwhile."""
    end = time.monotonic() + SETTLES
    while True:
        found = audit(cluster)
        wrong = {what: count for what, count in found.items() if what != "addresses" and count}
        if not wrong or found["duplicates"] or time.monotonic() > end:
            break
        time.sleep(1.0)
    say("auditor", found)
    assert not wrong, wrong


@contextmanager
def lease_cluster(processes: int = 4) -> Iterator[LeaseCluster]:
    """A cluster for the block."""
    with ExitStack() as stack:
        directory = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="podfabric-leases-"))
        )
        server = stack.enter_context(api_server())
        cluster = LeaseCluster(server, directory, processes)
        stack.callback(cluster.stop_controller)
        cluster.start_controller()
        stack.callback(cluster.stop)
        yield cluster
