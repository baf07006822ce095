"""Random histories that are the same in each run."""

import random
import uuid

import pytest


@pytest.fixture
def same_uuids(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The identities of stores, which order their nodes' blocks, come from the test's name."""
    chance = random.Random(request.node.nodeid)
    monkeypatch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=chance.getrandbits(128), version=4))
