"""In the node: `python -m tests.cluster.vfs NUMBER [RDMA]` gives the first PF VFs, and prints it.

The VFs have addresses, as an administrator would give them. RDMA is what is on each VF:
"soft" for Soft-RoCE, "isolated" for an HCA of its own, with the RDMA subsystem in exclusive mode
and no other HCA. The number 0 removes all of that.
"""

import subprocess
import sys
from functools import partial

from tests.kernel.cards import Card, cards, make_vfs, netdev_of, rdma_mode, remove_vfs
from tests.kernel.igb import PARENTS, RDMA, give_addresses
from tests.kernel.pods import IP, run
from tests.waiting import until

PATIENCE = 120.0  # seconds


def main(number: int, kind: str = "") -> None:
    """Make them, or remove all for 0."""
    first = cards()[0]
    if not number:
        _remove_rdma()
        remove_vfs(first)
        return
    card = make_vfs(first, number)
    give_addresses(card)
    if kind == "soft":
        _make_soft(card)
    elif kind == "isolated":
        _make_isolated(card)
    print(first.pf)


def _make_soft(card: Card) -> None:
    run("/sbin/modprobe", "rdma_rxe")
    for number, vf in enumerate(card.vfs):
        netdev = netdev_of(vf)
        run(IP, "link", "set", netdev, "up")
        run(RDMA, "link", "add", f"rxe{number}", "type", "rxe", "netdev", netdev)


def _make_isolated(card: Card) -> None:
    run("/sbin/modprobe", "--remove", "ibloop")
    _set_mode("exclusive")
    run("/sbin/modprobe", "ibloop", f"parents={','.join(card.vfs)}")


def _remove_rdma() -> None:
    for line in run(RDMA, "dev").splitlines():
        name = line.split()[1].rstrip(":")
        if name.startswith("rxe"):
            run(RDMA, "link", "delete", name)
    if rdma_mode() == "exclusive":
        run("/sbin/modprobe", "--remove", "ibloop")
        _set_mode("shared")
        run("/sbin/modprobe", "ibloop")
        for parent in PARENTS:
            run(IP, "link", "set", parent, "up")


def _set_mode(mode: str) -> None:
    """The kernel refuses it while there are other namespaces, and removes those a little later."""
    command = [RDMA, "system", "set", "netns", mode]
    until(partial(_succeeds, command), PATIENCE, f"RDMA subsystem in {mode} mode", pause=0.2)


def _succeeds(command: list[str]) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
