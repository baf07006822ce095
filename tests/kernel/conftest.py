"""Fixtures of the tests that run in the virtual machine."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from base.paths import Paths
from cni.ipoib.plugin import IPoIB
from tests.kernel.cards import Card, cards
from tests.kernel.igb import with_addressed_vfs
from tests.kernel.pods import Node, SriovNode, delete_children, pod


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """The plugin `ipoib` with an empty journal and store."""
    return Node(tmp_path)


@pytest.fixture
def pods() -> Iterator[list[str]]:
    """Three pods, on a host on which no failed test has left an interface."""
    IPoIB(Paths()).remove_strays()
    with ExitStack() as stack:
        names = [stack.enter_context(pod(f"pod{number}")) for number in range(3)]
        for name in names:
            stack.callback(delete_children, name)
        yield names


@pytest.fixture
def sriov(tmp_path: Path) -> SriovNode:
    """The plugin `sriov` with an empty journal and store."""
    return SriovNode(tmp_path)


@pytest.fixture(scope="module")
def card() -> Iterator[Card]:
    """The first PF with three VFs, to which it has given addresses."""
    with with_addressed_vfs(cards()[0], 3) as ready:
        yield ready
