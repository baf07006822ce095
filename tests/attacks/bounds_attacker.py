"""One client that calls an agent with hostile input without a pause, until it is killed.

`python -m tests.attacks.bounds_attacker SOCKET`. A process of its own: the clients whose times
are taken must not share an interpreter with it.
"""

import itertools
import socket
import sys

from agent import framing
from agent.framing import LauncherRequest
from tests.attacks.lists import LISTS
from tests.host.agent.serving import read
from tests.unit.spec.hostile import HOSTILE


def main() -> None:
    """Call for ever."""
    for frame in itertools.cycle(_frames()):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(sys.argv[1])
            client.sendall(frame)
            read(client)


def _frames() -> list[bytes]:
    """Every hostile text with every verb; each list as wide as the limit of values allows."""
    texts = [("podfabric-ipam", raw) for raw in HOSTILE.values()]
    texts += [(one.plugin, one.of(entries)) for one in LISTS for entries in (one.limit, one.widest)]
    return [
        framing.write_request(LauncherRequest(plugin, _environ(verb), raw))
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
