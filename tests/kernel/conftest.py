"""Fixtures of the tests that run in the virtual machine."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.kernel.pods")

from cni.ipoib.removal import remove_strays  # noqa: E402
from tests.kernel.pods import Node, pod  # noqa: E402


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """The plugin with a journal and a store of its own."""
    return Node(tmp_path)


@pytest.fixture
def pods() -> Iterator[list[str]]:
    """Three pods, on a host where no failed test has left an interface."""
    remove_strays()
    with ExitStack() as stack:
        yield [stack.enter_context(pod(f"pod{number}")) for number in range(3)]
