"""Launcher and agent against Go's plugins, in one run: ratios of medians, not milliseconds.

It starts whole processes, as a runtime does. It makes namespaces and interfaces and removes them,
also after Ctrl-C. Run as root: `python -m bench.attach`.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from bench.processes import (
    HOST_DEVICE,
    HOST_LOCAL,
    VERSION,
    Call,
    Cpu,
    Side,
    at_once,
    interleaved,
    quantile,
    row,
    run,
)
from ipam.addresses import parse, text
from ipam.store.sqlite_store import SqliteStore
from tests.host.agent.nodes import ip, namespace
from tests.plugins.service import LAUNCHER, Service, install_launchers
from tests.unit.ipam.calls import reservation

BOOT = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
FIRST = parse("10.0.0.2")
IPAM = {"type": "podfabric-ipam", "range": "10.0.0.0/8", "gateway": "10.0.0.1"}
ROUNDS = 40
LARGE = 16_000  # reservations
MANY = 200  # at once
MOVES = 16  # at once
SETTLE = 0.25  # seconds in which a removed namespace ends; moves need the lock that its end takes


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    measure(parser.parse_args().rounds)


def measure(rounds: int = ROUNDS) -> None:
    """Print the table."""
    if not HOST_DEVICE.exists():
        sys.exit(f"{HOST_DEVICE} is missing: apt-get install containernetworking-plugins")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ExitStack() as stack:
        root = Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(prefix="podfabric-bench-", dir="/var/tmp")
            )
        )
        told = subprocess.run([HOST_DEVICE], env={}, capture_output=True, text=True, check=False)
        print(f"Go's plugins: {HOST_DEVICE}, {(told.stdout + told.stderr).splitlines()[0]}\n")
        print(f"{'whole processes':44}{'podfabric':>12}{'Go':>12}{'ratio':>8}   target")
        addresses(root, rounds)
        agent = stack.enter_context(serving(root / "agent"))
        pairs = stack.enter_context(cables(2 * MOVES))
        moves(root, agent, pairs, rounds)
        storm(agent)
        status = Path(f"/proc/{agent.process.pid}/status").read_text().splitlines()
        resident = next(int(line.split()[1]) for line in status if line.startswith("VmRSS:"))
        size = LAUNCHER.stat().st_size
        print(f"{'resident memory of the agent after all this':44}{resident >> 10:8} MiB   <= 70")
        print(f"{'size of the launcher':44}{size >> 10:8} KiB   <= 1024")


@contextmanager
def serving(root: Path) -> Iterator[Service]:
    """An agent with the plugin `moved` and its files below `root`, for the block."""
    install_launchers(root / "bin", ("podfabric-ipam", "moved"))
    agent = Service(root, "bench.moved")
    try:
        agent.wait_until_ready()
        yield agent
    finally:
        agent.stop()


def side_of(agent: Service, name: str) -> Side:
    """The executable of a plugin that our agent serves."""
    return Side(agent.root / "bin" / name, {"ipam": IPAM}, {"PODFABRIC_SOCKET": str(agent.socket)})


def go_side(executable: Path, directory: Path) -> Side:
    """An executable of Go's, with host-local, which keeps its addresses in `directory`."""
    ipam = {"type": "host-local", "dataDir": str(directory), "subnet": "10.0.0.0/8"}
    return Side(executable, {"ipam": ipam})


def addresses(root: Path, rounds: int) -> None:
    """Measure the reservation of an address, and VERSION."""
    for size, target in ((0, 0.6), (LARGE, 0.05)):
        directory = root / f"agent-{size}"
        held = [
            reservation(
                text(FIRST + number), f"c{number}", boot=BOOT, namespace="ns", pod=f"p{number}"
            )
            for number in range(size)
        ]
        SqliteStore(directory / "state/ipam", BOOT).load(held)
        theirs = root / f"host-local-{size}"
        fill_host_local(theirs / "n1", size)
        with serving(directory) as agent:
            sides = side_of(agent, "podfabric-ipam"), go_side(HOST_LOCAL, theirs)
            ours, others = interleaved(rounds, *(partial(reserve_and_release, s) for s in sides))
            row(f"an address, {size} are taken", ours, others, target)
            if not size:
                ours, others = interleaved(rounds, *(partial(version, side) for side in sides))
                row("VERSION", ours, others, 0.6)


def fill_host_local(directory: Path, size: int) -> None:
    """Write the same reservations in host-local's form: a file for each."""
    directory.mkdir(parents=True)
    for number in range(size):
        (directory / text(FIRST + number)).write_bytes(b"c%d\r\neth0" % number)
    if size:
        (directory / "last_reserved_ip.0").write_text(text(FIRST + size - 1))


def reserve_and_release(side: Side, number: int) -> float:
    """Seconds that an ADD takes; its DEL follows."""
    call = side.call("ADD", f"c{number}")
    ips = run(call)["ips"]
    assert len(ips) == 1, ips
    run(side.call("DEL", f"c{number}"))
    return call.seconds


