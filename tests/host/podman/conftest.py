"""podman in separate namespaces, and a node with the reference interface plugins."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.host.podman.machine import links, machine
from tests.host.podman.node import Node
from tests.host.podman.runtime import Podman, configured, root_file_system
from tests.netns import namespace
from tests.runtime import CNI_BIN, REFERENCE_PLUGINS


@pytest.fixture
def plugins(tmp_path: Path) -> Path:
    """CNI_PATH: the reference interface plugins, and podfabric-ipam under its two names."""
    reference = [REFERENCE_PLUGINS / name for name in ("bridge", "host-device", "macvlan")]
    ours = [CNI_BIN / name for name in ("podfabric-ipam", "whereabouts")]
    return links(tmp_path / "bin", [*ours, *reference])


@pytest.fixture
def podman(tmp_path: Path, plugins: Path) -> Iterator[Podman]:
    """podman on a fresh machine."""
    root_file_system(tmp_path / "rootfs")
    with machine(configured(tmp_path, plugins)) as made:
        yield Podman(made, tmp_path)


@pytest.fixture
def node(tmp_path: Path, plugins: Path) -> Iterator[Node]:
    """A fresh node."""
    with namespace() as netns:
        yield Node(tmp_path, plugins, netns)


@pytest.fixture
def pod() -> Iterator[Path]:
    """A network namespace for a pod."""
    with namespace() as netns:
        yield netns


@pytest.fixture
def other_pod() -> Iterator[Path]:
    """A network namespace for another pod."""
    with namespace() as netns:
        yield netns
