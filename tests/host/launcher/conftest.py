"""The launcher, built once and copied under a plugin's name into a directory of each test."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.host.launcher.fake import Launcher
from tools import build_launcher


@pytest.fixture(scope="session")
def built() -> Path:
    return build_launcher.build()


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory that all users may enter, with a path short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="launcher-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def launcher(directory: Path, built: Path) -> Launcher:
    """The plugin `ipoib`; no agent listens at its socket yet."""
    (directory / "bin").mkdir()
    executable = shutil.copy(built, directory / "bin" / "ipoib")
    return Launcher(Path(executable), directory / "agent.sock")
