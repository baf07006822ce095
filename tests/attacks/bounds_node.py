"""A node with an agent, and calls of it: over its socket, and through launchers."""

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent import framing
from agent.framing import Request
from tests.host.agent.serving import read
from tests.plugins.service import Service, install_launchers

PATIENCE = 40.0  # seconds for one answer
PLUGINS = ("ipoib", "sriov", "ib-sriov", "rdma", "podfabric-ipam", "noop")


@dataclass
class Answer:
    """One call's: what a launcher would have printed, and how long it took."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    seconds: float

    @property
    def document(self) -> dict[str, Any]:
        """Standard output, which must be exactly one JSON object."""
        document = json.loads(self.stdout)
        assert isinstance(document, dict)
        return document

    @property
    def code(self) -> int:
        """The CNI code, 0 for success."""
        return int(self.document["code"]) if self.exit_code else 0


@dataclass
class Node:
    """A runtime's view of it. CNI_NETNS is `netns`."""

    service: Service
    bin_dir: Path
    workers: int
    netns: str = "/none"

    def environ(self, verb: str, container: str, **more: str) -> dict[str, str]:
        return {
            "PODFABRIC_SOCKET": str(self.service.socket),
            "PODFABRIC_STATE": str(self.service.root / "noop"),
            "CNI_COMMAND": verb,
            "CNI_CONTAINERID": container,
            "CNI_IFNAME": "net1",
            "CNI_NETNS": self.netns,
            "CNI_PATH": str(self.bin_dir),
            "CNI_ARGS": f"IgnoreUnknown=1;K8S_POD_NAMESPACE=ns;K8S_POD_NAME={container}",
            **more,
        }

    def start(
        self, plugin: str, verb: str, container: str, config: bytes, **more: str
    ) -> socket.socket:
        """Send a request over the socket; the answer is still to be read."""
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        client.settimeout(PATIENCE)
        client.connect(str(self.service.socket))
        request = Request(plugin, self.environ(verb, container, **more), config)
        client.sendall(framing.write_request(request))
        return client

    def call(self, plugin: str, verb: str, container: str, config: bytes, **more: str) -> Answer:
        """One call over the socket."""
        started = time.monotonic()
        with self.start(plugin, verb, container, config, **more) as client:
            reply = read(client)
        return Answer(reply.exit_code, reply.stdout, reply.stderr, time.monotonic() - started)

    def launch(self, plugin: str, verb: str, container: str, config: bytes, **more: str) -> Answer:
        """One call through the launcher, as a runtime makes it."""
        started = time.monotonic()
        done = subprocess.run(
            [self.bin_dir / plugin],
            input=config,
            env=self.environ(verb, container, **more),
            capture_output=True,
            timeout=PATIENCE,
            check=False,
        )
        return Answer(done.returncode, done.stdout, done.stderr, time.monotonic() - started)

    def require_all_workers(self) -> None:
        """As many calls as there are workers are at work at the same time."""
        state = self.service.root / "noop"
        before = len(list(state.glob("DEL-*")))
        config = network("workers", "noop")
        script = json.dumps({"sleeps": 5.0})
        clients = [
            self.start("noop", "DEL", f"w{number}", config, NOOP=script)
            for number in range(self.workers)
        ]
        try:
            deadline = time.monotonic() + 4.0
            while len(list(state.glob("DEL-*"))) < before + self.workers:
                assert time.monotonic() < deadline, "a worker is lost"
                time.sleep(0.02)
            for client in clients:
                assert read(client).exit_code == 0
        finally:
            for client in clients:
                client.close()


@contextmanager
def node(root: Path, workers: int = 4, netns: str = "/none") -> Iterator[Node]:
    """A node whose agent has so few workers; everything of it is below `root`."""
    etc = root / "etc"
    etc.mkdir(parents=True)
    (etc / "config.yaml").write_text(f'agent: {{listen: "", workers: {workers}, deadline: 60}}\n')
    roots = {name: str(root / name.lower()) for name in ("KUBELET", "DEVINFO", "CDI")}
    environ = {f"PODFABRIC_{name}": path for name, path in roots.items()}
    install_launchers(root / "bin", PLUGINS)
    service = Service(root, "tests.attacks.bounds_agent", environ)
    try:
        service.wait_until_ready()
        yield Node(service, root / "bin", workers, netns)
    finally:
        service.stop()


def network(name: str, plugin: str, **more: Any) -> bytes:  # noqa: ANN401 - any JSON value
    """A network configuration."""
    return json.dumps({"cniVersion": "1.1.0", "name": name, "type": plugin, **more}).encode()


def environment_limit() -> int:
    """Bytes that one variable of a process may have (execve(2), MAX_ARG_STRLEN)."""
    return 32 * os.sysconf("SC_PAGE_SIZE") - 1


Config = Mapping[str, Any]
