"""Device-information files, as Multus and the CNI plugins find them."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from base.paths import Paths
from deviceplugin.allocate import device_info
from host.discovery import CharacterDevice
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


UVERBS = CharacterDevice("uverbs3", 231, 195)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(
            None,
            {"type": "pci", "version": "1.1.0", "pci": {"pci-address": HCA}},
            id="no copy: another device plugin's device, or none",
        ),
        pytest.param(
            {"type": "pci", "version": "1.0.0", "pci": {"pci-address": HCA, "vhost-net": "/x"}},
            {"type": "pci", "version": "1.0.0", "pci": {"pci-address": HCA, "vhost-net": "/x"}},
            id="a copy",
        ),
    ],
)
def test_an_attachments_copy_is_completed(tmp_path: Path, before: Any, after: Any) -> None:  # noqa: ANN401
    file = tmp_path / "cni/net-a-0123_net1"
    if before is not None:
        file.parent.mkdir()
        file.write_text(json.dumps(before))
        file.chmod(0o444)
    device_info.update_cni(Paths(devinfo=tmp_path), str(file), HCA, "mlx5_3", UVERBS, pf=PF)
    after["pci"] |= {"rdma-device": "mlx5_3", "pf-pci-address": PF}
    after["podfabric"] = {"uverbs": "uverbs3", "major": 231, "minor": 195}
    assert _read(file) == after
    assert stat.S_IMODE(file.stat().st_mode) == 0o444
    assert list(file.parent.iterdir()) == [file]


def test_a_copy_of_another_kind_of_device_keeps_what_it_says(tmp_path: Path) -> None:
    file = tmp_path / "cni/copy"
    file.parent.mkdir()
    vdpa = {"type": "vdpa", "version": "1.1.0", "vdpa": {"parent-device": "vdpa0"}}
    file.write_text(json.dumps(vdpa))
    device_info.update_cni(Paths(devinfo=tmp_path), str(file), HCA, "mlx5_3", UVERBS)
    assert {key: _read(file)[key] for key in vdpa} == vdpa
    assert "pci" not in _read(file)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"root:x:0:0", b"[]", b"{}", b'{"type": 5}', b"\xff"]
)
def test_what_is_no_copy_is_left_alone(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "cni/copy"
    file.parent.mkdir()
    file.write_bytes(content)
    with pytest.raises(ValueError, match="is not device information"):
        device_info.update_cni(Paths(devinfo=tmp_path), str(file), HCA, "mlx5_3", UVERBS)
    assert file.read_bytes() == content


@pytest.mark.parametrize(
    "path", ["x.json", "cni/../x.json", "cni/../../x.json", "dp/x.json", "cni/sub/x.json", "cni/.."]
)
@pytest.mark.parametrize("there", [True, False])
def test_only_a_file_in_multus_directory_is_written(tmp_path: Path, path: str, there: bool) -> None:
    """Whoever may write a network's definition may write the path, and the agent is root."""
    paths = Paths(devinfo=tmp_path / "devinfo")
    for directory in ("cni/sub", "dp"):
        (paths.devinfo / directory).mkdir(parents=True)
    places = [paths.devinfo / "x.json", paths.devinfo / "dp/x.json", tmp_path / "x.json"]
    content = '{"type": "pci", "version": "1.1.0", "pci": {}}'
    for place in places if there else ():
        place.write_text(content)
    with pytest.raises(ValueError, match="it is not directly below"):
        device_info.update_cni(paths, str(paths.devinfo / path), HCA, "mlx5_3", UVERBS)
    with pytest.raises(ValueError, match="it is not directly below"):
        device_info.update_cni(paths, "cni/x.json", HCA, "mlx5_3", UVERBS)
    assert [directory.read_text() for directory in places if directory.exists()] == [content] * (
        3 * there
    )
    assert list((paths.devinfo / "cni").iterdir()) == [paths.devinfo / "cni/sub"]


