"""NVIDIA's driver in the layout of an installation: the stand-in's library below a root, and
/proc."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from base.paths import Paths
from tests.standin import build
from tests.standin.gpus import Behaviour, Gpu, Node

LIBRARIES = "usr/lib64"


@contextmanager
def installed(directory: Path, gpus: tuple[Gpu, ...], behaviour: Behaviour) -> Iterator[Node]:
    """A node whose driver is below `directory`, for NVML in this process."""
    root = directory / LIBRARIES
    root.mkdir(parents=True)
    # A separate file for each driver: the loader takes one file for one library.
    shutil.copy(
        build.libraries() / "libnvidia-ml.so.1", root / f"libnvidia-ml.so.{behaviour.driver}"
    )
    (root / "libnvidia-ml.so.1").symlink_to(f"libnvidia-ml.so.{behaviour.driver}")
    with Node(directory, gpus, behaviour) as node, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PODFABRIC_STANDIN_GPUS", str(node.file))
        yield node


def paths_with(directory: Path, gpus: tuple[Gpu, ...]) -> Paths:
    """The node's files, with the GPUs in /proc as the driver shows them."""
    for gpu in gpus:
        address = gpu.pci.lower().removeprefix("0000")
        listed = directory / "proc/driver/nvidia/gpus" / address
        listed.mkdir(parents=True)
        (listed / "information").write_text(
            f"Model: \t\t {gpu.name}\nGPU UUID: \t {gpu.uuid}\n"
            f"Bus Location: \t {address}\nDevice Minor: \t {gpu.minor}\n"
        )
    return Paths(proc=directory / "proc", run=directory / "run", sys=directory / "sys")
