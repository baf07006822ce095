"""podfabric beside the real whereabouts, on one real API server: `python -m bench.whereabouts`.

Both sides are started as a runtime starts them, a process for each ADD and DEL. Ours ask agents,
each of which is a node of its own with its own store; theirs ask the API server. The numbers are
those of a machine with few CPUs, on which etcd and the API server run too: read the ratios. The
floor of a process for each call is the same number of processes that do nothing.

Needs `make cni`, and the sources of whereabouts where `tests.cluster.programs` looks for them.
"""

import argparse
import json
import os
import random
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

from bench.agent import LAUNCHER, Agent
from bench.processes import Call, environment, in_threads, quantile
from ipam.cluster.objects import AddressBlock
from ipam.cluster.whereabouts.objects import IPPool
from tests.api.server import ApiServer, api_server
from tests.api.whereabouts import OverlappingRangeIPReservation, shared_pool
from tests.cluster import programs
from tests.cluster.peers import WHEREABOUTS

OURS_RANGE, THEIR_RANGE = "10.90.0.0/16", "10.91.0.0/16"
NICS = 16  # of each pod
FAULTY = 0.3  # of all connections to the API server, while pods are deleted
ATTEMPTS = 5  # of a DEL that fails: the kubelet tries again


@dataclass(frozen=True)
class Contender:
    """A side: the executable, its configuration, and the environment of its nodes in turn."""

    name: str
    executable: Path
    config: bytes
    nodes: Sequence[dict[str, str]]
    count: Callable[[], str]

    def call(self, command: str, pod: int, ifname: str = "net1") -> int:
        """The exit status of one call for a pod, which is on one of the nodes."""
        more = {
            **self.nodes[pod % len(self.nodes)],
            "CNI_IFNAME": ifname,
            "CNI_ARGS": f"K8S_POD_NAMESPACE=bench;K8S_POD_NAME=p{pod}",
        }
        container = f"{pod:064x}"
        environ = environment(self.executable, command, container, **more)
        call = Call(self.executable, environ, self.config)
        call.prepare()
        call.start()
        call.wait()
        os.close(call._input)
        os.close(call._output)
        return call.code


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each number of clients")
    parser.add_argument("--pods", type=int, default=16, help=f"with {NICS} NICs each, at once")
    parser.add_argument("--more-pods", type=int, default=128, help="the same, podfabric only")
    parser.add_argument(
        "--most", type=float, default=600.0, help="seconds after which no more NIC is begun"
    )
    parser.add_argument("--at-once", type=int, default=64, help="deletions")
    parser.add_argument("--agents", type=int, default=2)
    arguments = parser.parse_args()
    if not LAUNCHER.exists():
        sys.exit(f"{LAUNCHER} is missing: run make cni")
    (theirs_at,) = programs.build([WHEREABOUTS])
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        server = stack.enter_context(api_server())
        pool = shared_pool(server, "None", OURS_RANGE, 128, time.monotonic)
        stack.enter_context(pool).round()
        proxy = stack.enter_context(closing(Proxy(server.plane.port)))
        proxy.start()
        agents = [
            stack.enter_context(_agent(server, proxy, root / f"node-{number}"))
            for number in range(arguments.agents)
        ]
        ours = _ours(server, agents)
        theirs = _theirs(server, theirs_at / "whereabouts", root)
        sides = (ours, theirs)
        for side in sides:
            for command in ("ADD", "DEL"):
                if code := side.call(command, 0):
                    sys.exit(f"{side.name}: {command}: exit status {code}")
        errors = stack.enter_context((root / "errors").open("wb"))
        stack.callback(os.dup2, os.dup(2), 2)
        os.dup2(errors.fileno(), 2)  # theirs tells of each attempt
        if arguments.seconds:
            _rates(sides, arguments.seconds)
        _nics(sides, arguments.pods, arguments.most)
        faulty = _theirs(server, theirs_at / "whereabouts", root, proxy.port)
        if arguments.at_once:
            _delete((ours, faulty), arguments.pods, arguments.at_once, proxy)
        if arguments.more_pods:
            _nics((ours,), arguments.more_pods, arguments.most)


