"""In the node: `python -m tests.cluster.vfs NUMBER [RDMA]` creates VFs of a PF, and prints it.

`python -m tests.cluster.vfs state` prints all state that an attachment must restore, as JSON.

The VFs have addresses, as an administrator would give them. RDMA selects the RDMA device on each
VF. "isolated" is a separate HCA, with the RDMA subsystem in exclusive mode and no other HCA.
"infiniband" is InfiniBand VFs of another PF in that mode, next to the node's HCAs. "beside" puts
nothing on the VFs: the other PF becomes an InfiniBand HCA without VFs, whose interface is printed
too. The number 0 removes all of that.
"""

import json
import subprocess
import sys

from tests.kernel import infiniband_vfs
from tests.kernel.cards import Card, cards, make_vfs, rdma_mode, remove_vfs, snapshot
from tests.kernel.igb import PARENTS, give_addresses
from tests.kernel.pods import IP, run
from tests.waiting import until

PATIENCE = 120.0  # seconds
MODULES = (
    *("ibloop", "ib_ipoib", "ib_umad", "rdma_ucm", "ib_uverbs"),
    *("rdma_cm", "iw_cm", "ib_cm", "ib_core"),
)
"""All of the RDMA subsystem, users first."""


def main(number: int, kind: str = "") -> None:
    """Create VFs, or remove all of them for 0."""
    first = cards()[0]
    if not number:
        _remove_rdma()
        remove_vfs(first)
        return
    if kind == "infiniband":
        _load_in_mode("exclusive")
        _plug_in()
        print(infiniband_vfs.make(number).pf)
        return
    card = make_vfs(first, number)
    give_addresses(card)
    if kind == "isolated":
        _make_isolated(card)
    elif kind == "beside":
        run("/sbin/modprobe", "--all", "ib_umad", "rdma_ucm")
        print(infiniband_vfs.make(0).pf)
    print(first.pf)


def _make_isolated(card: Card) -> None:
    _load_in_mode("exclusive")
    run("/sbin/modprobe", "ibloop", f"parents={','.join(card.vfs)}")


def _remove_rdma() -> None:
    if infiniband_vfs.are_made():
        infiniband_vfs.remove("igb")
    if rdma_mode() == "exclusive":
        _load_in_mode("shared")
        _plug_in()


def _plug_in() -> None:
    """Plug in the node's own HCAs, as at its start."""
    run("/sbin/modprobe", "ibloop")
    for parent in PARENTS:
        run(IP, "link", "set", parent, "up")


def _load_in_mode(mode: str) -> None:
    """Load the subsystem again, without an HCA, as after a restart of the node.

    The kernel refuses to change the mode of a loaded subsystem while there are other namespaces.
    The agent sometimes has a netlink socket of it, which keeps it loaded.
    """
    until(_is_unloaded, PATIENCE, "end of the RDMA subsystem", pause=0.2)
    run("/sbin/modprobe", "ib_core", f"netns_mode={int(mode == 'shared')}")
    run("/sbin/modprobe", "--all", *MODULES[1:-1])


def _is_unloaded() -> bool:
    command = ["/sbin/modprobe", "--remove", "--all", *MODULES]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


if __name__ == "__main__":
    if sys.argv[1] == "state":
        print(json.dumps(snapshot()))
    else:
        main(int(sys.argv[1]), *sys.argv[2:])
