"""Kill -9 of the agent, again and again, under clients that attach and detach.

`PODFABRIC_KILLS` says how often (200 is what the figures in docs/agent.md are from).
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from uuid import uuid4

import pytest

from tests.plugins.service import Service, install_launchers
from tests.storm import Client, Seen, kill_often

IP = "/usr/sbin/ip"
KILLS = int(os.environ.get("PODFABRIC_KILLS", "40"))
CLIENTS = 16
IPAM = {"type": "podfabric-ipam", "range": "10.9.0.0/24"}


@pytest.fixture
def host() -> Iterator[str]:
    """A namespace that is the agent's host, so that nothing else is seen there."""
    with namespace("host") as name:
        yield name


@pytest.fixture
def service(tmp_path: Path, host: str) -> Iterator[Service]:
    inside = ("nsenter", f"--net=/var/run/netns/{host}")
    agent = Service(tmp_path / "agent", "tests.plugins.nursery", through=inside)
    agent.wait_until_ready()
    yield agent
    agent.stop()


def ip(*arguments: str) -> str:
    done = subprocess.run([IP, *arguments], check=True, capture_output=True, text=True)
    return done.stdout


@contextmanager
def namespace(kind: str) -> Iterator[str]:
    name = f"{kind}-{uuid4().hex[:8]}"
    ip("netns", "add", name)
    try:
        yield name
    finally:
        ip("netns", "delete", name)


@contextmanager
def pod_and_device(host: str) -> Iterator[tuple[str, str]]:
    """A pod's namespace, and one end of a veth pair on the host; the other end stays there."""
    mark = uuid4().hex[:8]
    device, peer = f"d{mark}", f"p{mark}"
    with namespace("pod") as pod:
        ip("-n", host, "link", "add", device, "type", "veth", "peer", "name", peer)
        yield pod, device


def links(host: str) -> dict[str, dict[str, object]]:
    """The host's links, but for their carrier, which follows the other end."""
    shown = json.loads(ip("-n", host, "-json", "-details", "link"))
    return {
        one["ifname"]: {
            "address": one["address"],
            "mtu": one["mtu"],
            "alias": one.get("ifalias"),
            "up": "UP" in one["flags"],
        }
        for one in shown
    }


def left(service: Service) -> list[str]:
    """What is left of journal, locks and reservations."""
    found = [str(path) for path in service.root.glob("state/attachments/*")]
    found += [str(path) for path in service.root.glob("run/lock/*")]
    environ = {**os.environ, "PODFABRIC_STATE": str(service.root / "state")}
    podfabric = Path(sys.executable).with_name("podfabric")
    listed = subprocess.run(
        [podfabric, "ipam", "list", "--output", "json"],
        env=environ,
        check=True,
        capture_output=True,
    )
    return found + [str(one) for one in json.loads(listed.stdout)]


def environ_of(service: Service) -> dict[str, str]:
    return {
        "PODFABRIC_SOCKET": str(service.socket),
        "PODFABRIC_TIMEOUT": "30",
        "PATH": os.environ["PATH"],
    }


def test_killed_agent_loses_and_doubles_no_address(service: Service, tmp_path: Path) -> None:
    install_launchers(tmp_path / "bin", ["podfabric-ipam"])
    seen = Seen()
    config = {"cniVersion": "1.0.0", "name": "n1", "type": "podfabric-ipam", "ipam": IPAM}
    clients = [
        Client(n, tmp_path / "bin/podfabric-ipam", config, environ_of(service), seen)
        for n in range(CLIENTS)
    ]
    kill_often(service.root / "run/agent.pid", KILLS, clients, (0.05, 0.4))
    assert seen.wrong == []
    assert seen.results > KILLS
    assert left(service) == []


def test_killed_agent_leaves_no_interface_behind(
    service: Service, host: str, tmp_path: Path
) -> None:
    """Through the code that moves an interface, its journal and its undoing."""
    install_launchers(tmp_path / "bin", ["moved"])
    seen = Seen()
    with ExitStack() as stack:
        places = [stack.enter_context(pod_and_device(host)) for _ in range(CLIENTS)]
        before = links(host)
        clients = []
        for number, (pod, device) in enumerate(places):
            config = {
                "cniVersion": "1.0.0",
                "name": "n1",
                "type": "moved",
                "device": device,
                "ipam": IPAM,
            }
            clients.append(
                Client(
                    number,
                    tmp_path / "bin/moved",
                    config,
                    environ_of(service),
                    seen,
                    f"/var/run/netns/{pod}",
                )
            )
        kill_often(service.root / "run/agent.pid", KILLS, clients, (0.05, 0.6))
        assert seen.wrong == []
        assert seen.results > KILLS / 2
        assert links(host) == before
        inside = [json.loads(ip("-n", pod, "-json", "link")) for pod, _ in places]
        assert [[one["ifname"] for one in shown] for shown in inside] == [["lo"]] * CLIENTS
    assert left(service) == []
