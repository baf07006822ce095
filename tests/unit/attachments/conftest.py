"""Servers with HCAs, and who holds them."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.attachments.choosing import show
from tests.unit.deviceplugin.holding import Holding
from tests.unit.host import servers


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="pf-") as name:  # short, for the sockets' paths
        yield Path(name)


@pytest.fixture
def server(root: Path, monkeypatch: pytest.MonkeyPatch) -> Holding:
    """Eight HCAs with the IPoIB interfaces ib0 to ib7, all up."""
    paths = servers.dgx(root)
    show(paths, monkeypatch, "ipoib")
    return Holding(paths)


@pytest.fixture
def card(root: Path) -> Holding:
    """A card with VFs and an SF."""
    return Holding(servers.vfs(root))
