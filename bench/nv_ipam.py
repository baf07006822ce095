"""nv-ipam's executable and node daemon against podfabric's, on one API server, in one run.

Both serve the same definition from the same IPPool, each from its own node's entry of 4,096
addresses. Whole processes, as a runtime starts them; both stores are on a disk. As root: `python -m
bench.nv_ipam`, where `tests.cluster.programs` finds the sources of nv-ipam.
"""

import argparse
import os
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

from bench.agent import Agent
from bench.processes import Call, at_once, environment, interleaved, row, run
from ipam.cluster.objects import AddressPool
from tests.api import nv_ipam
from tests.api.server import ApiServer, api_server
from tests.cluster import programs
from tests.waiting import until

ROUNDS, HELD, MANY, STORMS = 40, 1000, 64, 12
POOL = "bench"
ENTRIES = {"ours": ("10.0.0.1", "10.0.15.255"), "theirs": ("10.0.16.1", "10.0.31.255")}
CONFIG = 'agent: {listen: ""}\nipam: {scope: cluster, nv_ipam: true}\n'


class Side(NamedTuple):
    """How one of both is called."""

    executable: Path
    config: bytes
    environ: dict[str, str]

    def made(self, command: str, container: str) -> Call:
        """One call, not started yet."""
        pod = f"K8S_POD_NAMESPACE=ns;K8S_POD_NAME={container};K8S_POD_UID=u{container}"
        environ = environment(
            self.executable, command, container, CNI_ARGS=f"IgnoreUnknown=1;{pod}", **self.environ
        )
        return Call(self.executable, environ, self.config)


class Seconds(NamedTuple):
    """Of an ADD and its DEL."""

    added: float
    removed: float


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--held", type=int, default=HELD)
    arguments = parser.parse_args()
    (built,) = programs.build([nv_ipam.PROGRAM])
    with ExitStack() as stack:
        directory = tempfile.TemporaryDirectory(prefix="podfabric-bench-", dir="/var/tmp")
        root = Path(stack.enter_context(directory))
        server = stack.enter_context(api_server())
        serve_pools(server)
        (root / "theirs").mkdir()
        daemon = nv_ipam.NodeDaemon(server, built, root / "theirs", "theirs")
        process = stack.enter_context(daemon.running())
        agent = stack.enter_context(start_agent(server, root))
        config = daemon.config({"poolName": POOL})
        sides = (
            Side(agent.executables / "nv-ipam", config, {"PODFABRIC_SOCKET": str(agent.socket)}),
            Side(daemon.executable, config, {}),
        )
        for side in sides:
            until(partial(answers, side), what=f"answer of {side.executable}")
        measure(sides, arguments.rounds, arguments.held)
        print(f"resident: agent {agent.resident_bytes >> 20} MiB, daemon {rss(process.pid)} MiB")


def serve_pools(server: ApiServer) -> None:
    """nv-ipam's kinds, and a pool as its controller leaves it."""
    nv_ipam.install(server)
    for node in ENTRIES:
        server.node(node)
    spec = {"subnet": "10.0.0.0/16", "perNodeBlockSize": 4096, "gateway": "10.0.255.254"}
    nv_ipam.put_pool(server, "ippools", POOL, spec)
    entries = [
        {"nodeName": node, "startIP": first, "endIP": last}
        for node, (first, last) in ENTRIES.items()
    ]
    nv_ipam.put_entries(server, "ippools", POOL, entries)
    settle = nv_ipam.settling(server)

    def is_ready() -> bool:
        settle()
        return any(each.status.block_size for each in server.admin.list(AddressPool).items)

    until(is_ready, what="the AddressPool")


def start_agent(server: ApiServer, root: Path) -> Agent:
    """The agent of the node "ours"; it starts as it is entered."""
    kubeconfig = str(server.plane.kubeconfig("admin"))
    environ = {"NODE_NAME": "ours", "PODFABRIC_KUBECONFIG": kubeconfig}
    return Agent(root / "ours", names=("nv-ipam",), config=CONFIG, environ=environ)


def answers(side: Side) -> bool:
    """Whether an ADD succeeds now."""
    call = side.made("ADD", "probe")
    call.prepare()
    call.start()
    call.wait()
    if call.code:
        return False
    call.answer()
    run(side.made("DEL", "probe"))
    return True


def measure(sides: tuple[Side, Side], rounds: int, held: int) -> None:
    """Print the rows."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # each call of nv-ipam's writes two lines to it
    print(f"\n{'whole processes':44}{'podfabric':>12}{'nv-ipam':>12}{'ratio':>8}   target")
    pairs(sides, rounds, "none held", 0.4)
    storms(sides)
    for side in sides:
        for number in range(held):
            run(side.made("ADD", f"held{number}"))
    pairs(sides, rounds, f"{held} held", 0.25)


def pairs(sides: tuple[Side, Side], rounds: int, what: str, target: float) -> None:
    """An ADD and its DEL, in turns."""
    ours, theirs = interleaved(rounds, *(partial(pair, side) for side in sides))
    row(f"ADD, {what}", [each.added for each in ours], [each.added for each in theirs], target)
    row(f"DEL, {what}", [each.removed for each in ours], [each.removed for each in theirs])


def pair(side: Side, number: int) -> Seconds:
    """One ADD and its DEL."""
    calls = [side.made(command, f"c{number}") for command in ("ADD", "DEL")]
    assert len(run(calls[0])["ips"]) == 1
    run(calls[1])
    return Seconds(calls[0].seconds, calls[1].seconds)


def storms(sides: tuple[Side, Side]) -> None:
    """Many at once, until the last has ended. No address may be given twice."""

    def storm(side: Side, number: int) -> Seconds:
        containers = [f"s{number}-{pod}" for pod in range(MANY)]
        adds = [side.made("ADD", container) for container in containers]
        added = at_once(adds)
        addresses = [call.answer()["ips"][0]["address"] for call in adds]
        assert len(set(addresses)) == MANY, "an address was given twice"
        deletions = [side.made("DEL", container) for container in containers]
        removed = at_once(deletions)
        for call in deletions:
            call.answer()
        return Seconds(added, removed)

    ours, theirs = interleaved(STORMS, *(partial(storm, side) for side in sides))
    added = [each.added for each in ours], [each.added for each in theirs]
    row(f"{MANY} ADDs at once", *added, 0.2)
    row(
        f"{MANY} DELs at once",
        [each.removed for each in ours],
        [each.removed for each in theirs],
    )


def rss(pid: int) -> int:
    """MiB of a process."""
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:  # noqa: PTH123
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


if __name__ == "__main__":
    main()
