"""Row A13 at full size: `python -m bench.coexist`. As root.

Nodes of podfabric and nodes of the real whereabouts have one definition, and its reconciler (once a
minute) and its control loop run. whereabouts does a few ADDs a second on a small machine, and fewer
as its IPPool grows: it takes minutes until all pods are there.
"""

import argparse
import os
import random
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

from cni.spec.errors import CNIError, Code
from ipam.cluster.objects import AddressBlock
from ipam.cluster.whereabouts.objects import IPAllocation, IPPool, entries
from tests.api import test_whereabouts as small
from tests.api.server import ApiServer, api_server
from tests.api.test_whereabouts import CONTROL_LOOP, RECONCILER, Ledger, Theirs
from tests.api.whereabouts import BesideNode, Leader, in_pod, shared_pool
from tests.cluster import programs
from tests.cluster.peers import WHEREABOUTS
from tests.waiting import until

RANGE = "10.88.0.0/22"
IPAM = {"range": RANGE}
BLOCK = 16
STAYING = 20  # pods of whereabouts that stay
PODS = "/api/v1/namespaces/theirs/pods"


class Beside:
    """Both sides, and what they did."""

    def __init__(self, server: ApiServer, nodes: list[BesideNode], theirs: Theirs) -> None:
        self.server = server
        self.nodes = nodes
        self.theirs = theirs
        self.ledger = Ledger()
        self.added: Counter[str] = Counter()
        self.running: Counter[str] = Counter()
        self.most: Counter[str] = Counter()

    def churn(self, each: int, seconds: float) -> None:
        """Each node begins pods until it has `each`; then one of them ends for each that begins."""
        began = time.monotonic()

        def over() -> bool:
            return time.monotonic() - began > seconds

        threads = [
            threading.Thread(target=work, args=(number, each, over))
            for work in (self._ours, self._whereabouts)
            for number in range(len(self.nodes))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _ours(self, number: int, each: int, over: Callable[[], bool]) -> None:
        node, held, count = self.nodes[number], dict[str, str](), 0
        while not over():
            if len(held) >= each:
                pod = random.choice(sorted(held))
                self._dropped("ours", held.pop(pod))
                node.delete(pod, ipam=IPAM)
            pod, count = f"ours{number}-{count}", count + 1
            try:
                (address,) = node.add(pod, dict(IPAM))
            except CNIError as error:
                assert error.code in (Code.TRY_AGAIN, Code.NO_FREE_ADDRESS), error
                self.added[f"ours, error {int(error.code)}"] += 1
                node.delete(pod, ipam=IPAM)
            else:
                self._used("ours", address, pod)
                held[pod] = address
            node.steps(1, 3.0)
        for pod, address in held.items():
            self._dropped("ours", address)
            node.delete(pod, ipam=IPAM)

    def _whereabouts(self, number: int, each: int, over: Callable[[], bool]) -> None:
        held, count = dict[str, str](), 0
        while not over():
            if len(held) >= each:
                pod = random.choice(sorted(held))
                self._ends(pod, held.pop(pod))
            pod, count = f"theirs{number}-{count}", count + 1
            address = self.begins(pod, self.nodes[number].name)
            if address is not None:
                held[pod] = address
        for pod, address in held.items():
            self._ends(pod, address)

    def begins(self, pod: str, node: str) -> str | None:
        """A pod of whereabouts, with its Pod object; its address."""
        spec = {"nodeName": node, "containers": [{"name": "c", "image": "c"}]}
        self.server.make(PODS, {"metadata": {"name": pod}, "spec": spec})
        address = self.theirs.add(pod)
        if address is None:
            self.added["theirs, error"] += 1
            self.theirs.call("DEL", pod)
            self.server.send("DELETE", f"{PODS}/{pod}?gracePeriodSeconds=0")
            return None
        self._used("theirs", address, pod)
        _, found = self.server.send("GET", f"{PODS}/{pod}")
        found["metadata"]["annotations"] = small.their_status(address)
        self.server.send("PUT", f"{PODS}/{pod}", found)
        return address

    def _ends(self, pod: str, address: str) -> None:
        self._dropped("theirs", address)
        self.theirs.call("DEL", pod)
        self.server.send("DELETE", f"{PODS}/{pod}?gracePeriodSeconds=0")

    def _used(self, side: str, address: str, pod: str) -> None:
        self.ledger.use(address, pod)
        self.added[side] += 1
        self.running[side] += 1
        self.most[side] = max(self.most[side], self.running[side])

    def _dropped(self, side: str, address: str) -> None:
        self.ledger.drop(address)
        self.running[side] -= 1


def main() -> None:
    """Print what happened, and end with an error if an address was given twice."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=8, help="of each side")
    parser.add_argument("--pods", type=int, default=500, help="at a time, on all nodes")
    parser.add_argument("--seconds", type=float, default=600.0)
    arguments = parser.parse_args()
    plugin, reconciler, loop = programs.build([WHEREABOUTS, RECONCILER, CONTROL_LOOP])
    with ExitStack() as stack:
        directory = tempfile.TemporaryDirectory(prefix="podfabric-bench-", dir="/dev/shm")
        root = Path(stack.enter_context(directory))
        server = stack.enter_context(api_server())
        small.define(server, small.install_definitions(server))
        leader = stack.enter_context(shared_pool(server, "Coexist", RANGE, BLOCK, time.monotonic))
        leader.start()
        nodes = [_node(server, root, f"beside{number}") for number in range(arguments.nodes)]
        for node in nodes:
            stack.enter_context(closing(node))
        admin = server.plane.kubeconfig("admin")
        theirs = Theirs(plugin / "whereabouts", admin, root, IPAM)
        _start_helpers(stack, server, root, reconciler, loop, nodes[0].name)
        beside = Beside(server, nodes, theirs)
        staying = {
            f"stay{number}": beside.begins(f"stay{number}", nodes[0].name)
            for number in range(STAYING)
        }
        print(f"load average {os.getloadavg()[0]:.1f}", flush=True)
        beside.churn(arguments.pods // (2 * arguments.nodes), arguments.seconds)
        runs = (root / "reconciler.log").read_text().count("reconciler run succeeded")
        print(f"runs of the reconciler: {runs}", flush=True)
        _report(beside, leader, staying)


def _node(server: ApiServer, root: Path, name: str) -> BesideNode:
    return BesideNode(server.node(name), root / name, name)


def _start_helpers(
    stack: ExitStack, server: ApiServer, root: Path, reconciler: Path, loop: Path, node: str
) -> None:
    """The reconciler, and the control loop of a node, with the files that they find in pods."""
    (root / "reconciler/cron-schedule").mkdir(parents=True)
    (root / "reconciler/cron-schedule/config").write_text("* * * * *")
    executable = reconciler / "reconciler"
    stack.enter_context(in_pod(server, root / "reconciler", executable, root / "reconciler.log"))
    flat = root / "loop/host/etc/cni/net.d/whereabouts.d"
    flat.mkdir(parents=True)
    shutil.copy(root / "whereabouts.conf", flat)
    executable = loop / "controlloop"
    stack.enter_context(in_pod(server, root / "loop", executable, root / "loop.log", NODENAME=node))


def _report(beside: Beside, leader: Leader, staying: dict[str, str | None]) -> None:
    server = beside.server
    print(f"ADDs: {dict(beside.added)}; pods at a time: {dict(beside.most)}", flush=True)
    print(f"addresses in use twice: {beside.ledger.duplicates or 'none'}", flush=True)
    for node in beside.nodes:
        node.lessee.leaving = True
        node.steps(40, 15.0)
    blocks = server.admin.list(AddressBlock).items
    leader.change_to("Read")
    until(lambda: not any(each.is_placeholder for each in _left(server)), what="placeholders' end")
    left = _left(server)
    placeholders = sum(each.is_placeholder for each in left)
    print(f"after all nodes were drained, and Read: {len(blocks)} blocks, {placeholders} of ours")
    kept = {f"theirs/{pod}" for pod in staying} & {each.podref for each in left}
    print(f"entries of pods of whereabouts that stayed: {len(kept)} of {len(staying)}")
    assert not beside.ledger.duplicates
    assert not blocks
    assert not placeholders
    assert len(kept) == len(staying)


def _left(server: ApiServer) -> list[IPAllocation]:
    pools = server.admin.list(IPPool).items
    return [entry.allocation for pool in pools for entry in entries(pool)]


if __name__ == "__main__":
    main()
