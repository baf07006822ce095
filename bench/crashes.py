"""`python -m bench.crashes [TIMES]`: an agent is killed at each boundary of a call, many times.

Row A15: tests/unit/ipam/cluster/test_crashes.py kills at each once. The ids of stores and claims
are others each time, and so are the blocks that nodes try.
"""

import sys
import tempfile
import time
from pathlib import Path

from tests.unit.ipam.cluster import test_crashes as crashes

TIMES = 20
PARTS = 8


def main() -> None:
    """Kill, and print how often; a failed assertion ends it."""
    times = int(sys.argv[1]) if sys.argv[1:] else TIMES
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="podfabric-bench-", dir="/dev/shm") as name:
        root = Path(name)
        counted = _boundaries(root / "count")
        for turn in range(times):
            for boot in ("boot-1", "boot-2"):
                for part in range(PARTS):
                    directory = root / f"{turn}-{boot}-{part}"
                    crashes.test_a_kill_at_any_boundary_loses_and_doubles_nothing(
                        directory, counted, part, boot
                    )
            print(
                f"{turn + 1} of {times}: {2 * counted * (turn + 1)} kills at {counted} boundaries, "
                f"{time.monotonic() - began:.0f} s, nothing lost or doubled",
                flush=True,
            )


def _boundaries(root: Path) -> int:
    _, node, other = crashes.cluster(root)
    kill = crashes.Kill()
    crashes.armed(node, kill)
    crashes.life(node)
    node.close()
    other.close()
    return kill.count


if __name__ == "__main__":
    main()
