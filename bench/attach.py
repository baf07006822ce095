"""Launcher and agent against Go's plugins, in one run: ratios of medians, not milliseconds.

Whole processes, as a runtime starts them. Namespaces and interfaces are made for it and removed,
also after Ctrl-C. Run as root: `python -m bench.attach`.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from bench.agent import LAUNCHER, Agent
from bench.processes import (
    HOST_DEVICE,
    HOST_LOCAL,
    Call,
    Cpu,
    at_once,
    environment,
    interleaved,
    quantile,
    row,
    run,
)
from ipam.addresses import parse, text
from ipam.sqlite_store import SqliteStore
from ipam.store import Reservation

IP = "/usr/sbin/ip"
FLOOR = Path(__file__).with_name("floor.c")
FLOOR_ADDRESS = "10.255.0.1/8"
BOOT = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
FIRST = parse("10.0.0.2")
ROUNDS, ATTACHMENTS = 40, 1000
LARGE = 16_000  # reservations
MANY = 200  # at once
MOVES = 16  # at once
SETTLE = 0.25  # seconds for a removed namespace's end, which takes the lock that moves need
VERSION = "1.0.0"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--attachments", type=int, default=ATTACHMENTS)
    arguments = parser.parse_args()
    measure(arguments.rounds, arguments.attachments)


def measure(rounds: int = ROUNDS, attachments: int = ATTACHMENTS) -> None:
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
        print(f"Go's plugins: {about(HOST_DEVICE)}\n")
        print(f"{'whole processes':44}{'podfabric':>12}{'Go':>12}{'ratio':>8}   target")
        addresses(root, rounds)
        agent = stack.enter_context(Agent(root / "agent"))
        pairs = stack.enter_context(cables(2 * MOVES))
        moves(root, agent, pairs, rounds)
        storm(agent)
        memory(agent, pairs[:MOVES], attachments)
        launcher(agent, rounds)


def about(executable: Path) -> str:
    """What a plugin of Go's says of itself."""
    told = subprocess.run([executable], env={}, capture_output=True, text=True, check=False)
    return f"{executable}, {(told.stdout + told.stderr).splitlines()[0]}"


def addresses(root: Path, rounds: int) -> None:
    """An address reserved, and VERSION."""
    for size, target in ((0, 0.6), (LARGE, 0.05)):
        directory = root / f"agent-{size}"
        SqliteStore(directory / "state/ipam", BOOT).load(reservations(size))
        theirs = root / f"host-local-{size}"
        fill_host_local(theirs / "n1", size)
        with Agent(directory) as agent:
            ours, others = interleaved(
                rounds,
                partial(reserve_and_release, agent.executables / "podfabric-ipam", agent, theirs),
                partial(reserve_and_release, HOST_LOCAL, agent, theirs),
            )
            row(f"an address, {size} are taken", ours, others, target)
            if not size:
                ours, others = interleaved(
                    rounds,
                    partial(version, agent.executables / "podfabric-ipam", agent),
                    partial(version, HOST_LOCAL, agent),
                )
                row("VERSION", ours, others, 0.6)


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


def reserve_and_release(executable: Path, agent: Agent, theirs: Path, number: int) -> float:
    """The seconds of an ADD, whose DEL follows."""
    config = ipam_config(executable, theirs)
    calls = [
        Call(executable, environ(executable, agent, command, f"c{number}"), config)
        for command in ("ADD", "DEL")
    ]
    ips = run(calls[0])["ips"]
    assert len(ips) == 1, ips
    run(calls[1])
    return calls[0].seconds


def version(executable: Path, agent: Agent, number: int) -> float:
    """The seconds of a VERSION."""
    call = Call(executable, environ(executable, agent, "VERSION", "c"), b'{"cniVersion":"1.0.0"}')
    assert VERSION in run(call)["supportedVersions"]
    return call.seconds


class Turn(NamedTuple):
    """How long ADDs and the DELs after them took, and what the agent needed for them meanwhile."""

    added: float
    removed: float
    cpu_added: Cpu = Cpu()
    cpu_removed: Cpu = Cpu()


