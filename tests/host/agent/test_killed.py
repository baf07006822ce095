"""Kill -9 of the agent, again and again, under clients that attach and detach.

`PODFABRIC_KILLS` says how often (200 is what the figures in docs/agent.md are from).
"""

import json
import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.host.agent.nodes import (
    environ_of,
    host,
    ip,
    links,
    pod_and_device,
    require_nothing_left,
    service,
)
from tests.plugins.service import Service, install_launchers
from tests.storm import Client, Seen, kill_often

__all__ = ["host", "service"]

pytestmark = pytest.mark.early

KILLS = int(os.environ.get("PODFABRIC_KILLS", "40"))
CLIENTS = 16
IPAM = {"type": "podfabric-ipam", "range": "10.9.0.0/24"}


def test_killed_agent_loses_and_doubles_no_address(service: Service, tmp_path: Path) -> None:
    install_launchers(tmp_path / "bin", ["podfabric-ipam"])
    seen = Seen()
    config = {"cniVersion": "1.0.0", "name": "n1", "type": "podfabric-ipam", "ipam": IPAM}
    clients = [
        Client(n, tmp_path / "bin/podfabric-ipam", config, environ_of(service.root), seen)
        for n in range(CLIENTS)
    ]
    kill_often(service.root / "run/agent.pid", KILLS, clients, (0.05, 0.4))
    assert seen.wrong == []
    assert seen.results >= KILLS
    require_nothing_left(service.root)


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
                    environ_of(service.root),
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
    require_nothing_left(service.root)
