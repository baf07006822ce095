"""podfabric and the real whereabouts on one real API server: `python -m bench.whereabouts`.

Both sides start as a runtime starts them: a process for each ADD and DEL. Our processes ask agents,
each of which is a separate node with its own store; whereabouts' processes ask the API server. The
numbers are those of a machine with few CPUs, on which etcd and the API server run too: read the
ratios. The floor is the same number of processes that do nothing.

Needs `make cni`, and the sources of whereabouts where `tests.cluster.programs` looks for them.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from bench.processes import Side, in_threads, quantile
from tests.api.server import ApiServer, api_server
from tests.api.whereabouts import shared_pool
from tests.cluster import programs
from tests.cluster.peers import WHEREABOUTS
from tests.plugins.service import LAUNCHER, Service, install_launchers

OURS_RANGE, THEIR_RANGE = "10.90.0.0/16", "10.91.0.0/16"
NICS = 16  # per pod
AGENTS = 2
AGENT_CONFIG = 'agent: {listen: "", sweep: false}\nipam: {scope: cluster}\n'


class Contender:
    """One side on some nodes, which get its pods in turn."""

    def __init__(self, name: str, nodes: Sequence[Side]) -> None:
        self.name = name
        self._nodes = nodes

    def call(self, command: str, pod: int, ifname: str = "net1") -> int:
        """The exit status of one call for a pod."""
        side = self._nodes[pod % len(self._nodes)]
        args = {"CNI_ARGS": f"K8S_POD_NAMESPACE=bench;K8S_POD_NAME=p{pod}"}
        side = side._replace(variables={**side.variables, **args})
        return side.call(command, f"{pod:064x}", ifname=ifname).run()


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each number of clients")
    parser.add_argument("--pods", type=int, default=16, help=f"with {NICS} NICs each, at once")
    parser.add_argument("--most", type=float, default=600.0, help="seconds for all NICs")
    arguments = parser.parse_args()
    if not LAUNCHER.exists():
        sys.exit(f"{LAUNCHER} is missing: run make cni")
    (theirs_at,) = programs.build([WHEREABOUTS])
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        server = stack.enter_context(api_server())
        pool = shared_pool(server, "None", OURS_RANGE, 128, time.monotonic)
        stack.enter_context(pool).round()
        nodes = []
        for number in range(AGENTS):
            agent = _agent(server, root / f"node-{number}")
            stack.callback(agent.stop)
            agent.wait_until_ready()
            nodes.append(_side(agent))
        ours = Contender("podfabric", nodes)
        theirs = Contender("whereabouts", [_theirs(server, theirs_at / "whereabouts", root)])
        for side in (ours, theirs):
            for command in ("ADD", "DEL"):
                if code := side.call(command, 0):
                    sys.exit(f"{side.name}: {command}: exit status {code}")
        errors = stack.enter_context((root / "errors").open("wb"))
        stack.callback(os.dup2, os.dup(2), 2)
        os.dup2(errors.fileno(), 2)  # whereabouts logs each attempt
        _rates(ours, theirs, arguments.seconds)
        _nics(ours, theirs, arguments.pods, arguments.most)


def _rates(ours: Contender, theirs: Contender, seconds: float) -> None:
    print(
        f"{'ADD and DEL in turns':28}{'seconds':>10}{'rate':>11}{'p50':>12}{'p99':>12}{'failed':>8}"
    )
    floor = Contender("the processes alone", [Side(Path("/bin/true"))])
    for clients in (1, 16, 64):
        our, their, most = (_rate(side, clients, seconds) for side in (ours, theirs, floor))
        print(
            f"{'':4}{clients} clients: {our / max(their, 0.01):.0f} times; calls that do nothing "
            f"would be {most / max(their, 0.01):.0f} times",
            flush=True,
        )


def _rate(side: Contender, clients: int, seconds: float) -> float:
    tally = Tally()

    def churn(client: int) -> None:
        pod = 1_000_000 + client
        while time.monotonic() - tally.began < seconds:
            tally.add(lambda: side.call("ADD", pod))
            side.call("DEL", pod)

    in_threads(churn, range(clients))
    return tally.show(f"{side.name}, {clients} clients")


def _nics(ours: Contender, theirs: Contender, pods: int, most: float) -> None:
    print(f"\n{pods} pods at once, {NICS} NICs each, for {most:g} s at most")
    our, their = (_attached(side, pods, most) for side in (ours, theirs))
    print(f"{'':4}{our / max(their, 0.01):.0f} times as many a second", flush=True)


def _attached(side: Contender, pods: int, most: float) -> float:
    tally = Tally()

    def attach(pod: int) -> None:
        for nic in range(NICS):
            if time.monotonic() - tally.began > most:
                return
            tally.add(partial(side.call, "ADD", pod, f"net{nic}"))

    in_threads(attach, range(pods))
    return tally.show(side.name)


class Tally:
    """Counts of successful and failed calls since it was made, and the time of the first one."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self._ended = self.began
        self._took: list[float] = []
        self._failed = 0

    def add(self, call: Callable[[], int]) -> None:
        """Make the call, and count it by its exit status."""
        at = time.monotonic()
        failed = call() != 0
        self._ended = time.monotonic()
        if failed:
            self._failed += 1
        else:
            self._took.append(self._ended - at)

    def show(self, label: str) -> float:
        """Print a line; returns successes per second, from the first start to the last end."""
        seconds = self._ended - self.began
        rate = len(self._took) / seconds
        p50 = statistics.median(self._took) * 1e3 if self._took else 0.0
        p99 = quantile(self._took, 0.99) * 1e3 if self._took else 0.0
        print(
            f"{label:28}{seconds:8.1f} s{rate:9.1f}/s{p50:9.0f} ms{p99:9.0f} ms{self._failed:8}",
            flush=True,
        )
        return rate


# --- both sides ----------------------------------------------------------------------------------


def _side(agent: Service) -> Side:
    ipam = {"type": "whereabouts", "range": OURS_RANGE}
    executable = agent.root / "bin/podfabric-ipam"
    return Side(
        executable,
        {"type": "macvlan", "ipam": ipam},
        {"PODFABRIC_SOCKET": str(agent.socket)},
    )


def _theirs(server: ApiServer, executable: Path, root: Path) -> Side:
    kubeconfig = str(server.plane.kubeconfig("admin"))
    settings = {"datastore": "kubernetes", "kubernetes": {"kubeconfig": kubeconfig}}
    flat = root / "whereabouts.conf"  # whereabouts does not start without it
    flat.write_text(json.dumps(settings))
    ipam = {
        "type": "whereabouts",
        "range": THEIR_RANGE,
        "configuration_path": str(flat),
        "log_level": "error",
        **settings,
    }
    return Side(executable, {"type": "macvlan", "ipam": ipam})


def _agent(server: ApiServer, root: Path) -> Service:
    """An agent that serves a node of the cluster."""
    server.node(root.name, machineID=f"m-{root.name}", systemUUID=f"s-{root.name}")
    kubeconfig = server.plane.directory / f"{root.name}.kubeconfig"
    install_launchers(root / "bin", ["podfabric-ipam"])
    (root / "etc").mkdir()
    (root / "etc/config.yaml").write_text(AGENT_CONFIG)
    environ = {"NODE_NAME": root.name, "PODFABRIC_KUBECONFIG": str(kubeconfig)}
    return Service(root, "bench.moved", environ)


if __name__ == "__main__":
    main()
