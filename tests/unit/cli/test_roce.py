"""The check of `podfabric doctor` for RoCE: more containers on a port than it has GIDs for."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cli import doctor
from cli.checks import Finding
from cli.this_node import ThisNode
from tests.unit.cli.commands import short_path
from tests.unit.host import servers
from tests.unit.host.sysfs import Tree

ETHERNET = 'selectors: {pciAddresses: ["0000:3b:00.1"]}'  # mlx5_1


@pytest.fixture
def root() -> Iterator[Path]:
    with short_path() as directory:
        yield directory


def _found(root: Path, pools: str, *, gids: int = 128, node_type: str = "1: CA") -> list[Finding]:
    """Of the card with InfiniBand and RoCE; mlx5_1 and mlx5_6 to mlx5_10 are RoCE's."""
    paths = servers.vfs(root)
    tree = Tree(paths.sys, paths)
    for number in range(11):
        at = f"class/infiniband/mlx5_{number}"
        tree.write(f"{at}/node_type", node_type)
        for index in range(1, gids):
            tree.write(f"{at}/ports/1/gids/{index}", "0000:0000:0000:0000:0000:0000:0000:0000")
    paths.etc.mkdir()
    paths.config.write_text(pools)
    return doctor.examine(ThisNode(paths), [check for check in doctor.CHECKS if check[0] == "RoCE"])


@pytest.mark.parametrize(
    ("pools", "gids", "status"),
    [
        (f"pools: [{{name: a/b, slots: 64, {ETHERNET}}}]", 128, "warning"),
        (f"pools: [{{name: a/b, slots: 63, {ETHERNET}}}]", 128, "ok"),
        (f"pools: [{{name: a/b, slots: 64, {ETHERNET}}}]", 256, "ok"),
        (f"pools: [{{name: a/b, slots: 128, {ETHERNET}}}]", 256, "warning"),
        (f"pools: [{{name: a/b, mode: all, amount: 1000, {ETHERNET}}}]", 256, "warning"),
        (f"pools: [{{name: a/b, mode: all, amount: 60, {ETHERNET}}}]", 128, "ok"),
        (f"pools: [{{name: a/b, mode: exclusive, {ETHERNET}}}]", 4, "not applicable"),
        (f"pools: [{{name: a/b, slots: 64, {ETHERNET}}}]", 1, "not applicable"),
        ("pools: [{name: a/b, selectors: {linkTypes: [infiniband]}}]", 128, "not applicable"),
        ("pools: []", 128, "not applicable"),
    ],
)
def test_a_pool_admits_no_more_than_a_port_has_gids_for(
    root: Path, pools: str, gids: int, status: str
) -> None:
    (found,) = _found(root, pools, gids=gids)
    assert found.status == status


def test_what_is_too_much_is_told_with_what_is_not(root: Path) -> None:
    (found,) = _found(root, f"pools: [{{name: a/b, slots: 64, {ETHERNET}}}]")
    assert found.seen == (
        "port 1 of mlx5_1: 128 GIDs are enough for 63 pods with an address each, but a/b may give "
        "the HCA to 64"
    )
    assert "to at most 63" in found.remedy


def test_ports_of_one_kind_are_told_together(root: Path) -> None:
    (found,) = _found(root, "")  # the default pool, of 64 slots
    assert "port 1 of mlx5_1" in found.seen
    assert "and 2 more" in found.seen
    assert "rdma/hca may give" in found.seen


def test_two_pools_of_one_hca_count_together(root: Path) -> None:
    (found,) = _found(
        root,
        f"pools: [{{name: a/b, slots: 40, {ETHERNET}}}, "
        f"{{name: a/c, slots: 40, overlap: true, {ETHERNET}}}]",
    )
    assert found.status == "warning"
    assert "a/b, a/c may give the HCA to 80" in found.seen


def test_iwarp_goes_without_gids(root: Path) -> None:
    pools = f"pools: [{{name: a/b, slots: 64, {ETHERNET}}}]"
    (found,) = _found(root, pools, gids=8, node_type="4: RNIC")
    assert found.status == "not applicable"
