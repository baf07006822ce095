"""`podfabric doctor` with a driver: its answers, and the libraries that its containers can load."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from msgspec.structs import replace

from cli import doctor
from cli.checks import Finding
from node.state import ThisNode
from tests.host.gpu.driver_root import installed, paths_with
from tests.standin.gpus import GIB, Behaviour, gpus

TWO = gpus(2, bytes=16 * GIB)
R615 = "615.20.01"
Examine = Callable[[str], list[Finding]]


@pytest.fixture
def examine(tmp_path: Path) -> Iterator[Callable[..., Examine]]:
    """A function that makes a node with two GPUs in /proc and a driver that has `count` of them."""
    with ExitStack() as stack:

        def made(*, count: int = 2) -> Examine:
            paths = replace(
                paths_with(tmp_path, TWO),
                dev=tmp_path / "dev",
                etc=tmp_path / "etc",
                state=tmp_path / "state",
                kubelet=tmp_path / "kubelet",
            )
            paths.etc.mkdir()
            paths.config.write_text("gpus: [{mode: units}]\n")
            root = tmp_path / "driver"
            stack.enter_context(installed(root, TWO[:count], Behaviour(driver=R615)))

            def examined(check: str) -> list[Finding]:
                node = ThisNode(paths, tolerant=True)
                node.driver_root = root
                return doctor.examine(node, [each for each in doctor.CHECKS if each[0] == check])

            return examined

        yield made


def test_the_driver_answers_for_every_gpu(examine: Callable[..., Examine]) -> None:
    (found,) = examine()("GPU driver")

    assert (found.status, found.seen) == ("ok", f"driver {R615} answers for 2 GPUs")


def test_gpu_that_the_driver_does_not_list_fails(examine: Callable[..., Examine]) -> None:
    (found,) = examine(count=1)("GPU driver")

    assert found.status == "failed"
    assert "does not answer for 0000:11:00.0" in found.seen


def test_driver_gives_the_gpus_memory_if_pools_do_not(
    examine: Callable[..., Examine],
) -> None:
    """The GPUs have no device nodes here, so they fail for that reason, and not for their
    memory."""
    found = examine()("GPU nodes")

    assert "nvidia0: No such file" in found[0].seen
    assert not any("the size of the memory" in each.seen for each in found)
