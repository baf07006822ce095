"""A client that calls an agent with hostile input without a pause, until it is killed.

`python -m tests.attacks.bounds_attacker SOCKET`. It is a separate process because the measured
clients must not share an interpreter with it.
"""

import itertools
import socket
import sys

from agent.serve.framing import LauncherRequest
from tests.attacks.lists import LISTS
from tests.frames import write_request
from tests.host.agent.serving import read
from tests.unit.spec.hostile import HOSTILE


def main() -> None:
    """Call forever."""
    for frame in itertools.cycle(_frames()):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(sys.argv[1])
            client.sendall(frame)
            read(client)


def _frames() -> list[bytes]:
    """Every hostile text with every verb, and each list with as many entries as are allowed."""
    texts = [("podfabric-ipam", raw) for raw in HOSTILE.values()]
    texts += [
        (each.plugin, each.of(entries)) for each in LISTS for entries in (each.limit, each.widest)
    ]
    return [
        write_request(LauncherRequest(plugin, _environ(verb), raw))
        for plugin, raw in texts
        for verb in ("ADD", "DEL", "CHECK", "STATUS")
    ]


def _environ(verb: str) -> dict[str, str]:
    return {
        "CNI_COMMAND": verb,
        "CNI_CONTAINERID": "attacker",
        "CNI_IFNAME": "net1",
        "CNI_NETNS": "/none",
        "CNI_PATH": "/none",
    }


if __name__ == "__main__":
    main()
