"""One ADD for four rails against an ADD for one rail, in the virtual machine: the ratio of medians.

`python -m tests.kernel.vm run -- .venv/bin/python -m bench.rail_adds`
"""

import tempfile
import time
from pathlib import Path
from statistics import median

from tests.kernel.pods import Node, delete_children, pod
from tests.kernel.rail_pods import RAILS, RailPods, ipoib_rails, vf_rails

ROUNDS = 12


def main() -> None:
    """Print a line for each kind of HCA."""
    for name, make in (("ipoib", ipoib_rails), ("VFs", vf_rails)):
        with make() as case, tempfile.TemporaryDirectory() as root:
            print(f"{name}: {measure(case, case.on(Path(root)))}", flush=True)


def measure(case: RailPods, node: Node, rounds: int = ROUNDS) -> str:
    """The medians of both ADDs, in turns, and their ratio."""
    with pod("timed") as netns:
        try:
            turns = [
                (_add(case, node, netns, "one"), _add(case, node, netns, "four"))
                for _ in range(rounds)
            ]
        finally:
            delete_children(netns)
    one, four = (median(seconds) * 1e3 for seconds in zip(*turns, strict=True))
    return f"1 rail {one:.0f} ms, {RAILS} rails {four:.0f} ms, ratio {four / one:.2f}"


def _add(case: RailPods, node: Node, netns: str, name: str) -> float:
    """The seconds of an ADD. The DEL is not measured."""
    began = time.monotonic()
    node.add("timed", netns, **case.of(name))
    seconds = time.monotonic() - began
    node.delete("timed", netns, **case.of(name))
    return seconds


if __name__ == "__main__":
    main()
