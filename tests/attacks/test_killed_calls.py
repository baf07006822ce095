"""Kill -9 of launchers and agents at random moments: nothing leaks, no address has two owners.

The range is so small that leaks exhaust it immediately. `PODFABRIC_LAUNCHER_KILLS` and
`PODFABRIC_KILLS` set the number of kills.
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
from tests.storm import Client, Kills, Seen, kill_launchers

__all__ = ["host", "service"]

pytestmark = pytest.mark.early

KILLS = int(os.environ.get("PODFABRIC_LAUNCHER_KILLS", "10000"))
OF_INTERFACES = KILLS // 10  # the kernel moves one interface at a time, for 15 ms
AGENTS = int(os.environ.get("PODFABRIC_KILLS", "40"))
CLIENTS = 16
DEADLINE = 900.0  # seconds, for a busy machine
IPAM = {"type": "podfabric-ipam", "range": "10.9.0.0/26"}


def test_killed_launchers_leave_no_address(service: Service, tmp_path: Path) -> None:
    install_launchers(tmp_path / "bin", ["podfabric-ipam"])
    seen, kills = Seen(), Kills(KILLS - OF_INTERFACES)
    config = {"cniVersion": "1.0.0", "name": "n1", "type": "podfabric-ipam", "ipam": IPAM}
    executable = tmp_path / "bin/podfabric-ipam"
    clients = [
        Client(n, executable, config, environ_of(service.root), seen, kills=kills)
        for n in range(CLIENTS)
    ]
    kill_launchers(service.root / "run/agent.pid", AGENTS, clients, DEADLINE)
    assert seen.wrong == []
    assert kills.enough
    require_nothing_left(service.root)


def test_killed_launchers_leave_no_interface(service: Service, host: str, tmp_path: Path) -> None:
    """Kill launchers in the code that moves an interface, in its journal and its undo."""
    install_launchers(tmp_path / "bin", ["moved"])
    seen, kills = Seen(), Kills(OF_INTERFACES)
    with ExitStack() as stack:
        places = [stack.enter_context(pod_and_device(host)) for _ in range(CLIENTS)]
        before = links(host)
        clients = [
            Client(
                number,
                tmp_path / "bin/moved",
                {
                    "cniVersion": "1.0.0",
                    "name": "n1",
                    "type": "moved",
                    "device": device,
                    "ipam": IPAM,
                },
                environ_of(service.root),
                seen,
                f"/var/run/netns/{pod}",
                kills=kills,
            )
            for number, (pod, device) in enumerate(places)
        ]
        kill_launchers(service.root / "run/agent.pid", AGENTS, clients, DEADLINE)
        assert seen.wrong == []
        assert kills.enough
        assert links(host) == before
        inside = [json.loads(ip("-n", pod, "-json", "link")) for pod, _ in places]
        assert [[one["ifname"] for one in shown] for shown in inside] == [["lo"]] * CLIENTS
    require_nothing_left(service.root)
