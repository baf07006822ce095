"""Kill -9 of agent and launchers, while clients attach IPoIB children or VFs and detach them."""

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from ipam.store.sqlite_store import SqliteStore
from tests.kernel import cards, igb
from tests.kernel.pods import IP, pod
from tests.plugins.service import Service, install_launchers
from tests.storm import Client, Kills, Seen, kill_launchers, kill_often
from tests.waiting import until

KILLS = int(os.environ.get("PODFABRIC_KILLS", "8"))
LAUNCHER_KILLS = 300
SECONDS = 30.0  # after that, fewer kills are enough: the machine is slow
CLIENTS = 16
VFS = 7
CONFIG = {
    "cniVersion": "1.0.0",
    "name": "fabric",
    "ipam": {"type": "podfabric-ipam", "range": "10.9.0.0/26"},
}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    agent = Service(tmp_path / "agent", "tests.plugins.nursery")
    agent.wait_until_ready()
    yield agent
    agent.stop()


def links(*where: str) -> set[str]:
    shown = subprocess.run([IP, *where, "-json", "link"], check=True, capture_output=True)
    return {link["ifname"] for link in json.loads(shown.stdout)}


def ipoib(
    service: Service, bin_dir: Path, seen: Seen, pods: Sequence[str], kills: Kills | None = None
) -> list[Client]:
    """Clients that each attach an IPoIB child as another interface of one of the pods."""
    install_launchers(bin_dir, ["ipoib"])
    config = {**CONFIG, "type": "ipoib", "master": "ib0"}
    return [
        Client(
            number,
            bin_dir / "ipoib",
            config,
            environ_of(service),
            seen,
            f"/var/run/netns/{pods[number % len(pods)]}",
            ifname=f"net{number}",
            pause=2.0,
            patience=240.0,
            kills=kills,
        )
        for number in range(CLIENTS)
    ]


def environ_of(service: Service) -> dict[str, str]:
    return {"PODFABRIC_SOCKET": str(service.socket), "PATH": os.environ["PATH"]}


def left(service: Service) -> list[str]:
    """The remaining journal entries, locks and reservations."""
    files = [*service.root.glob("state/attachments/*"), *service.root.glob("run/lock/attach*")]
    held = SqliteStore(service.root / "state/ipam", "").reservations()
    return [*map(str, files), *map(str, held)]


def test_killed_agent_leaves_nothing_behind(service: Service, tmp_path: Path) -> None:
    seen = Seen()
    before = links()
    with pod("a") as first, pod("b") as other:
        clients = ipoib(service, tmp_path / "bin", seen, (first, other))
        kill_often(service.root / "run/agent.pid", KILLS, clients, (0.5, 15.0))
        assert seen.wrong == []
        print(f"{KILLS} kills: {seen.results} attached, errors {seen.errors}")  # noqa: T201
        assert seen.results > 0
        assert [links("-n", name) for name in (first, other)] == [{"lo"}, {"lo"}]
    assert links() == before
    until(lambda: left(service) == [], what="end of all locks")


def test_killed_launchers_leave_no_child_behind(service: Service, tmp_path: Path) -> None:
    seen, kills = Seen(), Kills(LAUNCHER_KILLS)
    before = links()
    with pod("a") as first, pod("b") as other:
        clients = ipoib(service, tmp_path / "bin", seen, (first, other), kills)
        kill_launchers(service.root / "run/agent.pid", 1, clients, SECONDS)
        assert seen.wrong == []
        print(f"{kills.done} kills: {seen.results} attached, errors {seen.errors}")  # noqa: T201
        assert min(kills.done, seen.results) > 0
        assert [links("-n", name) for name in (first, other)] == [{"lo"}, {"lo"}]
    assert links() == before
    until(lambda: left(service) == [], what="end of all locks")


def test_killed_launchers_leave_every_vf_as_it_was(service: Service, tmp_path: Path) -> None:
    install_launchers(tmp_path / "bin", ["sriov"])
    seen, kills = Seen(), Kills(LAUNCHER_KILLS)
    with ExitStack() as stack:
        card = stack.enter_context(igb.with_addressed_vfs(cards.cards()[0], VFS))
        names = [stack.enter_context(pod(f"vf{number}")) for number in range(VFS)]
        before = cards.snapshot()
        clients = [
            Client(
                number,
                tmp_path / "bin/sriov",
                {**CONFIG, "type": "sriov", "deviceID": device, "vlan": 100, "trust": "on"},
                environ_of(service),
                seen,
                f"/var/run/netns/{name}",
                pause=2.0,
                patience=240.0,
                kills=kills,
            )
            for number, (name, device) in enumerate(zip(names, card.vfs, strict=True))
        ]
        kill_launchers(service.root / "run/agent.pid", 1, clients, SECONDS)
        assert seen.wrong == []
        print(f"{kills.done} kills: {seen.results} attached, errors {seen.errors}")  # noqa: T201
        assert min(kills.done, seen.results) > 0
        assert [links("-n", name) for name in names] == [{"lo"}] * VFS
        assert cards.snapshot() == before
    until(lambda: left(service) == [], what="end of all locks")
