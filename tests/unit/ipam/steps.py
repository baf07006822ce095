"""Counting what a call costs in steps of SQLite."""

from collections.abc import Callable
from pathlib import Path

import pytest

from ipam.store import store_files
from ipam.store.store_files import open_store
from ipam.store.tables import Tables


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], int]:
    """Counts the instructions that SQLite executes during a call."""
    count = 0

    def step() -> int:
        nonlocal count
        count += 1
        return 0

    def counted(directory: Path, *, kept: bool = False) -> Tables:
        tables = open_store(directory, kept=kept)
        tables.connection.set_progress_handler(step, 1)
        return tables

    monkeypatch.setattr(store_files, "open_store", counted)

    def measure(call: Callable[[], object]) -> int:
        nonlocal count
        count = 0
        call()
        return count

    return measure