def moves(root: Path, agent: Agent, pairs: Sequence["Cable"], rounds: int) -> None:
    """An interface moved into a pod and given an address, and back: one, and many at once."""
    theirs = root / "host-local"
    ours = agent.executables / "moved"
    program = root / "floor"
    options = ("-O2", "-Wall", "-Wextra", "-Werror")
    subprocess.run(["gcc", *options, "-o", str(program), str(FLOOR)], check=True)
    half = len(pairs) // 2
    for count, target in ((1, 0.7), (MOVES, 0.5)):
        podfabric, go, bare = interleaved(
            max(rounds // count, 8),
            partial(attach_and_detach, ours, agent, theirs, pairs[:half][:count]),
            partial(attach_and_detach, HOST_DEVICE, agent, theirs, pairs[half:][:count]),
            partial(bare_attach_and_detach, program, pairs[half:][:count]),
        )
        many = f", {count} at once" if count > 1 else ""
        for label, verb, limit in (
            (f"an interface and an address{many}", "added", target),
            (f"  given back{many}", "removed", None),
        ):
            measured = ([getattr(turn, verb) for turn in turns] for turns in (podfabric, go, bare))
            row(label, next(measured), next(measured), limit, next(measured))
            used = [getattr(turn, f"cpu_{verb}") for turn in podfabric]
            total, user = (
                sum(getattr(each, part) for each in used) / len(used) / count * 1e3
                for part in ("total", "user")
            )
            print(f"  CPU time of the agent for each: {total:.2f} ms, {user:.2f} of it Python's")


def attach_and_detach(
    executable: Path, agent: Agent, theirs: Path, pairs: Sequence["Cable"], number: int
) -> Turn:
    """Move all cables' interfaces into their pods at once, and back."""
    before = Cpu.of(agent.pid)
    added = at_once(adds := cable_calls(executable, agent, theirs, pairs, "ADD", number))
    between = Cpu.of(agent.pid)
    for call, cable in zip(adds, pairs, strict=True):
        (ip,) = call.answer()["ips"]
        cable.require_address(ip["address"])
    removed = at_once(dels := cable_calls(executable, agent, theirs, pairs, "DEL", number))
    for call in dels:
        call.answer()
    after = Cpu.of(agent.pid)
    time.sleep(SETTLE)
    return Turn(added, removed, between.since(before), after.since(between))


def bare_attach_and_detach(program: Path, pairs: Sequence["Cable"], number: int) -> Turn:
    """The same, done by the program that does nothing else."""
    seconds: dict[str, float] = {}
    for verb in ("add", "del"):
        calls = [
            Call(program, {}, arguments=(verb, cable.netns, cable.name, "net1", FLOOR_ADDRESS))
            for cable in pairs
        ]
        seconds[verb] = at_once(calls)
        for call in calls:
            call.answer()
        if verb == "add":
            for cable in pairs:
                cable.require_address(FLOOR_ADDRESS)
    time.sleep(SETTLE)
    return Turn(seconds["add"], seconds["del"])


def cable_calls(
    executable: Path,
    agent: Agent,
    theirs: Path,
    pairs: Sequence["Cable"],
    command: str,
    number: int,
) -> list[Call]:
    """One call for each cable."""
    kind = "moved" if executable != HOST_DEVICE else "host-device"
    calls = []
    for cable in pairs:
        config = {
            "cniVersion": VERSION,
            "name": "n1",
            "type": kind,
            "device": cable.name,
            "ipam": json.loads(ipam_config(executable, theirs))["ipam"],
        }
        container = f"{cable.name}-{number}"
        variables = environ(executable, agent, command, container, cable.netns)
        calls.append(Call(executable, variables, json.dumps(config).encode()))
    return calls


def storm(agent: Agent) -> None:
    """Many ADDs at once, against one at a time of the same kind."""
    executable = agent.executables / "podfabric-ipam"
    config = ipam_config(executable, Path())

    def calls(command: str, round_: str) -> list[Call]:
        return [
            Call(executable, environ(executable, agent, command, f"{round_}-{n}"), config)
            for n in range(MANY)
        ]

    alone = calls("ADD", "alone")
    for call in alone:
        run(call)
    before = agent.log.stat().st_size
    together = calls("ADD", "together")
    wall = at_once(together)
    addresses = {call.answer()["ips"][0]["address"] for call in together}
    assert len(addresses) == MANY
    inside = agent.call_seconds(before)
    for call in calls("DEL", "alone") + calls("DEL", "together"):
        run(call)
    print(f"\n{MANY} ADDs of an address{'':22}{'p50':>9}{'p99':>12}")
    for label, seconds in (
        ("one at a time", [call.seconds for call in alone]),
        ("at once", [call.seconds for call in together]),
        ("  of that in the plugin, as the agent logs it", inside),
    ):
        middle, last = quantile(seconds, 0.5) * 1e3, quantile(seconds, 0.99) * 1e3
        print(f"{label:44}{middle:9.2f} ms{last:9.2f} ms")
    print(
        f"{'  until the last has ended':44}{wall * 1e3:9.2f} ms ({MANY / wall:.0f}/s)", flush=True
    )


def memory(agent: Agent, pairs: Sequence["Cable"], count: int) -> None:
    """What the agent holds after so many attachments."""
    before = agent.resident_bytes
    executable = agent.executables / "moved"
    for number in range(0, count, len(pairs)):
        for command in ("ADD", "DEL"):
            calls = cable_calls(executable, agent, Path(), pairs, command, number)
            at_once(calls)
            for call in calls:
                call.answer()
    after = agent.resident_bytes
    print(
        f"\n{'resident memory of the agent':44}{before / 2**20:9.1f} MiB, after {count} more "
        f"attachments {after / 2**20:.1f} MiB   <= 70{'' if after <= 70 << 20 else '  MISSED'}"
    )


def launcher(agent: Agent, rounds: int) -> None:
    """Its size, and what its start costs: VERSION it answers by itself."""
    size = LAUNCHER.stat().st_size
    true = Path("/bin/true")

    def nothing(number: int) -> float:
        call = Call(true, environ(true, agent, "VERSION", "c"))
        run(call)
        return call.seconds

    ours, theirs = interleaved(
        4 * rounds, partial(version, agent.executables / "podfabric-ipam", agent), nothing
    )
    start, least = statistics.median(ours), statistics.median(theirs)
    print(
        f"{'size of the launcher':44}{size / 1024:9.0f} KiB   <= 1024\n"
        f"{'its start, VERSION against /bin/true':44}{start * 1e6:9.0f} µs{least * 1e6:9.0f} µs"
    )


def environ(
    executable: Path, agent: Agent, command: str, container: str, netns: str = "/none"
) -> dict[str, str]:
    """The runtime's environment, and the way to the agent."""
    socket = str(agent.socket)
    return environment(executable, command, container, netns, PODFABRIC_SOCKET=socket)


def ipam_config(executable: Path, theirs: Path) -> bytes:
    """The same range for both sides."""
    if executable in (HOST_LOCAL, HOST_DEVICE):
        ipam = {"type": "host-local", "dataDir": str(theirs), "subnet": "10.0.0.0/8"}
    else:
        ipam = {"type": "podfabric-ipam", "range": "10.0.0.0/8", "gateway": "10.0.0.1"}
    return json.dumps(
        {"cniVersion": VERSION, "name": "n1", "type": executable.name, "ipam": ipam}
    ).encode()


class Cable:
    """One end of a veth pair on the host, the other aside, and a pod's namespace for it."""

    def __init__(self, number: int, aside: str) -> None:
        self.name = f"pfb{number}"
        self.pod = f"pfb-{os.getpid()}-{number}"
        self.netns = f"/var/run/netns/{self.pod}"
        ip("netns", "add", self.pod)
        ip("link", "add", self.name, "type", "veth", "peer", "name", self.name, "netns", aside)
        ip("-n", aside, "link", "set", self.name, "up")

    def require_address(self, cidr: str) -> None:
        """End the measurement if the pod's interface does not have it, or is not up."""
        (shown,) = json.loads(ip("-n", self.pod, "-j", "address", "show", "dev", "net1"))
        present = {f"{own['local']}/{own['prefixlen']}" for own in shown["addr_info"]}
        assert cidr in present and "UP" in shown["flags"], shown

    def remove(self) -> None:
        """The namespace; the interface goes with it, or with its other end."""
        subprocess.run([IP, "netns", "delete", self.pod], check=False, capture_output=True)


@contextmanager
def cables(count: int) -> Iterator[list[Cable]]:
    """Cables and namespaces, which are gone afterwards."""
    aside = f"pfb-{os.getpid()}-aside"
    with ExitStack() as stack:
        ip("netns", "add", aside)
        stack.callback(subprocess.run, [IP, "netns", "delete", aside], check=False)
        made = []
        for number in range(count):
            made.append(Cable(number, aside))
            stack.callback(made[-1].remove)
        yield made


def ip(*arguments: str) -> str:
    """Run ip(8)."""
    return subprocess.run([IP, *arguments], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
