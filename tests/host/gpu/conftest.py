from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.host.gpu.pods import GroupsNode


@pytest.fixture
def node(tmp_path: Path) -> Iterator[GroupsNode]:
    with GroupsNode(tmp_path / "gpu") as node:
        yield node
