"""The address store as a library: an empty pool against one with a million reservations.

Run as root: `python -m bench.ipam`.
"""

import argparse
import tempfile
import time
from functools import partial
from pathlib import Path

from base.pod import Pod
from bench.processes import interleaved, row
from cni.spec.attachment import Attachment
from ipam.addresses import parse, parse_interface, text
from ipam.ranges import Range, RangeSet, of_network
from ipam.sqlite_store import SqliteStore
from ipam.store import Owner, Reservation

BOOT = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
MILLION = 1_000_000
FIRST = parse("10.0.0.2")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--reservations", type=int, default=MILLION)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="podfabric-bench-", dir="/var/tmp") as name:
        library(Path(name), arguments.rounds, arguments.reservations)


def library(root: Path, rounds: int, size: int = MILLION) -> None:
    """A reservation in a resident process, which opens the files for each."""
    print(f"\n{'reserve(), in the library':44}{'large':>12}{'empty':>12}{'ratio':>8}")
    large, empty = SqliteStore(root / "large", BOOT), SqliteStore(root / "empty", BOOT)
    large.load(reservations(size))
    network = parse_interface("10.0.0.0/8")[1]
    first, last = of_network(network)
    sets = [RangeSet((Range(network=network, first=first, last=last),))]

    def reserve(store: SqliteStore, number: int) -> float:
        started = time.perf_counter()
        store.reserve(owner(f"bench{number}"), sets)
        return time.perf_counter() - started

    seconds = interleaved(rounds, partial(reserve, large), partial(reserve, empty))
    row(f"a /8 with {size} reservations", seconds[0], seconds[1])


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
            segment="",
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


if __name__ == "__main__":
    main()
