"""A real VF moved into a pod and given an address: `sriov` against Go's host-device.

In the virtual machine, where there are VFs:

    .venv/bin/python -m tests.kernel.vm run -- .venv/bin/python -m bench.vf

Both get the same VF, igb's, in turns. The ratio is of medians of whole processes. What emulation
slows down it slows down for both, but not equally: see docs/sriov.md.
"""

import argparse
import json
import tempfile
import time
from functools import partial
from pathlib import Path

from bench.agent import Agent
from bench.attach import SETTLE, about, environ, ipam_config
from bench.processes import HOST_DEVICE, Call, interleaved, row, run
from tests.kernel import cards, igb
from tests.kernel.pods import IP, link_in, pod
from tests.kernel.pods import run as command

ROUNDS = 20


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    rounds = parser.parse_args().rounds
    print(f"Go's plugins: {about(HOST_DEVICE)}\n")
    with (
        tempfile.TemporaryDirectory(prefix="podfabric-bench-") as name,
        igb.with_addressed_vfs(cards.cards()[0], 1) as card,
        Agent(Path(name) / "agent") as agent,
        pod("vf-bench") as netns,
    ):
        theirs = Path(name) / "host-local"
        measured = [
            partial(attach_and_detach, executable, agent, theirs, card.vfs[0], netns, verb)
            for verb in ("ADD", "DEL")
            for executable in (agent.executables / "sriov", HOST_DEVICE)
        ]
        print(f"{'whole processes':44}{'podfabric':>12}{'Go':>12}{'ratio':>8}   target")
        ours, others = interleaved(rounds, measured[0], measured[1])
        row("a VF and an address", ours, others, 0.7)
        ours, others = interleaved(rounds, measured[2], measured[3])
        row("  given back", ours, others)


def attach_and_detach(
    executable: Path, agent: Agent, theirs: Path, vf: str, netns: str, verb: str, number: int
) -> float:
    """The seconds of the ADD, or of the DEL that follows."""
    config = {
        "cniVersion": "1.0.0",
        "name": "n1",
        "type": executable.name,
        "deviceID" if executable.name == "sriov" else "pciBusID": vf,
        "ipam": json.loads(ipam_config(executable, theirs))["ipam"],
    }
    path = f"/var/run/netns/{netns}"
    calls = {
        command: Call(
            executable,
            environ(executable, agent, command, f"c{number}", path),
            json.dumps(config).encode(),
        )
        for command in ("ADD", "DEL")
    }
    (ip,) = run(calls["ADD"])["ips"]
    link = link_in(netns)
    assert link is not None
    assert (link.device, link.up) == (vf, True)
    assert ip["address"] in command(IP, "-n", netns, "address", "show", "dev", "net1")
    run(calls["DEL"])
    time.sleep(SETTLE)
    return calls[verb].seconds


if __name__ == "__main__":
    main()
