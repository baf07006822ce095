"""Processes make random calls in a random order: the limit holds, and no memory is lost.

The stand-in for the driver counts the memory on the GPU independently of the shim. It keeps the
largest amount, so one check at the end covers every call.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu.conftest import MIB, Place
from tests.standin.gpus import Behaviour

Make = Callable[..., Place]

PROGRAM = Path(__file__).parent / "programs/random_calls.py"
SHAPES = pytest.mark.parametrize(("chunk", "threads"), [(2, 1), (32, 1), (2, 8)])


@SHAPES
@pytest.mark.parametrize("seed", range(3))
def test_the_limit_holds_at_every_step_and_nothing_is_lost(
    place: Make, seed: int, chunk: int, threads: int
) -> None:
    check(place, seed, chunk, threads, calls=10_000)


@pytest.mark.long
@SHAPES
@pytest.mark.parametrize("seed", range(20))
def test_the_limit_holds_in_each_of_a_hundred_thousand_calls(
    place: Make, seed: int, chunk: int, threads: int
) -> None:
    check(place, seed, chunk, threads, calls=100_000)


def check(place: Make, seed: int, chunk: int, threads: int, calls: int) -> None:
    """Run two processes that make `calls` calls each, and check the limit."""
    limit = 160 * MIB
    here = place(memory=limit, behaviour=Behaviour(pool_chunk=chunk * MIB))
    commands = [
        [sys.executable, str(PROGRAM), f"{seed}{process}", str(calls), str(threads)]
        for process in range(2)
    ]
    running = [subprocess.Popen(command, env=here.environment) for command in commands]
    assert [process.wait() for process in running] == [0, 0]
    assert 0.5 * limit < here.node.read().gpus[0].peak <= limit
    use = here.group.use()
    assert use.denied > 0
    assert use.peak_bytes <= limit
    # Both have ended, and their slots show what they had counted: nothing.
    assert set(here.group.slots().values()) == {0}
    assert here.resident() == 0
