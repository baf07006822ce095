"""A real API server, the controller, and many nodes, for `bench.leases`; and their auditor."""

import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench.lease_nodes import NodeProcess, Place, State
from bench.processes import Cpu
from ipam.cluster.controller.reclaim import MARGIN
from ipam.cluster.names import pool_name
from ipam.cluster.objects import AddressBlock, AddressPool, Meta, PoolSpec
from tests.api.server import ApiServer, api_server
from tests.waiting import until

CHECKOUT = Path(__file__).resolve().parents[1]
_REQUESTS = re.compile(r"^apiserver_request_total\{(.*)\} (\d+)", re.MULTILINE)


class LeaseCluster:
    """The API server, and nodes in some processes. A row has networks of its own."""

    def __init__(self, server: ApiServer, directory: Path, processes: int) -> None:
        self.server = server
        request = {"expirationSeconds": 7200}
        self._account = server.kubeconfig("controller", request, account="podfabric-controller")
        self._controller: subprocess.Popen[bytes] | None = None
        self._directory = directory
        self._processes = processes
        self.nodes: list[NodeProcess] = []
        self.cold = 128  # nodes of the rows that begin with none
        self._made = 0

    def start_controller(self, margin: float = MARGIN, metrics: str = "") -> int:
        """`podfabric controller`, in place of the one that runs; its pid. It waits for `margin`
        seconds beyond maxOffline, and serves its metrics at that address."""
        self.stop_controller()
        program = (
            "from ipam.cluster.controller.rounds import Rounds; "
            f"Rounds.__init__.__kwdefaults__['margin'] = {margin}; "
            "from cli.main import main; main()"
        )
        words = ["controller", "--kubeconfig", str(self._account), "--metrics", metrics]
        with (self._directory / "controller.log").open("ab") as log:
            self._controller = subprocess.Popen(
                [sys.executable, "-c", program, *words], cwd=CHECKOUT, stderr=log
            )
        return self._controller.pid

    def stop_controller(self) -> None:
        """It gives its Lease back, so that the next one leads at once."""
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
        """New nodes; those of the last row end."""
        self.stop()
        self.resume(self.new_places(count, leases=leases))

    def new_places(self, count: int, *, leases: bool = True) -> list[Place]:
        """Node objects, tokens and directories of nodes."""
        places = []
        for _ in range(count):
            self._made += 1
            places.append(self.new_place(f"n{self._made}", leases=leases))
        return places

    def new_place(self, name: str, machine: str = "", *, leases: bool = True) -> Place:
        """A machine that has this name; a store of its own."""
        machine = machine or name
        self.server.node(name, **machine_ids(machine)).close()
        kubeconfig = self.server.plane.directory / f"{name}.kubeconfig"
        return Place(name, kubeconfig, self._directory / machine, leases=leases)

    def resume(self, places: Sequence[Place], processes: int = 0) -> None:
        """Agents of these nodes, over the stores that are there."""
        self.resume_blindly(places, processes or self._processes)
        if all(place.leases for place in places):
            until(lambda: all(each.confirmed is not None for each in self.states()), pause=0.5)

    def resume_blindly(self, places: Sequence[Place], processes: int = 1) -> None:
        """The same, without waiting until they are confirmed."""
        number = min(processes, len(places))
        self.nodes += [NodeProcess(places[index::number]) for index in range(number)]

    def stop(self) -> None:
        for each in self.nodes:
            each.kill()
        self.nodes = []

    def all(self, order: str, *arguments: object) -> list[Any]:
        """Give all nodes the order at once; what each answers."""
        for each in self.nodes:
            each.ask(order, *arguments)
        return [answer for each in self.nodes for answer in each.answer()]

    def states(self) -> list[State]:
        return self.all("state")

    def requests(self) -> Counter[str]:
        """How many the API server had about our objects, by verb and kind."""
        text = self.server.kubectl("get", "--raw", "/metrics")
        counted: Counter[str] = Counter()
        for labels, count in _REQUESTS.findall(text):
            found = dict(re.findall(r'(\w+)="([^"]*)"', labels))
            if found["group"] == "ipam.podfabric.io" and found["verb"] != "WATCH":
                counted[f"{found['verb']} {found['resource']}"] += int(count)
        return counted

    def cpu(self) -> Counter[str]:
        """Milliseconds of CPU that the processes have used, by what they are."""
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
    """What the Node object of a machine says of it."""
    return {"machineID": f"m-{machine}", "systemUUID": f"s-{machine}", "bootID": "boot-1"}


def audit(cluster: LeaseCluster, *, forgotten: bool = False) -> Mapping[str, int]:
    """What must be 0: addresses that two nodes hold, held ones in no usable row of their node, rows
    without their object and objects without their row (not if objects were `forgotten`)."""
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
        "rows without object": 0
        if forgotten
        else sum(leases.get(key) != uid for key, uid in usable.items()),
        "objects without row": sum(key not in rows for key in leases),
    }


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
