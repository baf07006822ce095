"""A fallback that takes over from a killed agent: it settles that agent's call first, and works on
the agent's state directory or not at all.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from agent import framing
from base.paths import Paths
from cni import installation
from cni.spec.dispatch import answer
from ipam.executable import IpamExecutable
from ipam.plugin import AddressPlugin
from ipam.sqlite_store import SqliteStore
from tests.host.agent.nodes import (
    environ_of,
    host,
    require_nothing_left,
    service,
)
from tests.host.launcher.fake import Agent, Outcome, Peer
from tests.plugins.service import LAUNCHER, Service
from tests.storm import Client, Kills, Seen, kill_launchers
from tests.waiting import PATIENCE

__all__ = ["host", "service"]

KILLS = int(os.environ.get("PODFABRIC_LAUNCHER_KILLS", "10000")) // 40  # an interpreter each
CLIENTS = 8
DEADLINE = 900.0
IPAM = {"type": "podfabric-ipam", "range": "10.9.0.0/26"}
CONFIG = {"cniVersion": "1.0.0", "name": "n1", "type": "podfabric-ipam", "ipam": IPAM}
OTHER_STATE = 114


@dataclass(frozen=True)
class Installed:
    """Launchers with their fallback, installed for the files below `root`."""

    root: Path
    socket: Path

    @property
    def executable(self) -> Path:
        return self.root / "bin/podfabric-ipam"

    @property
    def paths(self) -> Paths:
        return Paths(run=self.root / "run", state=self.root / "state", etc=self.root / "etc")

    @property
    def held(self) -> list[str]:
        """The containers that hold an address in the state directory."""
        if not self.paths.ipam.exists():
            return []
        return [
            reservation.container_id
            for reservation in SqliteStore(self.paths.ipam, "").reservations()
        ]

    def call(self, command: str, container: str = "c1", **more: str) -> Outcome:
        """A runtime's call, without the variables of the agent."""
        environ = {
            "CNI_COMMAND": command,
            "CNI_CONTAINERID": container,
            "CNI_NETNS": "/none",
            "CNI_IFNAME": "net1",
            "CNI_PATH": str(self.executable.parent),
            "PODFABRIC_SOCKET": str(self.socket),
            **more,
        }
        done = subprocess.run(
            [self.executable],
            input=json.dumps(CONFIG).encode(),
            env=environ,
            capture_output=True,
            timeout=PATIENCE,
            check=False,
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    def dying(self, peer: Peer) -> None:
        """An agent that does a whole call, on the state directory, and dies before it answers."""
        request = peer.receive()
        addresses = AddressPlugin.on_node(self.paths.ipam, self.paths.boot_id)
        plugin = IpamExecutable(addresses, self.paths.locks)
        reply = answer(lambda: plugin, request.environ, lambda: request.config)
        assert reply.exit_code == 0, reply.document


def install(root: Path) -> None:
    """Run `podfabric install --fallback` with the agent's environment."""
    (root / "bin").mkdir(parents=True, exist_ok=True)
    podfabric = Path(sys.executable).with_name("podfabric")
    options = ("--fallback", "--launcher", LAUNCHER, "--bin-dir", root / "bin")
    roots = {
        f"PODFABRIC_{name.upper()}": str(root / name) for name in ("run", "state", "etc", "kubelet")
    }
    subprocess.run(
        [podfabric, "install", *options],
        env={**os.environ, **roots},
        check=True,
        capture_output=True,
    )


@pytest.fixture
def installed(tmp_path: Path) -> Installed:
    (tmp_path / "run").mkdir()
    install(tmp_path)
    return Installed(tmp_path, tmp_path / "run/agent.sock")


def refused(outcome: Outcome) -> str:
    """The text of an error that says that the state directory is not certain."""
    error: dict[str, Any] = json.loads(outcome.stdout)
    assert (outcome.exit_code, error["code"]) == (1, OTHER_STATE), outcome
    assert "nothing was done" in error["msg"]
    return str(error["msg"])


# A call that the agent had done already.


def test_fallback_s_add_takes_the_place_of_the_dead_agent_s(installed: Installed) -> None:
    with Agent(installed.socket, installed.dying):
        outcome = installed.call("ADD")
    assert outcome.exit_code == 0, outcome
    assert installed.held == ["c1"]
    installed.socket.unlink()
    assert installed.call("DEL").exit_code == 0
    assert installed.held == []


def test_attachment_from_before_the_call_stays_as_it_is(installed: Installed) -> None:
    """It lives, and its runtime has asked for it twice."""
    assert installed.call("ADD").exit_code == 0
    before = SqliteStore(installed.paths.ipam, "").reservations()
    time.sleep(1.1)  # the launcher's word is in whole seconds
    with Agent(installed.socket, lambda peer: peer.receive()):
        outcome = installed.call("ADD")
    assert json.loads(outcome.stdout)["code"] == 103
    assert SqliteStore(installed.paths.ipam, "").reservations() == before


@pytest.mark.parametrize("frame", [b"", framing.write_answer(framing.REFUSED, 1, b"", b"{}")])
def test_call_that_no_agent_began_finds_a_living_attachment(
    installed: Installed, frame: bytes
) -> None:
    """Of this very second: nothing of it may be settled."""
    assert installed.call("ADD").exit_code == 0

    def act(peer: Peer) -> None:
        peer.receive()
        peer.send(frame)

    if frame:
        with Agent(installed.socket, act):
            outcome = installed.call("ADD")
    else:
        outcome = installed.call("ADD")
    assert json.loads(outcome.stdout)["code"] == 103
    assert installed.held == ["c1"]


# Another state directory.


def test_fallback_goes_by_its_installation_and_not_by_its_caller(
    installed: Installed, tmp_path: Path
) -> None:
    others = {f"PODFABRIC_{name}": str(tmp_path / "other") for name in ("STATE", "RUN", "ETC")}
    assert installed.call("ADD", **others).exit_code == 0
    assert installed.held == ["c1"]
    assert installed.call("DEL", **others).exit_code == 0
    assert installed.held == []
    assert not (tmp_path / "other").exists()


def test_fallback_of_an_older_podfabric_does_nothing(installed: Installed, tmp_path: Path) -> None:
    """It would go by its caller's environment, onto whichever state directory that names."""
    script = installed.executable.parent / ".podfabric/podfabric-ipam"
    script.write_text(script.read_text().replace("main(__file__)", "main()"))
    text = refused(installed.call("DEL", PODFABRIC_STATE=str(tmp_path / "other")))
    assert "podfabric install --fallback" in text
    assert not (tmp_path / "other").exists()


def _agent_of_another_state(installed: Installed) -> None:
    other = replace(installed, root=installed.root / "elsewhere").paths
    identity = installation.identify(other.state)
    installation.claim(Paths(run=installed.paths.run, state=other.state), identity)


def _not_mounted(installed: Installed) -> None:
    installed.paths.state.rename(installed.root / "kept")
    installed.paths.state.mkdir()


def _missing(installed: Installed) -> None:
    installed.paths.state.rename(installed.root / "kept")


def _of_another_node(installed: Installed) -> None:
    _missing(installed)
    installation.identify(installed.paths.state)


def _not_installed(installed: Installed) -> None:
    (installed.root / "bin/.podfabric" / installation.NAME).unlink()


def _installation_cut(installed: Installed) -> None:
    _cut(installed.root / "bin/.podfabric" / installation.NAME)


def _identity_empty(installed: Installed) -> None:
    (installed.paths.state / "identity").write_text("")


def _claim_cut(installed: Installed) -> None:
    installation.claim(installed.paths, installation.identify(installed.paths.state))
    _cut(next(installed.paths.run.glob("state-*.json")))


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:20])