def test_link_and_pipe_are_not_followed(tmp_path: Path) -> None:
    paths = Paths(devinfo=tmp_path / "devinfo")
    (paths.devinfo / "cni").mkdir(parents=True)
    target = tmp_path / "target"
    target.write_text('{"type": "pci", "version": "1.1.0", "pci": {}}')
    before = target.read_text()
    (paths.devinfo / "cni/link").symlink_to(target)
    os.mkfifo(paths.devinfo / "cni/pipe")
    with pytest.raises(OSError, match="symbolic links"):
        device_info.update_cni(paths, str(paths.devinfo / "cni/link"), HCA, "mlx5_3", UVERBS)
    with pytest.raises(ValueError, match="not a regular file"):
        device_info.update_cni(paths, str(paths.devinfo / "cni/pipe"), HCA, "mlx5_3", UVERBS)
    assert target.read_text() == before
    assert (paths.devinfo / "cni/link").is_symlink()


@pytest.mark.parametrize("spelling", ["var", "run"])
def test_directory_may_be_reached_by_the_link_that_is_set(tmp_path: Path, spelling: str) -> None:
    """As by /var/run, a link to /run."""
    (tmp_path / "run/devinfo/cni").mkdir(parents=True)
    (tmp_path / "var").symlink_to(tmp_path / "run")
    paths = Paths(devinfo=tmp_path / "var/devinfo")
    device_info.update_cni(paths, f"{tmp_path}/{spelling}/devinfo/cni/copy", HCA, "mlx5_3", UVERBS)
    assert _read(tmp_path / "run/devinfo/cni/copy")["pci"]["pci-address"] == HCA


def test_path_that_leads_to_multus_directory_by_a_link_of_a_tenant_is_refused(
    tmp_path: Path,
) -> None:
    """Where it leads is not looked at: its file system may hang."""
    (tmp_path / "devinfo/cni").mkdir(parents=True)
    (tmp_path / "theirs").symlink_to(tmp_path / "devinfo")
    paths = Paths(devinfo=tmp_path / "devinfo")
    with pytest.raises(ValueError, match="it is not directly below"):
        device_info.update_cni(paths, f"{tmp_path}/theirs/cni/copy", HCA, "mlx5_3", UVERBS)
    assert list((tmp_path / "devinfo/cni").iterdir()) == []


def test_large_file_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "cni/copy"
    file.parent.mkdir()
    content = json.dumps({"type": "pci", "version": "1.1.0", "x": "x" * (1 << 20)})
    file.write_text(content)
    with pytest.raises(ValueError, match="is not device information"):
        device_info.update_cni(Paths(devinfo=tmp_path), str(file), HCA, "mlx5_3", UVERBS)
    assert file.read_text() == content


@pytest.mark.parametrize("address", [SF, ""])
def test_for_what_has_no_pci_address_no_copy_is_made(tmp_path: Path, address: str) -> None:
    device_info.update_cni(
        Paths(devinfo=tmp_path), str(tmp_path / "cni/copy"), address, "mlx5_3", UVERBS
    )
    assert list(tmp_path.iterdir()) == []


def test_cni_plugins_may_import_it_without_grpc() -> None:
    code = (
        "import sys, cni.ipoib.plugin, cni.sriov.plugin, deviceplugin.allocate.device_info; "
        "print('grpc' in sys.modules, 'yaml' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert shown.stdout.split() == ["False", "False"]


def test_file_that_is_written_while_others_are_looked_for_stays(paths: Paths) -> None:
    def keys() -> list[tuple[str, str]]:
        device_info.write(paths, "rdma/hca", "1", [VF])
        return []

    device_info.write(paths, "rdma/hca", "0", [VF])
    assert device_info.remove_stale(paths, keys) == [device_info.path(paths, "rdma/hca", "0")]
    assert device_info.path(paths, "rdma/hca", "1").exists()
