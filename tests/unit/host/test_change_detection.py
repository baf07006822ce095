"""Change detection with invalid sysfs content; test_inventory has the usual cases."""

from pathlib import Path

import pytest

from base.paths import Paths
from host.sysfs import change_detection
from host.sysfs.discovery import HCA, hcas
from tests.unit.host import servers
from tests.unit.host.sysfs import Tree

UNREADABLE = b"mlx5\xff_0\n"


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return servers.dgx(tmp_path)


@pytest.fixture
def seen(paths: Paths) -> list[HCA]:
    return hcas(paths)


def test_unchanged_server_is_as_it_was(paths: Paths, seen: list[HCA]) -> None:
    assert all(change_detection.has_its_devices(paths, hca) for hca in seen)
    assert not change_detection.has_other_ports(paths, seen)


def test_undecodable_name_is_a_change(paths: Paths, seen: list[HCA]) -> None:
    before = change_detection.uverbs(paths)
    (paths.sys / "class/infiniband_verbs/uverbs0/ibdev").write_bytes(UNREADABLE)
    assert change_detection.uverbs(paths) == before - {"uverbs0 mlx5_0"} | {"uverbs0 "}
    changed = [hca.rdma[0].name for hca in seen if not change_detection.has_its_devices(paths, hca)]
    assert changed == ["mlx5_0"]


@pytest.mark.parametrize("name", ["umad0", "issm0"])
def test_other_mad_number_is_a_change(paths: Paths, seen: list[HCA], name: str) -> None:
    Tree(paths.sys, paths).write(f"class/infiniband_mad/{name}/dev", "231:250")
    changed = [hca.rdma[0].name for hca in seen if not change_detection.has_its_devices(paths, hca)]
    assert changed == ["mlx5_0"]


def test_undecodable_state_is_a_change(paths: Paths, seen: list[HCA]) -> None:
    (paths.sys / "class/infiniband/mlx5_0/ports/1/state").write_bytes(UNREADABLE)
    assert change_detection.has_other_ports(paths, seen)