def _rates(sides: Sequence[Contender], seconds: float) -> None:
    print(
        f"{'ADD and DEL in turns':28}{'seconds':>10}{'rate':>11}{'p50':>12}{'p99':>12}{'failed':>8}"
    )
    floor = Contender("the processes alone", Path("/bin/true"), b"", [{}], str)
    for clients in (1, 16, 64):
        ours, theirs, most = (_rate(side, clients, seconds) for side in (*sides, floor))
        print(
            f"{'':4}{clients} clients: {ours / max(theirs, 0.01):.0f} times; calls that do nothing "
            f"would be {most / max(theirs, 0.01):.0f} times",
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
    tally.show(f"{side.name}, {clients} clients")
    return tally.rate


def _nics(sides: Sequence[Contender], pods: int, most: float) -> None:
    print(f"\n{pods} pods at once, {NICS} NICs each, for {most:g} s at most")
    tallies = [_attached(side, pods, most) for side in sides]
    if len(tallies) > 1:
        ours, theirs = (each.rate for each in tallies)
        print(f"{'':4}{ours / max(theirs, 0.01):.0f} times as many a second", flush=True)


def _attached(side: Contender, pods: int, most: float) -> "Tally":
    tally = Tally()

    def attach(pod: int) -> None:
        for nic in range(NICS):
            if time.monotonic() - tally.began > most:
                return
            tally.add(partial(side.call, "ADD", pod, f"net{nic}"))

    in_threads(attach, range(pods))
    tally.show(side.name)
    print(f"{'':4}{side.count()}")
    return tally


def _delete(sides: Sequence[Contender], pods: int, at_once: int, proxy: "Proxy") -> None:
    print(
        f"\n{pods * NICS} deletions, {at_once} at once, {FAULTY:.0%} of connections to the API "
        f"server reset; each tried up to {ATTEMPTS} times"
    )
    tallies = [_deleted(side, pods, at_once, proxy) for side in sides]
    print(f"{'':4}{tallies[1].seconds / tallies[0].seconds:.0f} times", flush=True)


def _deleted(side: Contender, pods: int, at_once: int, proxy: "Proxy") -> "Tally":
    waiting: SimpleQueue[tuple[int, str]] = SimpleQueue()
    for pod in range(pods):
        for nic in range(NICS):
            waiting.put((pod, f"net{nic}"))
    tally = Tally()

    def delete(pod: int, ifname: str) -> int:
        codes = (side.call("DEL", pod, ifname) for _ in range(ATTEMPTS))
        return next((0 for code in codes if code == 0), 1)

    def work(_: int) -> None:
        with suppress(Empty):
            while True:
                tally.add(partial(delete, *waiting.get_nowait()))

    proxy.faulty = FAULTY
    in_threads(work, range(at_once))
    tally.show(side.name)
    proxy.faulty = 0.0
    print(f"{'':4}left: {side.count()}", flush=True)
    return tally


class Tally:
    """How many calls succeeded and failed since it was made, and how long the first took."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.ended = self.began
        self._took: list[float] = []
        self._failed = 0

    def add(self, call: Callable[[], int]) -> None:
        """Make the call, and count it by the exit status that it answers."""
        at = time.monotonic()
        failed = call() != 0
        self.ended = time.monotonic()
        if failed:
            self._failed += 1
        else:
            self._took.append(self.ended - at)

    @property
    def seconds(self) -> float:
        """From the first start to the last end."""
        return self.ended - self.began

    @property
    def rate(self) -> float:
        """Successes a second."""
        return len(self._took) / self.seconds

    def show(self, label: str) -> None:
        """Print a line."""
        p50 = statistics.median(self._took) * 1e3 if self._took else 0.0
        p99 = quantile(self._took, 0.99) * 1e3 if self._took else 0.0
        print(
            f"{label:28}{self.seconds:8.1f} s{self.rate:9.1f}/s{p50:9.0f} ms{p99:9.0f} ms"
            f"{self._failed:8}",
            flush=True,
        )


# --- both sides ----------------------------------------------------------------------------------


def _config(range_: str, kubeconfig: Path | None = None) -> bytes:
    ipam: dict[str, object] = {"type": "whereabouts", "range": range_}
    if kubeconfig is not None:
        settings = {"datastore": "kubernetes", "kubernetes": {"kubeconfig": str(kubeconfig)}}
        flat = kubeconfig.with_suffix(".conf")  # it does not start without
        flat.write_text(json.dumps(settings))
        ipam |= {**settings, "configuration_path": str(flat), "log_level": "error"}
    document = {"cniVersion": "1.0.0", "name": "bench", "type": "macvlan", "ipam": ipam}
    return json.dumps(document).encode()


def _ours(server: ApiServer, agents: Sequence[Agent]) -> Contender:

    def count() -> str:
        reserved = sum(_reserved(agent) for agent in agents)
        blocks = len(server.admin.list(AddressBlock).items)
        return f"{reserved} addresses in the stores, {blocks} blocks leased"

    nodes = [{"PODFABRIC_SOCKET": str(agent.socket)} for agent in agents]
    executable = agents[0].executables / "podfabric-ipam"
    return Contender("podfabric", executable, _config(OURS_RANGE), nodes, count)


def _theirs(server: ApiServer, executable: Path, root: Path, port: int = 0) -> Contender:
    kubeconfig = root / f"whereabouts-{port}.kubeconfig"
    document = json.loads(server.plane.kubeconfig("admin").read_text())
    if port:
        document["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{port}"
    kubeconfig.write_text(json.dumps(document))

    def count() -> str:
        pools = server.admin.list(IPPool).items
        entries = sum(len(pool.spec.allocations or {}) for pool in pools)
        reserved = len(server.admin.list(OverlappingRangeIPReservation).items)
        return f"{entries} entries in IPPools, {reserved} reservations"

    return Contender("whereabouts", executable, _config(THEIR_RANGE, kubeconfig), [{}], count)


def _reserved(agent: Agent) -> int:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("podfabric")), "ipam", "list", "-o", "json"],
        env={**os.environ, "PODFABRIC_STATE": str(agent.root / "state")},
        capture_output=True,
        check=True,
    )
    return len(json.loads(done.stdout))


def _agent(server: ApiServer, proxy: "Proxy", root: Path) -> Agent:
    """An agent that is a node of the cluster. It reaches the API server through the proxy."""
    server.node(root.name, machineID=f"m-{root.name}", systemUUID=f"s-{root.name}")
    document = json.loads((server.plane.directory / f"{root.name}.kubeconfig").read_text())
    document["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{proxy.port}"
    kubeconfig = root.with_suffix(".kubeconfig")
    kubeconfig.write_text(json.dumps(document))
    config = 'agent: {listen: "", sweep: false}\nipam: {scope: cluster}\n'
    environ = {"NODE_NAME": root.name, "PODFABRIC_KUBECONFIG": str(kubeconfig)}
    return Agent(root, names=("podfabric-ipam",), config=config, environ=environ)


class Proxy:
    """Passes connections on to the API server, and resets the `faulty` part of them: half of these
    before a byte came through, half after some did, so that requests have their effect or not."""

    def __init__(self, to: int) -> None:
        self.faulty = 0.0
        self._to = to
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port: int = self._listener.getsockname()[1]

    def start(self) -> None:
        """Serve, in threads of its own."""
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        limit = float("inf")
        if random.random() < self.faulty:
            if random.random() < 0.5:
                return _reset(client)
            limit = random.uniform(3_000, 12_000)  # a handshake takes some 3 kB
        try:
            server = socket.create_connection(("127.0.0.1", self._to))
        except OSError:
            return _reset(client)
        ends = threading.Event()
        for source, sink in ((client, server), (server, client)):
            threading.Thread(target=_pass_on, args=(source, sink, limit, ends), daemon=True).start()
        ends.wait()
        _reset(client)
        _reset(server)
        return None


def _pass_on(
    source: socket.socket, sink: socket.socket, limit: float, ends: threading.Event
) -> None:
    passed = 0
    with suppress(OSError):
        while passed <= limit and (part := source.recv(1 << 16)):
            sink.sendall(part)
            passed += len(part)
    ends.set()


def _reset(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


if __name__ == "__main__":
    main()
