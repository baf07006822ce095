"""Fixtures of tests with nodes whose pools of nv-ipam are podfabric's own."""

from pathlib import Path

import pytest

from tests.unit.ipam.cluster.nv_ipam.test_own import World


@pytest.fixture
def world(memory_path: Path) -> World:
    """A cluster with the nodes a and b."""
    world = World(memory_path)
    for name in ("a", "b"):
        world.node(name)
    return world
