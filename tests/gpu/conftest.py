from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.gpu import group as groups
from tests.gpu.gate import Gate
from tests.gpu.group import Group, Libraries
from tests.standin.driver import Driver
from tests.standin.gpus import Behaviour, Gpu, Node, gpus

MIB = 1 << 20


@pytest.fixture(scope="session")
def libraries() -> Libraries:
    return groups.libraries()


class Place:
    """A node, a group on it, and processes that use the shim there."""

    def __init__(self, directory: Path, libraries: Libraries, stack: ExitStack) -> None:
        self.directory = directory
        self.libraries = libraries
        self._stack = stack
        self.node: Node
        self.group: Group

    def make(
        self,
        count: int = 1,
        *,
        memory: int = 64 * MIB,
        context: int = 0,
        agent: bool = True,
        ours: int = 0,
        behaviour: Behaviour | None = None,
        **of_each: object,
    ) -> "Place":
        """A node with `count` GPUs, and a group that has this limit of `ours`."""
        cards: tuple[Gpu, ...] = gpus(count, **of_each)
        behaviour = behaviour or Behaviour(pool_chunk=2 * MIB)
        self.node = self._stack.enter_context(Node(self.directory, cards, behaviour))
        self.group = Group(self.directory, cards[ours], memory, context)
        if agent:
            self._stack.enter_context(self.group)
        return self

    @property
    def environment(self) -> dict[str, str]:
        return groups.environment(self.node, self.libraries)

    def process(self, library: str = "libcuda.so.1", **variables: str) -> Driver:
        """A process with the library loaded."""
        return self._stack.enter_context(Driver({**self.environment, **variables}, library))

    def stranger(self, library: str = "libcuda.so.1") -> Driver:
        """A process of another container, for which nothing is limited."""
        plain = {**self.environment, "LD_LIBRARY_PATH": str(self.libraries.plain)}
        return Driver(plain, library)

    def started(self, device: int = 0) -> Driver:
        """A process with a context."""
        driver = self.process()
        driver.start(device)
        return driver

    def resident(self, gpu: int = 0) -> int:
        """Bytes that lie on a GPU, as the stand-in knows."""
        return self.node.read().gpus[gpu].resident


@pytest.fixture
def place(
    tmp_path: Path, libraries: Libraries, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Place]]:
    monkeypatch.chdir(tmp_path)
    with ExitStack() as stack:
        yield Place(tmp_path, libraries, stack).make


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    """Half of a GPU, and every launch is taken for one of 20 us."""
    return Gate(tmp_path, measures=False)


@pytest.fixture
def measuring(tmp_path: Path) -> Gate:
    """Half of a GPU, and events that tell how long kernels take."""
    return Gate(tmp_path)
