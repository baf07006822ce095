"""Nodes with GPUs that are stand-ins, and processes on them."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.standin.driver import Driver
from tests.standin.gpus import Behaviour, Gpu, Node, gpus


@pytest.fixture
def make_node(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    """Makes a node, of one GPU with 8 GiB by default."""
    with ExitStack() as stack:

        def make(given: tuple[Gpu, ...] | None = None, **behaviour: object) -> Node:
            directory = tmp_path / f"node{len(list(tmp_path.iterdir()))}"
            directory.mkdir()
            node = Node(directory, given or gpus(1), Behaviour(**behaviour))  # type: ignore[arg-type]
            return stack.enter_context(node)

        yield make


@pytest.fixture
def node(make_node: Callable[..., Node]) -> Node:
    return make_node()


@pytest.fixture
def run() -> Iterator[Callable[..., Driver]]:
    """Starts a process on a node; unless `start` is false, device 0's context is current."""
    with ExitStack() as stack:

        def make(
            node: Node, start: bool = True, library: str = "libcuda.so.1", **env: str
        ) -> Driver:
            driver = stack.enter_context(Driver({**node.environment, **env}, library))
            if start:
                driver.start()
            return driver

        yield make
