"""Whatever processes call, in whatever order: the limit holds, and nothing is lost.

What really lies on the GPU the stand-in for the driver knows, by accounts of its own. It keeps the
most that there ever was, so one look at the end is a look after every call.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu.conftest import MIB, Place
from tests.standin.gpus import Behaviour

Make = Callable[..., Place]

PROGRAM = Path(__file__).parent / "programs/random_calls.py"
# For a run of all that is promised: PODFABRIC_GPU_CALLS=100000 PODFABRIC_GPU_SEEDS=20.
CALLS = os.environ.get("PODFABRIC_GPU_CALLS", "1500")
SEEDS = int(os.environ.get("PODFABRIC_GPU_SEEDS", "3"))


@pytest.mark.parametrize(("chunk", "threads"), [(2, 1), (32, 1), (2, 8)])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_limit_holds_at_every_step_and_nothing_is_lost(
    place: Make, seed: int, chunk: int, threads: int
) -> None:
    limit = 160 * MIB
    here = place(memory=limit, behaviour=Behaviour(pool_chunk=chunk * MIB))
    commands = [
        [sys.executable, str(PROGRAM), f"{seed}{process}", CALLS, str(threads)]
        for process in range(2)
    ]
    running = [subprocess.Popen(command, env=here.environment) for command in commands]
    assert [process.wait() for process in running] == [0, 0]
    assert 0.5 * limit < here.node.read().gpus[0].peak <= limit
    use = here.group.uses()[0]
    assert use.denied > 0
    assert use.peak_bytes <= limit
    # Both have ended, and their slots show what they had counted: nothing.
    assert set(here.group.slots().values()) == {(0,)}
    assert here.resident() == 0
