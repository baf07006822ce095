"""One agent takes over from another, repeatedly, while clients attach and detach.

Every client is a launcher. No client gets an error, unless two agents are killed in one call.
"""

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from tests.host.agent.nodes import (
    environ_of,
    host,
    ip,
    links,
    pod_and_device,
    require_nothing_left,
)
from tests.plugins import CHECKOUT
from tests.plugins.service import install_launchers
from tests.storm import Client, Seen, run_beside
from tests.waiting import PATIENCE, until

__all__ = ["host"]

TIMES = int(os.environ.get("PODFABRIC_TAKEOVERS", "50"))
CLIENTS = 12
IPAM = {"type": "podfabric-ipam", "range": "10.9.0.0/24"}


class Relay:
    """Agents of one node. `agents` has the pid and pidfd of each started agent, oldest first.

    Hundreds of processes start in a second, so a dead agent's pid may be reused.
    """

    def __init__(self, root: Path, host: str) -> None:
        self.root = root
        self.run = root / "run"
        (root / "etc").mkdir(parents=True)
        (root / "etc/config.yaml").write_text('agent:\n  listen: ""\n')
        self.log = root / "agent.log"
        self.agents: dict[int, int] = {}
        roots = {f"PODFABRIC_{name.upper()}": str(root / name) for name in ("run", "state", "etc")}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *("nsenter", f"--net=/var/run/netns/{host}"),
                    *(sys.executable, "-m", "tests.plugins.relay"),
                ],
                env={**os.environ, **roots, "PODFABRIC_KUBELET": str(root / "kubelet")},
                cwd=CHECKOUT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def start(self, state: str) -> int:
        """Start an agent, wait until it reports that state, and return its pid."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        pid = int(self.process.stdout.readline())
        self.agents[pid] = os.pidfd_open(pid)
        self.await_state(pid, state)
        return pid

    def await_state(self, pid: int, state: str) -> None:
        until(lambda: self._state(pid) == state or not self.lives(pid), what=f"{state} {pid}")
        assert self._state(pid) == state, self.log.read_text()

    def _state(self, pid: int) -> str:
        with suppress(StopIteration, FileNotFoundError):
            return next(self.run.glob(f"agent-*-{pid}.state")).read_text().strip()
        return ""

    def end(self) -> None:
        """End every agent and the process that forks them."""
        for pid in self.agents:
            self.signal(pid, signal.SIGTERM)
        for pid, descriptor in self.agents.items():
            until(lambda pid=pid: not self.lives(pid), what=f"end of {pid}")  # type: ignore[misc]
            os.close(descriptor)
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(PATIENCE)

    def lives(self, pid: int) -> bool:
        """Whether the agent is still running."""
        return not select.select([self.agents[pid]], [], [], 0)[0]

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to the agent, if it is still running."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.agents[pid], number)


@contextmanager
def relay_in(root: Path, host: str) -> Iterator[Relay]:
    relay = Relay(root, host)
    try:
        yield relay
    finally:
        relay.end()


def _ends(relay: Relay, old: int, new: int) -> int:
    """Send SIGTERM, as a DaemonSet's controller does; the old agent finishes its running calls."""
    relay.signal(old, signal.SIGTERM)
    return new


def _is_killed_while_it_hands_over(relay: Relay, old: int, new: int) -> int:
    relay.signal(old, signal.SIGTERM)
    time.sleep(random.uniform(0, 0.03))
    relay.signal(old, signal.SIGKILL)
    return new


def _waits_for_another(relay: Relay, old: int, new: int) -> int:
    """Kill the new agent while it waits, and start a newer one that waits meanwhile."""
    newer = relay.start("standing by")
    relay.signal(new, signal.SIGKILL)
    relay.signal(old, signal.SIGTERM)
    return newer


@pytest.mark.early
@pytest.mark.parametrize(
    ("change", "times"),
    [
        (_ends, TIMES),
        (_is_killed_while_it_hands_over, TIMES // 3),
        (_waits_for_another, TIMES // 3),
    ],
)
def test_agents_that_take_over_fail_no_call_and_leave_nothing(
    host: str, tmp_path: Path, change: Callable[[Relay, int, int], int], times: int
) -> None:
    install_launchers(tmp_path / "bin", ["moved"])
    seen = Seen()
    with ExitStack() as stack:
        relay = stack.enter_context(relay_in(tmp_path / "agent", host))
        serving = relay.start("serving")
        places = [stack.enter_context(pod_and_device(host)) for _ in range(CLIENTS)]
        before = links(host)
        environ = environ_of(relay.root) | {"PODFABRIC_TIMEOUT": "115"}
        clients = [
            Client(
                number,
                tmp_path / "bin/moved",
                {"cniVersion": "1.0.0", "name": "n1", "type": "moved", "device": device}
                | {"ipam": IPAM},
                environ,
                seen,
                f"/var/run/netns/{pod}",
            )
            for number, (pod, device) in enumerate(places)
        ]

        def take_over() -> None:
            nonlocal serving
            for _ in range(times):
                results = seen.results
                until(lambda: seen.results > results + CLIENTS, what="attachments")  # noqa: B023
                serving = change(relay, serving, relay.start("standing by"))
                relay.await_state(serving, "serving")

        run_beside(clients, take_over)
        assert seen.wrong == []
        # A launcher repeats a call once, but two agents may be killed during the same call.
        killed_twice = [text for text in seen.texts if "before its answer was whole" in text]
        assert seen.texts == (killed_twice if change is _is_killed_while_it_hands_over else [])
        assert len(killed_twice) < times
        assert seen.results > times
        assert links(host) == before
        inside = [json.loads(ip("-n", pod, "-json", "link")) for pod, _ in places]
        assert [[one["ifname"] for one in shown] for shown in inside] == [["lo"]] * CLIENTS
        require_nothing_left(relay.root)


def test_agent_that_stands_by_ends_on_sigterm_and_changes_nothing(
    host: str, tmp_path: Path
) -> None:
    with relay_in(tmp_path / "agent", host) as relay:
        serving = relay.start("serving")
        waiting = relay.start("standing by")
        relay.signal(waiting, signal.SIGTERM)
        until(lambda: not relay.lives(waiting), what="end")
        assert [path.name for path in relay.run.glob("agent-*.state")] == [
            next(relay.run.glob(f"agent-*-{serving}.state")).name
        ]
        assert relay.run.joinpath("agent.sock").is_socket()
