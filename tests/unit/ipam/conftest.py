"""A node for each test."""

from pathlib import Path

import pytest

from tests.unit.ipam.calls import Calls


@pytest.fixture
def node(tmp_path: Path) -> Calls:
    """A node whose store is new."""
    return Calls(tmp_path / "ipam")
