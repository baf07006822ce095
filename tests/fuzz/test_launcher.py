"""Fuzzes the launcher for twenty seconds with libFuzzer and its sanitizers."""

import os
import subprocess
from pathlib import Path

import pytest

from agent.serve import framing
from tests.waiting import PATIENCE
from tools.build_launcher import SOURCES
from tools.compiling import CHECKOUT

BUILD = CHECKOUT / "build/fuzz"
TARGET = Path(__file__).with_name("launcher_answer.c")
FLAGS = ["-std=gnu11", "-g", "-O1", "-fsanitize=fuzzer,address,undefined"]

ANSWER, ERROR, ENDLESS, REQUEST = b"\0", b"\1", b"\2", b"\3"
WHOLE = framing.write_answer(framing.ANSWERED, 0, b"noted\n", b'{"cniVersion":"1.1.0"}')
REFUSED = framing.write_answer(framing.REFUSED, 1, b"", b'{"code":11}')
SEEDS = [
    ANSWER + b"\xff" + WHOLE,
    ANSWER + b"\0" + REFUSED,
    ANSWER + b"\7" + WHOLE[:30],
    ANSWER + b"\xff" + b"pfa1" + bytes(8) + b"\xff" * 8,
    ENDLESS + b"\xff" + WHOLE,
    ENDLESS + b"\xff" + b"pfa1" + bytes(8) + b"\0\x0f\xff\xff" + b"\0\xff\xff\xff",
    ERROR + b"\0" + b'/run/not found/"\\caf\xc3\xa9\xff\n',
    ERROR + b"\0" + b"\xff" * 600,
    REQUEST + b"\0" + b"/opt/cni/bin/ipoib\0CNI_COMMAND=ADD\0\0=\xff",
    REQUEST + b"\xff" + b"x" * 300 + b"\0" + b"A=" + b"y" * 5000,
]


@pytest.fixture(scope="module")
def fuzzer() -> Path:
    """The fuzz target. It includes launcher.c to reach its static functions."""
    BUILD.mkdir(parents=True, exist_ok=True)
    others = [str(source) for source in sorted(SOURCES.glob("*.c")) if source.name != "launcher.c"]
    executable = BUILD / f"launcher_answer.{os.getpid()}"
    command = ["clang", *FLAGS, f"-I{SOURCES}", str(TARGET), *others, "-o", str(executable)]
    subprocess.run(command, check=True, timeout=5 * PATIENCE)
    return executable.replace(BUILD / "launcher_answer")


def test_no_bytes_from_outside_break_the_launcher(fuzzer: Path, tmp_path: Path) -> None:
    corpus, crashes = tmp_path / "corpus", tmp_path / "crashes"
    corpus.mkdir()
    crashes.mkdir()
    for number, seed in enumerate(SEEDS):
        (corpus / str(number)).write_bytes(seed)
    limits = ["-max_total_time=20", "-rss_limit_mb=512", "-max_len=8192", "-timeout=100"]
    # The sanitizer reserves terabytes that it does not use.
    unlimited = ["/bin/sh", "-c", 'ulimit -S -d unlimited; exec "$@"', "sh"]
    done = subprocess.run(
        [*unlimited, str(fuzzer), *limits, f"-artifact_prefix={crashes}/", str(corpus)],
        capture_output=True,
        timeout=5 * PATIENCE,
        check=False,
    )
    said = done.stderr.decode(errors="replace")
    inputs = {path.name: path.read_bytes() for path in crashes.iterdir()}
    assert done.returncode == 0, f"{inputs}\n{said[-4000:]}"
    assert "Done " in said  # number of runs and seconds
