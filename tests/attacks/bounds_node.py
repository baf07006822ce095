"""A node with an agent, and calls to it: over its socket, and through launchers."""

import json
import os
import select
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.attacks.agent_clients import Caller, network
from tests.host.agent.serving import read
from tests.plugins.service import Service, install_launchers
from tests.printed import Printed
from tests.waiting import until

__all__ = ["Answer", "Node", "network", "node"]

PLUGINS = ("ipoib", "sriov", "ib-sriov", "rdma", "podfabric-macvlan", "podfabric-ipam", "noop")


@dataclass
class Answer(Printed):
    """The output that a launcher would have printed, and the cost of the call.

    `cpu` is the CPU seconds of all threads of the agent during the call. On a busy machine
    `seconds`, the wall time, may be much longer.
    """

    exit_code: int
    stdout: bytes
    stderr: bytes
    seconds: float
    cpu: float

    @property
    def code(self) -> int:
        """The CNI code, 0 for success."""
        return int(self.document["code"]) if self.exit_code else 0


@dataclass
class Node(Caller):
    """A node whose agent has only `workers` workers. CNI_NETNS is `netns`."""

    workers: int = 4
    netns: str = "/none"

    def environ(self, verb: str, container: str, more: Mapping[str, str]) -> dict[str, str]:
        pod = f"IgnoreUnknown=1;K8S_POD_NAMESPACE=ns;K8S_POD_NAME={container}"
        return super().environ(verb, container, {"CNI_NETNS": self.netns, "CNI_ARGS": pod, **more})

    def call(self, plugin: str, verb: str, container: str, config: bytes, **more: str) -> Answer:
        """One call over the socket."""
        started, cpu = time.monotonic(), self.cpu_time()
        reply = self.ask(plugin, verb, container, config, **more)
        cost = time.monotonic() - started, self.cpu_time() - cpu
        return Answer(reply.exit_code, reply.stdout, reply.stderr, *cost)

    def call_by_launcher(
        self, plugin: str, verb: str, container: str, config: bytes, **more: str
    ) -> Answer:
        """One call through the launcher, as a runtime makes it."""
        started, cpu = time.monotonic(), self.cpu_time()
        done = self.launch(plugin, verb, container, config, **more)
        cost = time.monotonic() - started, self.cpu_time() - cpu
        return Answer(done.returncode, done.stdout, done.stderr, *cost)

    def cpu_time(self) -> float:
        """Seconds of CPU that all threads of the agent have used so far."""
        # The clock of another process: MAKE_PROCESS_CPUCLOCK in include/linux/posix-timers.h.
        return time.clock_gettime(~self.service.process.pid << 3 | 2)

    def require_all_workers(self) -> None:
        """Check that every worker can take a call, all at the same time."""
        before = len(list(self.state.glob("DEL-*")))
        fifo = self.service.root / "until-all-are-here"
        os.mkfifo(fifo)
        script = json.dumps({"waits_for": str(fifo)})
        config = network("workers", "noop")
        clients = [
            self.start("noop", "DEL", f"w{number}", config, NOOP=script)
            for number in range(self.workers)
        ]
        try:
            until(lambda: len(list(self.state.glob("DEL-*"))) >= before + self.workers)
        finally:
            _let_go(fifo, clients)
            fifo.unlink()


def _let_go(fifo: Path, clients: list[socket.socket]) -> None:
    """End the calls that read the FIFO to its end, and read their answers."""

    def none_waits() -> bool:
        # A call that opens the FIFO after this writer has closed it waits for the next writer.
        writer = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
        time.sleep(0.02)
        os.close(writer)
        for client in select.select(clients, [], [], 0.1)[0]:
            clients.remove(client)
            with client:
                assert read(client).exit_code == 0
        return not clients

    until(none_waits)


@contextmanager
def node(root: Path, workers: int = 4, netns: str = "/none") -> Iterator[Node]:
    """A node whose agent has only `workers` workers; its files are below `root`."""
    etc = root / "etc"
    etc.mkdir(parents=True)
    (etc / "config.yaml").write_text(f'agent: {{listen: "", workers: {workers}, deadline: 60}}\n')
    roots = {name: str(root / name.lower()) for name in ("KUBELET", "DEVINFO", "CDI")}
    environ = {f"PODFABRIC_{name}": path for name, path in roots.items()}
    install_launchers(root / "bin", PLUGINS)
    service = Service(root, "tests.attacks.bounds_agent", environ)
    try:
        service.wait_until_ready()
        yield Node(service, root / "bin", root / "noop", workers, netns)
    finally:
        service.stop()
