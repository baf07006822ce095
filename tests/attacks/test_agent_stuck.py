"""Calls that hang in the kernel: other calls are served, and the health endpoints report the
hang."""

import json
import os
import re
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pytest

from tests.attacks.agent_clients import Caller, network
from tests.plugins.service import Service, install_launchers
from tests.unix_http import UnixHTTPConnection
from tests.waiting import PATIENCE, until

WORKERS = 4


class Node(Caller):
    """An agent with few workers and a short deadline, and a FIFO on which plugins hang."""

    @property
    def fifo(self) -> Path:
        return self.service.root / "fifo"

    def hang(self, container: str, verb: str = "ADD") -> socket.socket:
        """Start a call that hangs until another process writes into the FIFO."""
        script = json.dumps({"waits_for": str(self.fifo)})
        return self.start("noop", verb, container, network("blue", "noop"), NOOP=script)

    def let_go(self) -> None:
        """End the calls that hang now."""
        os.close(os.open(self.fifo, os.O_WRONLY | os.O_NONBLOCK))

    def get(self, path: str) -> tuple[int, str]:
        connection = UnixHTTPConnection(self.service.root / "http")
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def is_ready(self) -> bool:
        try:
            return self.get("/readyz")[0] == 200
        except OSError:  # it does not listen yet
            return False

    def count(self, metric: str) -> int:
        sample = re.search(rf"^podfabric_{metric} (\S+)$", self.get("/metrics")[1], re.M)
        return int(float(sample[1])) if sample else -1

    def until_stuck(self, count: int) -> None:
        until(lambda: self.count("workers_stuck") == count)

    def serves(self) -> bool:
        return self.ask("noop", "CHECK", "good", network("red", "noop")).exit_code == 0

    def serves_launchers(self) -> bool:
        return self.launch("noop", "CHECK", "good", network("red", "noop")).returncode == 0


@contextmanager
def running(root: Path, environ: dict[str, str]) -> Iterator[Node]:
    (root / "etc").mkdir(parents=True)
    (root / "etc/config.yaml").write_text(
        f'agent: {{workers: {WORKERS}, deadline: 3, grace: 0, listen: "unix:{root}/http"}}\n'
    )
    os.mkfifo(root / "fifo")
    install_launchers(root / "bin", ["noop"])
    service = Service(root, environ=environ)
    service.wait_until_ready()
    try:
        node = Node(service, root / "bin", root / "doubles")
        until(node.is_ready)
        yield node
    finally:
        service.process.kill()
        service.process.wait()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with running(tmp_path, {}) as node:
        yield node


def test_calls_that_hang_delay_others_only_until_their_deadline(node: Node) -> None:
    hanging = [node.hang(f"c{number}") for number in range(WORKERS)]
    node.until_stuck(WORKERS)
    until(node.serves)
    until(node.serves_launchers)
    assert node.get("/healthz") == (200, "serving\n")
    status, text = node.get("/readyz")
    assert status == 503
    assert text.startswith(
        "4 of 4 workers are stuck in calls that do not end (the log names them): "
    )
    for client in hanging:
        client.close()


def test_log_names_a_call_that_hangs(node: Node) -> None:
    with node.hang("c1"):
        node.until_stuck(1)

    def told() -> list[str]:
        return [line for line in node.service.log.read_text().splitlines() if "cannot be" in line]

    (line,) = until(told)  # a moment after the worker counts as stuck
    assert re.search(r"ERROR the call is still running after \d+ s and cannot be ended", line)
    assert re.search(r"  request=\d+ plugin=noop verb=ADD attachment=blue/c1/net1$", line)
    assert node.get("/readyz")[0] == 200  # one of four workers is less than half of them


def test_call_whose_client_has_gone_counts_when_it_hangs(node: Node) -> None:
    """A DEL continues without its client; an ADD may hang in a call that cannot be ended."""
    clients = [node.hang("a", "ADD"), node.hang("d", "DEL")]
    until(lambda: node.count("requests_running") == 2)
    for client in clients:
        client.close()
    node.until_stuck(2)
    until(node.serves)


def test_call_that_ends_after_all_is_counted_no_longer(node: Node) -> None:
    hanging = [node.hang(f"c{number}") for number in range(WORKERS)]
    node.until_stuck(WORKERS)
    node.let_go()
    node.until_stuck(0)
    assert node.get("/readyz") == (200, "serving\n")
    until(node.serves)
    for client in hanging:
        client.close()


def test_agent_is_unhealthy_when_no_worker_is_left_and_systemd_hears_no_more(
    tmp_path: Path,
) -> None:
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    name = f"\0{uuid4().hex}"
    manager.bind(name)
    environ = {"NOTIFY_SOCKET": f"@{name[1:]}", "WATCHDOG_USEC": "400000"}
    with manager, running(tmp_path, environ) as node:
        hanging = []
        for stuck in (WORKERS, 2 * WORKERS):
            hanging += [node.hang(f"c{number}") for number in range(WORKERS)]
            node.until_stuck(stuck)
        status, text = node.get("/healthz")
        assert status == 503
        assert text == (
            "no worker is free, 8 are stuck in calls that do not end (the log names "
            "them): restart the agent\n"
        )
        assert node.get("/readyz") == (503, text)
        until(lambda: "systemd will end it" in node.service.log.read_text())
        manager.setblocking(False)
        told = b""
        with pytest.raises(BlockingIOError):
            while True:
                told += manager.recv(4096)
        assert told.count(b"WATCHDOG=1") >= 1
        with pytest.raises(BlockingIOError):
            manager.recv(4096)
        for client in hanging:
            client.close()


def test_agent_with_calls_that_hang_stops_in_time(node: Node) -> None:
    hanging = [node.hang(f"c{number}") for number in range(WORKERS)]
    node.until_stuck(WORKERS)
    node.service.process.terminate()
    try:
        assert node.service.process.wait(PATIENCE) == 0
    except subprocess.TimeoutExpired:
        pytest.fail("the agent waits for calls that do not end")
    for client in hanging:
        client.close()
