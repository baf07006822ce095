"""Kill -9 of the agent under clients that attach IPoIB children to pods and detach them."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ipam.sqlite_store import SqliteStore
from tests.kernel.pods import IP, pod
from tests.plugins.service import Service, install_launchers
from tests.storm import Client, Seen, kill_often

KILLS = int(os.environ.get("PODFABRIC_KILLS", "8"))
CLIENTS = 16


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    agent = Service(tmp_path / "agent", "tests.plugins.nursery")
    agent.wait_until_ready()
    yield agent
    agent.stop()


def links(*where: str) -> set[str]:
    shown = subprocess.run([IP, *where, "-json", "link"], check=True, capture_output=True)
    return {one["ifname"] for one in json.loads(shown.stdout)}


def test_killed_agent_leaves_nothing_behind(service: Service, tmp_path: Path) -> None:
    install_launchers(tmp_path / "bin", ["ipoib"])
    config = {
        "cniVersion": "1.0.0",
        "name": "fabric",
        "type": "ipoib",
        "master": "ib0",
        "ipam": {"type": "podfabric-ipam", "range": "10.9.0.0/24"},
    }
    environ = {"PODFABRIC_SOCKET": str(service.socket), "PATH": os.environ["PATH"]}
    seen = Seen()
    before = links()
    with pod("a") as one, pod("b") as other:
        clients = [
            Client(
                number,
                tmp_path / "bin/ipoib",
                config,
                environ,
                seen,
                f"/var/run/netns/{(one, other)[number % 2]}",
                ifname=f"net{number}",
                pause=2.0,
                patience=240.0,
            )
            for number in range(CLIENTS)
        ]
        kill_often(service.root / "run/agent.pid", KILLS, clients, (0.5, 15.0))
        assert seen.wrong == []
        print(f"{KILLS} kills: {seen.results} attached, errors {seen.errors}")  # noqa: T201
        assert seen.results > 0
        assert [links("-n", name) for name in (one, other)] == [{"lo"}, {"lo"}]
    assert links() == before
    assert list(service.root.glob("state/attachments/*")) == []
    assert list(service.root.glob("run/lock/*")) == []
    assert SqliteStore(service.root / "state/ipam", "").reservations() == []
