"""A node with GPUs and its kubelet, for the tests of this directory."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from base.paths import Paths
from tests.host.deviceplugin.gpus.gpu_node import made_paths
from tests.kubelet.kubelet import Kubelet
from tests.unit.gpu.driver import Driver


@pytest.fixture
def gpus() -> int:
    """The number of GPUs that the node has from the start."""
    return 2


@pytest.fixture
def paths(root: Path, gpus: int) -> Paths:
    """The files of a node, whose driver is loaded if there are GPUs."""
    made = made_paths(root)
    if gpus:
        Driver(made).load(gpus)
    return made


@pytest.fixture
def kubelet(paths: Paths) -> Iterator[Kubelet]:
    """A kubelet that has been started."""
    with Kubelet(paths.kubelet) as own_kubelet:
        yield own_kubelet
