"""A server with a pool, a node, a stack of nodes, and histories that are the same in each run."""

import random
import uuid
from pathlib import Path

import pytest

from tests.fake_api import FakeApi
from tests.unit.ipam.leases.nodes import ClusterNode, put_pool


@pytest.fixture
def server() -> FakeApi:
    server = FakeApi()
    put_pool(server)
    return server


@pytest.fixture
def node(server: FakeApi, memory_path: Path) -> ClusterNode:
    return ClusterNode(server, memory_path / "a")


@pytest.fixture
def same_uuids(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The identities of stores, which order their nodes' blocks, come from the test's name."""
    chance = random.Random(request.node.nodeid)
    monkeypatch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=chance.getrandbits(128), version=4))
