"""Hooks of all tests. Tests marked `kernel` run in the virtual machine, and the rest on the
host."""

import os
import tempfile
from pathlib import Path

import pytest

from base import decoding

# These helpers assert: a failure must show the values.
pytest.register_assert_rewrite("tests.kernel.pods", "tests.kernel.cards", "tests.kernel.igb")

IN_VM = os.environ.get("PODFABRIC_VM") == "1"
LONGEST_TMPDIR = 12  # characters
FAILED = os.environ.get("PODFABRIC_FAILED")
"""A file for the ids of failed tests, which then do not fail the run: .ci/run decides on them."""
KERNEL_TESTS = Path(__file__).resolve().parent / "kernel"
CLUSTER_TESTS = tuple(KERNEL_TESTS.with_name(name) for name in ("api", "cluster"))


if not IN_VM:  # in the virtual machine the import takes seconds, and no test there needs it
    from hypothesis import HealthCheck, settings

    # On a busy machine an example may take any time.
    settings.register_profile(
        "patient", deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("patient")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a long TMPDIR: many tests make sockets, whose paths have at most 107 bytes."""
    if len(tempfile.gettempdir()) > LONGEST_TMPDIR:
        os.environ["TMPDIR"] = tempfile.tempdir = "/tmp"


def pytest_collection_finish(session: pytest.Session) -> None:
    """Decode once before threads start, as an agent does: a first decoding in a thread may
    crash."""
    decoding.build_decoders()


def pytest_runtest_logreport(report: pytest.TestReport | pytest.CollectReport) -> None:
    if FAILED and report.failed:
        with Path(FAILED).open("a") as file:
            file.write(f"{report.nodeid}\n")


pytest_collectreport = pytest_runtest_logreport


def pytest_sessionfinish(session: pytest.Session) -> None:
    if "COVERAGE_PROCESS_START" in os.environ:  # tools/branch_coverage.py
        import coverage

        # xdist kills a worker that does not end soon, so the data is saved here.
        if (measured := coverage.Coverage.current()) is not None:
            measured.save()
    if FAILED and session.exitstatus == pytest.ExitCode.TESTS_FAILED:
        session.exitstatus = pytest.ExitCode.OK


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore the tests on a cluster unless they are named: they take long, and build Kubernetes."""
    if collection_path not in CLUSTER_TESTS:
        return None
    named = (config.invocation_params.dir / each.partition("::")[0] for each in config.args)
    return None if any(path.resolve().is_relative_to(collection_path) for path in named) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here: list[pytest.Item] = []
    elsewhere: list[pytest.Item] = []
    for item in items:
        if KERNEL_TESTS in item.path.parents:
            item.add_marker(pytest.mark.kernel)
        needs_vm = item.get_closest_marker("kernel") is not None
        (here if needs_vm is IN_VM else elsewhere).append(item)
    # A worker keeps its first tests and gives its last ones to idle workers. A long test at the end
    # would run alone.
    items[:] = sorted(here, key=lambda item: item.get_closest_marker("early") is None)
    if elsewhere:
        config.hook.pytest_deselected(items=elsewhere)
