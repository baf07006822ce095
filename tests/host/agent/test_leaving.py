"""`podfabric agent --until-empty`: attaches nothing, and removes podfabric from an empty node."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.plugins import CHECKOUT
from tests.unix_http import UnixHTTPConnection
from tests.waiting import PATIENCE, until

PODFABRIC = Path(sys.executable).with_name("podfabric")
GONE = "the node has no attachment, and podfabric's launchers and files are removed"
OTHERS = ("bridge", "sriov")  # the second name is already taken
CONFIG = {
    "cniVersion": "1.0.0",
    "name": "n1",
    "type": "podfabric-ipam",
    "ipam": {"type": "podfabric-ipam", "range": "10.9.0.0/24"},
}


@dataclass
class Node:
    """A node's directories, and the agents that were started there."""

    root: Path
    agents: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    @property
    def bin(self) -> Path:
        return self.root / "cni_bin"

    @property
    def log(self) -> Path:
        return self.root / "agent.log"

    def environ(self) -> dict[str, str]:
        roots = {
            f"PODFABRIC_{name.upper()}": str(self.root / name)
            for name in ("run", "state", "etc", "kubelet", "cni_bin")
        }
        return {**os.environ, **roots}

    def podfabric(self, *words: str) -> str:
        done = subprocess.run(
            [PODFABRIC, *words], env=self.environ(), check=False, capture_output=True, text=True
        )
        return done.stdout.strip()

    def agent(self, *words: str) -> "subprocess.Popen[bytes]":
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [PODFABRIC, "agent", *words], env=self.environ(), cwd=CHECKOUT, stderr=log
            )
        self.agents.append(process)
        return process

    def call(self, command: str, container: str = "c1") -> tuple[int, dict[str, object]]:
        environ = {
            "CNI_COMMAND": command,
            "CNI_CONTAINERID": container,
            "CNI_NETNS": "/none",
            "CNI_IFNAME": "net1",
            "CNI_PATH": str(self.bin),
            "PODFABRIC_SOCKET": str(self.root / "run/agent.sock"),
        }
        done = subprocess.run(
            [self.bin / "podfabric-ipam"],
            input=json.dumps(CONFIG).encode(),
            env=environ,
            check=False,
            capture_output=True,
            timeout=PATIENCE,
        )
        return done.returncode, json.loads(done.stdout or b"{}")

    def state(self, pid: int) -> str:
        with suppress(StopIteration, FileNotFoundError):
            return next((self.root / "run").glob(f"agent-*-{pid}.state")).read_text().strip()
        return ""

    def await_state(self, process: "subprocess.Popen[bytes]", state: str) -> None:
        until(lambda: self.state(process.pid).startswith(state), what=f"{state}: {self.log}")

    def get(self, path: str) -> tuple[int, str]:
        """The status and text of the agent's answer; (0, "") if no agent answers."""
        with closing(UnixHTTPConnection(self.root / "h")) as connection, suppress(OSError):
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        return 0, ""

    def await_log(self, text: str) -> None:
        until(lambda: text in self.log.read_text(), what=text)

    def others(self) -> set[str]:
        """The files of other projects at their original paths."""
        files = [self.bin / name for name in OTHERS]
        return {str(path) for path in files if path.read_text() == "of somebody else"}

    def left(self) -> list[str]:
        """Every file of podfabric except its configuration."""
        places = [self.root / name for name in ("run", "state", "cni_bin")]
        return [str(path) for place in places for path in place.rglob("*") if not path.is_dir()]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A node with launchers, and a pod that has an address."""
    with _node(tmp_path) as node:
        agent = node.agent()
        node.await_state(agent, "serving")
        assert node.call("ADD")[0] == 0
        agent.terminate()
        assert agent.wait(PATIENCE) == 0
        yield node


@contextmanager
def _node(root: Path) -> Iterator[Node]:
    node = Node(root)
    (root / "etc").mkdir()
    (root / "etc/config.yaml").write_text('agent:\n  listen: ""\n')
    node.bin.mkdir()
    for name in OTHERS:
        (node.bin / name).write_text("of somebody else")
    assert "installed" in node.podfabric("install", "--bin-dir", str(node.bin))
    try:
        yield node
    finally:
        for agent in node.agents:
            agent.kill()
            agent.wait(PATIENCE)


def test_agent_that_leaves_removes_everything_after_the_last_detachment(node: Node) -> None:
    for name in ("state/gpu/shim/libpfcuda.so", "run/gpu/one/limits"):
        (node.root / name).parent.mkdir(parents=True, exist_ok=True)
        (node.root / name).touch()
    agent = node.agent("--until-empty", "1")
    node.await_state(agent, "serving until empty: 1 address left")
    exit_code, error = node.call("ADD", "c2")
    assert (exit_code, error["code"]) == (1, 11)
    assert "podfabric is leaving this node" in str(error["msg"])
    assert node.call("STATUS")[1]["code"] == 50
    assert (node.bin / "ipoib").exists()
    assert node.call("DEL") == (0, {})
    node.await_state(agent, GONE)
    assert node.podfabric("agent", "--state") == GONE
    assert set(node.left()) == {str(next((node.root / "run").glob("*.state"))), *node.others()}
    assert agent.poll() is None  # a DaemonSet's pod must not end before it is deleted
    agent.terminate()
    assert agent.wait(PATIENCE) == 0
    assert set(node.left()) == node.others()


def test_only_the_agent_that_left_says_that_all_is_removed(node: Node) -> None:
    """The previous agent answers the probes of the leaving one until it ends."""
    (node.root / "etc/config.yaml").write_text(f"agent:\n  listen: unix:{node.root / 'h'}\n")
    former = node.agent()
    node.await_state(former, "serving")
    leaving = node.agent("--until-empty", "0")
    node.await_state(leaving, "standing by")
    assert node.get("/removed") == (503, "serving\n")
    former.terminate()
    node.await_state(leaving, "serving until empty: 1 address left")
    for path in ("/readyz", "/removed"):
        assert node.get(path) == (503, "serving until empty: 1 address left\n")
    assert node.call("DEL") == (0, {})
    node.await_state(leaving, GONE)
    until(lambda: node.get("/removed") == (200, f"{GONE}\n"), what="endpoint")
    assert node.get("/readyz")[0] == 503


def test_agent_that_leaves_may_be_killed_at_any_time(node: Node) -> None:
    detached = False
    for _ in range(12):
        agent = node.agent("--until-empty", "0")
        node.await_state(agent, "")
        if random.random() < 0.5 or detached:
            time.sleep(random.uniform(0, 2.5))
        else:
            until(lambda: (node.root / "run/agent.sock").is_socket(), what="socket")
            detached = node.call("DEL")[0] == 0
        agent.kill()
        agent.wait(PATIENCE)
    agent = node.agent("--until-empty", "0")
    if not detached:
        until(lambda: node.call("DEL")[0] == 0, what="detachment")
    node.await_state(agent, GONE)
    agent.terminate()
    assert agent.wait(PATIENCE) == 0
    assert set(node.left()) == node.others()


def test_agent_says_that_another_projects_file_took_a_launchers_place(node: Node) -> None:
    agent = node.agent()
    node.await_state(agent, "serving")
    for name in ("ipoib", "sriov"):  # only the second file existed before
        assert f"{node.bin / name}: " not in node.log.read_text()
        (node.bin / name).write_text("of somebody else")
        node.await_log(f"{node.bin / name}: another project's file took the place of podfabric's")


def test_agent_that_attaches_takes_over_from_one_that_leaves(node: Node) -> None:
    leaving = node.agent("--until-empty", "600")
    node.await_state(leaving, "serving until empty")
    agent = node.agent()
    node.await_state(agent, "serving")
    node.await_state(leaving, "another agent serves")
    assert node.call("ADD", "c2")[0] == 0
    assert [node.call("DEL", container)[0] for container in ("c1", "c2")] == [0, 0]
    assert (node.bin / "ipoib").exists()
    leaving.send_signal(signal.SIGTERM)
    assert leaving.wait(PATIENCE) == 0


def test_agent_after_an_interrupted_removal_starts_afresh(node: Node) -> None:
    (node.root / "state/removal-has-begun").touch()
    for path in (node.root / "state/ipam").glob("*.db"):
        path.unlink()
    agent = node.agent()
    node.await_state(agent, "serving")
    assert not (node.root / "state/removal-has-begun").exists()
    assert node.call("ADD", "c2")[0] == 0
