"""`podfabric-ipam` against Go's host-local, in one run: ratios of medians, not milliseconds.

As whole processes at several sizes of the pool, and the library in an empty pool against one
with a million reservations. Run as root: `python -m bench.ipam`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from cni.spec.arguments import Pod
from ipam.addresses import parse, parse_interface, text
from ipam.ranges import Range, RangeSet, of_network
from ipam.sqlite_store import SqliteStore
from ipam.store import Attachment, Owner, Reservation

CHECKOUT = Path(__file__).resolve().parent.parent
HOST_LOCAL = Path("/usr/lib/cni/host-local")
OURS = CHECKOUT / "build/cni/bin/podfabric-ipam"
BOOT = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
SIZES = (0, 1_000, 16_000)
MILLION = 1_000_000
FIRST = parse("10.0.0.2")


def main() -> None:
    """Print a table of medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--reservations", type=int, default=MILLION)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="podfabric-bench-", dir="/var/tmp") as name:
        root = Path(name)
        processes(root, arguments.rounds)
        library(root, arguments.rounds, arguments.reservations)


def processes(root: Path, rounds: int) -> None:
    """ADD as a runtime sees it: one process, from fork to exit."""
    if not HOST_LOCAL.exists():
        sys.exit(f"{HOST_LOCAL} is missing: apt-get install containernetworking-plugins")
    print(f"{'ADD, whole process':32}{'podfabric-ipam':>16}{'host-local':>12}{'ratio':>8}")
    for size in SIZES:
        ours, theirs = root / f"ours-{size}", root / f"theirs-{size}"
        SqliteStore(ours / "ipam", BOOT).load(reservations(size))
        fill_host_local(theirs / "n1", size)
        medians = interleaved(
            rounds,
            partial(add, OURS, ours),
            partial(add, HOST_LOCAL, theirs),
        )
        line(f"{size} reservations", *medians)


def library(root: Path, rounds: int, size: int) -> None:
    """ADD in a resident process: the store alone."""
    print(f"\n{'reserve(), in the library':32}{'large':>16}{'empty':>12}{'ratio':>8}")
    large, empty = SqliteStore(root / "large", BOOT), SqliteStore(root / "empty", BOOT)
    large.load(reservations(size))
    network = parse_interface("10.0.0.0/8")[1]
    first, last = of_network(network)
    sets = [RangeSet((Range(network=network, first=first, last=last),))]

    def reserve(store: SqliteStore, number: int) -> None:
        store.reserve(owner(f"bench{number}"), sets)

    medians = interleaved(rounds, partial(reserve, large), partial(reserve, empty))
    line(f"a /8 with {size} reservations", *medians)


def interleaved(rounds: int, *contenders: Callable[[int], None]) -> list[float]:
    """The median seconds of each contender, whose rounds alternate."""
    seconds: list[list[float]] = [[] for _ in contenders]
    for number in range(rounds + 2):
        for index, contender in enumerate(contenders):
            started = time.perf_counter()
            contender(number)
            if number >= 2:  # the first ones warm the caches
                seconds[index].append(time.perf_counter() - started)
    return [statistics.median(one) for one in seconds]


def add(executable: Path, state: Path, number: int) -> None:
    """One ADD of a new container."""
    ipam = {"type": executable.name, "dataDir": str(state)}
    if executable == OURS:
        ipam = {"type": executable.name, "range": "10.0.0.0/8", "gateway": "10.0.0.1"}
    else:
        ipam["subnet"] = "10.0.0.0/8"
    config = {"cniVersion": "1.0.0", "name": "n1", "type": "bench", "ipam": ipam}
    environ = {
        "PATH": os.environ["PATH"],
        "PODFABRIC_STATE": str(state),
        "CNI_COMMAND": "ADD",
        "CNI_CONTAINERID": f"bench{number}",
        "CNI_IFNAME": "eth0",
        "CNI_NETNS": "/none",
        "CNI_PATH": str(executable.parent),
    }
    subprocess.run(
        [executable],
        input=json.dumps(config).encode(),
        env=environ,
        check=True,
        stdout=subprocess.DEVNULL,
    )


def reservations(size: int) -> list[Reservation]:
    """The first `size` addresses of 10.0.0.0/8, each held by a pod of its own."""
    return [
        Reservation(
            domain="",
            address=text(FIRST + number),
            range="10.0.0.0/8",
            network="n1",
            container_id=f"c{number}",
            ifname="eth0",
            namespace="ns",
            pod=f"p{number}",
            boot=BOOT,
        )
        for number in range(size)
    ]


def fill_host_local(directory: Path, size: int) -> None:
    """The same reservations as host-local keeps them: a file each."""
    directory.mkdir(parents=True)
    for number in range(size):
        (directory / text(FIRST + number)).write_bytes(b"c%d\r\neth0" % number)
    if size:
        (directory / "last_reserved_ip.0").write_text(text(FIRST + size - 1))


def owner(container_id: str) -> Owner:
    """An attachment of a pod of its own."""
    return Owner(Attachment("n1", container_id, "eth0"), Pod("ns", container_id))


def line(label: str, one: float, other: float) -> None:
    """One row of the table."""
    print(f"{label:32}{one * 1e3:13.2f} ms{other * 1e3:9.2f} ms{one / other:8.2f}")


if __name__ == "__main__":
    main()
