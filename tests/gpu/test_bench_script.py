"""bench/gpu.sh works: every row of it is measured over the stand-in, or says why it is not."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.standin import build
from tests.standin.gpus import GIB, Behaviour, Node, gpus
from tools.compiling import CHECKOUT

LINE = re.compile(r"(G[0-9]+) +(.+): (.+) \| (.+) \| (ok|miss|skipped: .+)")
TIMED = {"G6", "G7", "G8", "G9", "G13", "G14", "G15"}  # which a busy machine may miss
NEED_A_GPU = {"G4", "G5", "G11", "G12"}


def _ran(*words: str) -> "subprocess.CompletedProcess[str]":
    command = ["bench/gpu.sh", *words]
    return subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)


def test_every_row_is_measured_or_says_why_not() -> None:
    done = _ran("--stand-in", "--short")
    assert (done.returncode, done.stderr) == (0, "")
    first, *lines = done.stdout.splitlines()
    assert "say nothing about a GPU" in first
    found = [LINE.fullmatch(line) for line in lines]
    assert None not in found, lines
    rows = [(match[1], match[2], match[5]) for match in found if match is not None]
    assert {row for row, _, _ in rows} == {f"G{number}" for number in range(1, 16)}
    for row, what, verdict in rows:
        if row in NEED_A_GPU or "PyTorch" in what:
            assert verdict == "skipped: it needs a real GPU"
        elif row not in TIMED:
            assert verdict == "ok", (row, what)
    assert not [what for _, what, _ in rows if "could not be measured" in what]


@pytest.mark.parametrize("row", ["g2", "g3", "g6", "g7", "g9", "g10"])
def test_rows_of_a_machines_own_driver_are_measured(tmp_path: Path, row: str) -> None:
    """Which is the stand-in here, found as a machine's: with its UUID and its NVML."""
    library = str(build.libraries() / "libcuda.so.1")
    with Node(tmp_path, gpus(1, bytes=64 * GIB), Behaviour(reuse_addresses=True)) as node:
        done = subprocess.run(
            [sys.executable, "-m", "bench.gpu.rows", row, "--short", "--real", library],
            cwd=CHECKOUT,
            env={**os.environ, **node.environment},
            capture_output=True,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, "")
    found = [LINE.fullmatch(line) for line in done.stdout.splitlines()]
    assert found
    for match in found:
        assert match is not None, done.stdout
        assert match[1] in TIMED or match[5] == "ok", done.stdout
        assert "not corrected" not in match[3], "NVML tells of processes of this pid namespace"


@pytest.mark.parametrize("words", [["--standin"], ["g16"], ["--stand-in", "G1"]])
def test_a_wrong_word_prints_how_to_use_it(words: list[str]) -> None:
    done = _ran(*words)
    assert done.returncode == 2
    assert "bench/gpu.sh --stand-in" in done.stderr
    assert done.stdout == ""
