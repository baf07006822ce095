"""Killing a process at any line: a child traces itself and exits, without cleaning up.

The lines are those of the store's modules: each one that the work executes, before its last time.
"""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from base import files
from ipam.store import sqlite_store
from ipam.store.sqlite_store import SqliteStore
from ipam.store.store_files import StoreFiles
from tests.unit.ipam.calls import BOOT, range_of, sets_of

MODULES = {
    str(Path(sqlite_store.__file__).with_name(name))
    for name in (
        "sqlite_store.py",
        "store_files.py",
        "snapshot.py",
        "database.py",
        "tables.py",
        "repair.py",
    )
} | {files.__file__}
SETS = sets_of(range_of("10.0.0.0/24"), range_of("fd00::/64"))
KILLED = 9


def quiet(directory: Path) -> SqliteStore:
    return SqliteStore(StoreFiles(directory, report=lambda text: None, kept=False), BOOT)


Line = tuple[str, int]


def lines_of(work: Callable[[], object]) -> dict[Line, int]:
    """Do `work`; each line that it executed, and as the how manieth it did so last."""
    last: dict[Line, int] = {}
    count = 0

    def note(frame: FrameType) -> None:
        nonlocal count
        last[(frame.f_code.co_filename, frame.f_lineno)] = count
        count += 1

    traced(work, note)
    return last


def kill_at(line: int, work: Callable[[], object]) -> None:
    """Do `work` in a child that is gone before it executes that line."""
    child = os.fork()
    if child == 0:
        remaining = line

        def die(frame: FrameType) -> None:
            nonlocal remaining
            if remaining == 0:
                os._exit(KILLED)
            remaining -= 1

        traced(work, die)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == KILLED


def traced(work: Callable[[], object], on_line: Callable[[FrameType], None]) -> None:
    """Do `work`, with a call before each line of the store's modules."""

    def trace(frame: FrameType, event: str, _: Any) -> Any:  # noqa: ANN401 - sys.settrace's
        if frame.f_code.co_filename not in MODULES:
            return None
        if event == "line":
            on_line(frame)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)


def copied(base: Path) -> Path:
    """A fresh copy of the store in `base`."""
    directory = base.with_name("copy")
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(base, directory)
    return directory


def held(directory: Path) -> dict[str, str]:
    return {
        reservation.address: reservation.container_id
        for reservation in quiet(directory).reservations()
    }


def fail(line: str) -> None:
    raise AssertionError(line)