@pytest.mark.parametrize(
    "change",
    [
        *(_agent_of_another_state, _not_mounted, _missing, _of_another_node, _not_installed),
        *(_installation_cut, _identity_empty, _claim_cut),
    ],
)
def test_call_that_cannot_be_sure_of_the_state_directory_fails(
    installed: Installed, change: Callable[[Installed], None]
) -> None:
    change(installed)
    for command in ("ADD", "DEL"):
        refused(installed.call(command))
    assert not installed.paths.ipam.exists()
    assert not installed.paths.attachments.exists()


def test_launcher_of_another_agent_is_refused(installed: Installed, tmp_path: Path) -> None:
    elsewhere = replace(installed, socket=tmp_path / "elsewhere/agent.sock")
    text = refused(elsewhere.call("DEL"))
    assert str(elsewhere.socket) in text
    assert str(installed.socket) in text


def test_agent_does_not_start_beside_a_fallback_of_another_state_directory(
    installed: Installed, tmp_path: Path
) -> None:
    assert installed.call("ADD").exit_code == 0
    told = _refused_start(installed.paths.run, tmp_path / "other")
    assert f"recorded in the state directory {installed.paths.state}" in told
    assert "set PODFABRIC_STATE" in told


@pytest.mark.parametrize("change", [_identity_empty, _claim_cut])
def test_agent_does_not_start_on_a_state_directory_that_may_be_any(
    installed: Installed, change: Callable[[Installed], None]
) -> None:
    change(installed)
    told = _refused_start(installed.paths.run, installed.paths.state)
    assert "remove that file once no pod of this boot" in told


def _refused_start(run: Path, state: Path) -> str:
    """What an agent says that does not start."""
    done = subprocess.run(
        [Path(sys.executable).with_name("podfabric"), "agent"],
        env={
            **os.environ,
            "PODFABRIC_RUN": str(run),
            "PODFABRIC_STATE": str(state),
            "PODFABRIC_ETC": str(state / "etc"),
        },
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 1
    return done.stderr


# Both at once.


@pytest.mark.early
def test_launchers_and_agents_are_killed_and_fallbacks_take_over(
    service: Service, tmp_path: Path
) -> None:
    install(service.root)
    seen, kills = Seen(), Kills(KILLS)
    executable = service.root / "bin/podfabric-ipam"
    environ = {**environ_of(service.root), "PODFABRIC_STATE": str(tmp_path / "other")}
    clients = [
        Client(n, executable, CONFIG, environ, seen, kills=kills, patience=240.0)
        for n in range(CLIENTS)
    ]
    kill_launchers(service.root / "run/agent.pid", 10, clients, DEADLINE)
    assert seen.wrong == []
    assert kills.enough
    require_nothing_left(service.root)
    assert not (tmp_path / "other").exists()