def version(side: Side, number: int) -> float:
    """Seconds that a VERSION takes."""
    call = side.call("VERSION", "c")
    assert VERSION in run(call)["supportedVersions"]
    return call.seconds


class Turn(NamedTuple):
    """Seconds that ADDs and the DELs after them took, and the agent's CPU time meanwhile."""

    added: float
    removed: float
    cpu_added: Cpu
    cpu_removed: Cpu


def moves(root: Path, agent: Service, pairs: Sequence["Cable"], rounds: int) -> None:
    """Measure moves of an interface with an address into a pod and back: one, then many at once."""
    ours, theirs = side_of(agent, "moved"), go_side(HOST_DEVICE, root / "host-local")
    for count, target in ((1, 0.7), (MOVES, 0.5)):
        podfabric, go = interleaved(
            max(rounds // count, 8),
            partial(attach_and_detach, ours, agent, pairs[:MOVES][:count]),
            partial(attach_and_detach, theirs, agent, pairs[MOVES:][:count]),
        )
        many = f", {count} at once" if count > 1 else ""
        for label, verb, limit in (
            (f"an interface and an address{many}", "added", target),
            (f"  given back{many}", "removed", None),
        ):
            seconds, others = ([getattr(turn, verb) for turn in each] for each in (podfabric, go))
            row(label, seconds, others, limit)
            used = [getattr(turn, f"cpu_{verb}") for turn in podfabric]
            total, user = (
                sum(getattr(each, part) for each in used) / len(used) / count * 1e3
                for part in ("total", "user")
            )
            print(f"  CPU time of the agent for each: {total:.2f} ms, {user:.2f} of it Python's")


def attach_and_detach(side: Side, agent: Service, pairs: Sequence["Cable"], number: int) -> Turn:
    """Move all cables' interfaces into their pods at once, and back."""
    before = Cpu.of(agent.process.pid)
    added = at_once(adds := [cable.call(side, "ADD", number) for cable in pairs])
    between = Cpu.of(agent.process.pid)
    for call, cable in zip(adds, pairs, strict=True):
        (address,) = call.answer()["ips"]
        cable.require_address(address["address"])
    removed = at_once(dels := [cable.call(side, "DEL", number) for cable in pairs])
    for call in dels:
        call.answer()
    after = Cpu.of(agent.process.pid)
    time.sleep(SETTLE)
    return Turn(added, removed, between.since(before), after.since(between))


def storm(agent: Service) -> None:
    """Compare many ADDs at once with ADDs of the same kind one at a time."""
    side = side_of(agent, "podfabric-ipam")
    alone = [side.call("ADD", f"alone-{number}") for number in range(MANY)]
    for call in alone:
        run(call)
    together = [side.call("ADD", f"together-{number}") for number in range(MANY)]
    wall = at_once(together)
    given = {call.answer()["ips"][0]["address"] for call in together}
    assert len(given) == MANY
    for call in (*alone, *together):
        run(side.call("DEL", call.environ["CNI_CONTAINERID"]))
    print(f"\n{MANY} ADDs of an address{'':22}{'p50':>9}{'p99':>12}")
    for label, calls in (("one at a time", alone), ("at once", together)):
        seconds = [call.seconds for call in calls]
        middle, last = quantile(seconds, 0.5) * 1e3, quantile(seconds, 0.99) * 1e3
        print(f"{label:44}{middle:9.2f} ms{last:9.2f} ms")
    print(
        f"{'  until the last has ended':44}{wall * 1e3:9.2f} ms ({MANY / wall:.0f}/s)", flush=True
    )


class Cable(NamedTuple):
    """A veth pair with one end on the host, the other end elsewhere, and a namespace for a pod."""

    name: str
    pod: str

    def call(self, side: Side, command: str, number: int) -> Call:
        """A call for this interface and its pod."""
        netns = f"/var/run/netns/{self.pod}"
        return side.call(command, f"{self.name}-{number}", netns, device=self.name)

    def require_address(self, cidr: str) -> None:
        """End the measurement unless the pod's interface is up and has the address."""
        (shown,) = json.loads(ip("-n", self.pod, "-j", "address", "show", "dev", "net1"))
        present = {f"{own['local']}/{own['prefixlen']}" for own in shown["addr_info"]}
        assert cidr in present and "UP" in shown["flags"], shown


@contextmanager
def cables(count: int) -> Iterator[list[Cable]]:
    """Cables and namespaces for the block; removed afterwards."""
    with ExitStack() as stack:
        aside = stack.enter_context(namespace("aside"))
        made = []
        for number in range(count):
            cable = Cable(f"pf{os.getpid()}-{number}", stack.enter_context(namespace("pod")))
            peer = ("peer", "name", cable.name, "netns", aside)
            ip("link", "add", cable.name, "type", "veth", *peer)
            ip("-n", aside, "link", "set", cable.name, "up")
            made.append(cable)
        yield made


if __name__ == "__main__":
    main()
