"""`podfabric topo` on made-up servers: the matrix and its documents."""

from collections.abc import Callable
from pathlib import Path

import pytest

from base.paths import Paths
from tests.unit.cli.commands import Shell
from tests.unit.host import servers
from tests.unit.host.sysfs import Tree

Build = Callable[..., Paths]


@pytest.fixture
def shell_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[Build], Shell]:
    return lambda build: Shell(build(tmp_path), monkeypatch, capsys)


ShellOn = Callable[[Build], Shell]


def test_the_matrix_and_its_legend_are_printed_as_kept(shell_on: ShellOn) -> None:
    shell_on(servers.half_dgx).as_kept("podfabric topo")


def test_devices_are_listed_gpus_first_with_where_they_are(shell_on: ShellOn) -> None:
    shell = shell_on(servers.dgx)

    found = shell("topo", "-o", "json").document()["devices"]

    addresses = (*servers.DGX_GPUS, *servers.DGX_HCAS)
    assert tuple(line["address"] for line in found) == addresses
    assert [line["label"] for line in found[7:9]] == ["GPU7", "mlx5_0"]
    assert found[8]["netdevs"] == ["ib0"]
    assert found[8]["numa"] == 0


def test_vfs_and_sfs_are_shown_beside_their_pfs_only_if_asked_for(shell_on: ShellOn) -> None:
    shell = shell_on(servers.vfs)

    some, everything = shell("topo", "-o", "json"), shell("topo", "--all", "-o", "json")

    assert [device["label"] for device in some.document()["devices"]] == ["mlx5_0", "mlx5_1"]
    assert len(some.document()["not_shown"]) == 9
    assert len(everything.document()["devices"]) == 11
    assert "9 VFs or SFs" in shell("topo").out


def test_a_software_device_has_no_row_but_is_named(shell_on: ShellOn, tmp_path: Path) -> None:
    shell = shell_on(servers.dgx)
    Tree(tmp_path / "sys").soft_rdma("rxe0", "ib0")

    found = shell("topo", "-o", "json").document()

    assert found["without_place"] == ["rxe0"]
    assert "rxe0" not in found["distances"]
    assert "without a position: rxe0" in shell("topo").out


def test_a_node_without_gpu_and_hca_says_what_to_look_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = Paths(**{name: tmp_path / name for name in Paths.__struct_fields__})

    printed = Shell(paths, monkeypatch, capsys)("topo")

    assert printed.code == 0
    assert "no GPU and no HCA was found" in printed.out
    assert "lspci" in printed.out
