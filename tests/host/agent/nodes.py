"""An isolated host for an agent, with pods and devices, and checks for leftovers."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pytest

from base.interrupts import wait_until
from tests.plugins.service import Service
from tests.waiting import PATIENCE

IP = "/usr/sbin/ip"


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
    """A pod's namespace, and one end of a veth pair on the host. The other end stays on the
    host."""
    mark = uuid4().hex[:8]
    device, peer = f"d{mark}", f"p{mark}"
    with namespace("pod") as pod:
        ip("-n", host, "link", "add", device, "type", "veth", "peer", "name", peer)
        yield pod, device


def links(host: str) -> dict[str, dict[str, object]]:
    """The host's links without their carrier, which depends on the other end."""
    shown = json.loads(ip("-n", host, "-json", "-details", "link"))
    return {
        link["ifname"]: {
            "address": link["address"],
            "mtu": link["mtu"],
            "alias": link.get("ifalias"),
            "up": "UP" in link["flags"],
        }
        for link in shown
    }


def left(root: Path) -> list[str]:
    """The journal entries, locks and reservations that remain below an agent's root."""
    found = [str(path) for path in root.glob("state/attachments/*")]
    found += [str(path) for path in root.glob("run/lock/*")]
    environ = {**os.environ, "PODFABRIC_STATE": str(root / "state")}
    podfabric = Path(sys.executable).with_name("podfabric")
    listed = subprocess.run(
        [podfabric, "ipam", "list", "--output", "json"],
        env=environ,
        check=True,
        capture_output=True,
    )
    return found + [str(link) for link in json.loads(listed.stdout)]


def require_nothing_left(root: Path) -> None:
    """Wait until nothing is left there: a call whose launcher was killed may still hold its
    lock."""
    wait_until(lambda: left(root) == [], PATIENCE)
    assert left(root) == []


def environ_of(root: Path) -> dict[str, str]:
    """A launcher's environment for the agent below `root`."""
    return {
        "PODFABRIC_SOCKET": str(root / "run/agent.sock"),
        "PODFABRIC_TIMEOUT": "30",
        "PATH": os.environ["PATH"],
    }


@pytest.fixture
def host() -> Iterator[str]:
    """A namespace that serves as the agent's host, so that it contains nothing else."""
    with namespace("host") as name:
        yield name


@pytest.fixture
def service(tmp_path: Path, host: str) -> Iterator[Service]:
    """An agent in that namespace. It is forked again after each kill."""
    inside = ("nsenter", f"--net=/var/run/netns/{host}")
    agent = Service(tmp_path / "agent", "tests.plugins.nursery", through=inside)
    try:
        agent.wait_until_ready()
        yield agent
    finally:
        agent.stop()
