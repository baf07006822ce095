"""`.ci/run` runs a failed test again: .ci/again runs each alone, three times."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

CHECKOUT = Path(__file__).resolve().parents[2]
TESTS = """
from pathlib import Path
runs = Path(__file__).with_name("runs")
def test_passes(): pass
def test_fails(): assert False
def test_fails_the_third_time():
    with runs.open("a") as file: file.write("x")
    assert len(runs.read_text()) < 3
"""


def again(directory: Path, *names: str, once: str = "") -> "subprocess.CompletedProcess[str]":
    """Run `.ci/again` for tests of `TESTS`."""
    module, failed, listed = (directory / name for name in ("test_it.py", "failed", "once"))
    module.write_text(TESTS)
    failed.write_text("".join(f"{module}::{name}\n" for name in names))
    listed.write_text(f"{module}::{once}\n")
    return subprocess.run(
        [".ci/again", failed, listed], cwd=CHECKOUT, capture_output=True, text=True, check=False
    )


def test_a_test_that_passes_three_times_is_flaky_and_another_fails_the_run(tmp_path: Path) -> None:
    third = "test_fails_the_third_time"
    done = again(tmp_path, "test_passes", "test_passes", "test_fails", third)
    said = [line.replace(f"{tmp_path}/test_it.py::", "") for line in done.stdout.splitlines()]
    assert [line for line in said if line.startswith(("FLAKY", "FAILED test"))] == [
        *("FAILED test_fails: also alone", f"FAILED {third}: also alone", "FLAKY test_passes")
    ]
    assert done.stdout.count("1 passed") == 2 + 3
    assert done.returncode == 1


def test_flaky_tests_fail_no_run(tmp_path: Path) -> None:
    assert again(tmp_path, "test_passes").returncode == 0


def test_a_test_that_is_listed_does_not_run_again(tmp_path: Path) -> None:
    done = again(tmp_path, "test_passes", once="test_passes")
    assert done.returncode == 1
    assert " passed" not in done.stdout


def test_of_more_than_three_none_runs_again(tmp_path: Path) -> None:
    done = again(tmp_path, *(f"test_passes[{number}]" for number in range(4)))
    assert done.returncode == 1
    assert done.stdout.count("FAILED") == 4


def test_without_a_failed_test_nothing_runs(tmp_path: Path) -> None:
    done = subprocess.run([".ci/again", tmp_path / "none", "x"], cwd=CHECKOUT, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("text", "failed"),
    [
        ("def test_a(): assert False\ndef test_b(): pass", "test_it.py::test_a"),
        ("import nothing_of_that_name", "test_it.py"),
    ],
    ids=["failed", "broken"],
)
def test_failed_tests_are_written_down_in_place_of_a_failed_run(
    tmp_path: Path, text: str, failed: str
) -> None:
    (tmp_path / "test_it.py").write_text(text)
    written = tmp_path / "failed"
    plugins = ("-p", "tests.conftest", "-p", "no:cacheprovider", "-n", "1")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, "--rootdir", tmp_path, tmp_path],
        cwd=CHECKOUT,
        env={**os.environ, "PODFABRIC_FAILED": str(written)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert set(written.read_text().splitlines()) == {failed}
