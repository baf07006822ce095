"""The cheap look at sysfs, where that says what no driver should; test_inventory has the rest."""

from pathlib import Path

import pytest

from host import glance
from host.adapters import Adapter, adapters
from host.paths import Paths
from tests.unit.host import servers
from tests.unit.host.sysfs import Tree

UNREADABLE = b"mlx5\xff_0\n"


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return servers.dgx(tmp_path)


@pytest.fixture
def seen(paths: Paths) -> list[Adapter]:
    return adapters(paths)


def test_unchanged_server_is_as_it_was(paths: Paths, seen: list[Adapter]) -> None:
    assert all(glance.has_its_devices(paths, adapter) for adapter in seen)
    assert not glance.has_other_states(paths, seen, every=True)


def test_name_that_is_no_text_is_another_than_it_was(paths: Paths, seen: list[Adapter]) -> None:
    before = glance.verbs(paths)
    (paths.sys / "class/infiniband_verbs/uverbs0/ibdev").write_bytes(UNREADABLE)
    assert glance.verbs(paths) == before - {"uverbs0 mlx5_0"} | {"uverbs0 "}
    changed = [one.rdma[0].name for one in seen if not glance.has_its_devices(paths, one)]
    assert changed == ["mlx5_0"]


@pytest.mark.parametrize("name", ["umad0", "issm0"])
def test_mad_device_with_another_number_is_seen_by_who_gives_such_away(
    paths: Paths, seen: list[Adapter], name: str
) -> None:
    Tree(paths.sys, paths).write(f"class/infiniband_mad/{name}/dev", "231:250")
    changed = [one.rdma[0].name for one in seen if not glance.has_its_devices(paths, one)]
    assert changed == ["mlx5_0"]
    assert all(glance.has_its_devices(paths, one, mad=False) for one in seen)


def test_state_that_is_no_text_is_another_than_it_was(paths: Paths, seen: list[Adapter]) -> None:
    (paths.sys / "class/infiniband/mlx5_0/ports/1/state").write_bytes(UNREADABLE)
    assert glance.has_other_states(paths, seen, every=True)
