"""Device-information files, as Multus and the CNI plugins find them."""

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from base.paths import Paths
from deviceplugin.allocate import device_info
from tests.unit.deviceplugin.made import hca, rdma

HCA, PF, SF = "0000:18:02.5", "0000:18:00.0", "mlx5_core.sf.4"
VF = hca(HCA, rdma(3), pf=PF, index=5)


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(devinfo=tmp_path / "k8s.cni.cncf.io/devinfo")


def _read(file: Path) -> Any:  # noqa: ANN401 - JSON
    return json.loads(file.read_text())


def test_a_vf_is_told_with_its_rdma_device_and_its_verbs_device(paths: Paths) -> None:
    assert device_info.write(paths, "rdma/hca", HCA, [VF])
    file = paths.devinfo / f"dp/rdma-hca-{HCA}-device.json"
    assert _read(file) == {
        "type": "pci",
        "version": "1.1.0",
        "pci": {"pci-address": HCA, "rdma-device": "mlx5_3", "pf-pci-address": PF},
        "podfabric": {"uverbs": "uverbs3", "major": 231, "minor": 195},
    }
    assert stat.S_IMODE(file.stat().st_mode) == 0o444


@pytest.mark.parametrize(
    ("resource", "device_id", "name"),
    [
        ("rdma/hca", f"{HCA}-17", f"rdma-hca-{HCA}-17-device.json"),
        ("a.b/c", "nvidia0/gi1", "a.b-c-nvidia0-gi1-device.json"),
    ],
)
def test_slashes_are_dashes_in_the_files_name(
    paths: Paths, resource: str, device_id: str, name: str
) -> None:
    assert device_info.path(paths, resource, device_id) == paths.devinfo / "dp" / name


def test_others_may_enter_the_directories_with_any_umask(paths: Paths) -> None:
    library = paths.devinfo.parent
    library.mkdir()
    paths.devinfo.mkdir()
    paths.devinfo.chmod(0)  # as the specification's library leaves it
    umask = os.umask(0o077)
    try:
        device_info.write(paths, "rdma/hca", HCA, [VF])
    finally:
        os.umask(umask)
    modes = [
        stat.S_IMODE(directory.stat().st_mode)
        for directory in (paths.devinfo, paths.devinfo / "dp")
    ]
    assert modes == [0o755, 0o755]


def test_a_new_file_takes_the_place_of_the_old_one(paths: Paths) -> None:
    device_info.write(paths, "rdma/hca", HCA, [VF])
    device_info.write(paths, "rdma/hca", HCA, [hca(HCA, rdma(7))])
    file = device_info.path(paths, "rdma/hca", HCA)
    assert _read(file)["pci"] == {"pci-address": HCA, "rdma-device": "mlx5_7"}
    assert _read(file)["podfabric"]["uverbs"] == "uverbs7"
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize(
    "hcas",
    [
        pytest.param([hca(SF, rdma(4), pf=PF, aux_type="sf")], id="SF"),
        pytest.param([hca("rxe0", rdma(0))], id="software"),
        pytest.param([VF, hca(PF, rdma(0))], id="several"),
        pytest.param([], id="none"),
    ],
)
def test_what_the_specification_has_no_type_for_has_no_file(paths: Paths, hcas: list[Any]) -> None:
    device_info.write(paths, "rdma/hca", "0", [VF])
    assert not device_info.write(paths, "rdma/hca", "0", hcas)
    assert list((paths.devinfo / "dp").iterdir()) == []


def test_only_our_files_are_removed_and_only_those_of_no_allocation(paths: Paths) -> None:
    for device_id in ("0", "1", "2"):
        device_info.write(paths, "rdma/hca", device_id, [VF])
    foreign = paths.devinfo / "dp/rdma-hca-3-device.json"  # by its name it could be ours
    foreign.write_text('{"type": "pci", "version": "1.1.0", "pci": {"pci-address": "x"}}')
    broken = paths.devinfo / "dp/rdma-hca-4-device.json"
    broken.write_text("{")
    assert device_info.remove_stale(paths, lambda: [("rdma/hca", "1")]) == [
        device_info.path(paths, "rdma/hca", "0"),
        device_info.path(paths, "rdma/hca", "2"),
    ]
    device_info.remove_stale(paths, list)
    assert sorted((paths.devinfo / "dp").iterdir()) == [foreign, broken]


def test_without_the_directory_nothing_is_stale(paths: Paths) -> None:
    assert device_info.remove_stale(paths, list) == []
    assert not paths.devinfo.exists()


def test_file_that_is_written_while_others_are_looked_for_stays(paths: Paths) -> None:
    def keys() -> list[tuple[str, str]]:
        device_info.write(paths, "rdma/hca", "1", [VF])
        return []

    device_info.write(paths, "rdma/hca", "0", [VF])
    assert device_info.remove_stale(paths, keys) == [device_info.path(paths, "rdma/hca", "0")]
    assert device_info.path(paths, "rdma/hca", "1").exists()
