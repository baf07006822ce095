"""A node for each test, its store in memory: what a disk adds is in the benchmarks."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from ipam.store.store_files import StoreFiles
from tests.unit.ipam.calls import Calls

SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """A new directory where fsync(2) costs nothing."""
    usable = os.access(SHARED_MEMORY, os.W_OK)
    path = Path(tempfile.mkdtemp(prefix="podfabric-", dir=SHARED_MEMORY if usable else None))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


@pytest.fixture
def node(memory_path: Path) -> Iterator[Calls]:
    """A node whose store is new, and kept open as an agent has it: the model plays all that a store
    does in both forms."""
    with closing(StoreFiles(memory_path / "ipam")) as kept:
        yield Calls(kept)
