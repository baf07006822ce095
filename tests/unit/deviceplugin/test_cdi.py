"""CDI specifications: what a runtime reads, and whose files are touched."""

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest

from base.paths import Paths
from deviceplugin.allocate import cdi
from host.device_nodes import DeviceNode

HCA, OTHER = "0000:00:00.1", "0001:af:00.0"


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(cdi=tmp_path / "run/cdi")


def _node(name: str, minor: int) -> DeviceNode:
    path = f"/dev/infiniband/{name}"
    return DeviceNode(path=path, host=f"/host{path}", major=231, minor=minor)


def _read(file: Path) -> Any:  # noqa: ANN401 - JSON
    return json.loads(file.read_text())


def test_two_pools_with_the_same_hca_have_different_names_for_it(paths: Paths) -> None:
    for resource in ("rdma/hca", "rdma/hca_all"):
        cdi.write(paths, resource, {HCA: [_node("uverbs1", 193)]})
    found = [_read(file) for file in sorted(paths.cdi.iterdir())]
    names = {f"{spec['kind']}={device['name']}" for spec in found for device in spec["devices"]}
    assert names == {cdi.qualified(resource, HCA) for resource in ("rdma/hca", "rdma/hca_all")}
    assert len(names) == 2


# The rules of the runtimes' library (pkg/parser): these are accepted by its first versions, too.
_CLASS = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,61}[A-Za-z0-9]")
_DEVICE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?")


@pytest.mark.parametrize(
    "resource",
    [
        "rdma/hca",
        "3com.example/0",
        "a/-b-",
        "x.example/" + "a.b_" * 15,
        "a" * 63 + ".b/" + "c" * 63,
    ],
)
@pytest.mark.parametrize("hca", [HCA, "10000:e1:00.0", "mlx5_core.sf.4", "rxe0", "_x.", "é"])
def test_names_are_such_as_runtimes_take(resource: str, hca: str) -> None:
    vendor, _, rest = cdi.qualified(resource, hca).partition("/")
    of_class, _, device = rest.partition("=")
    assert vendor == "podfabric.io"
    assert _CLASS.fullmatch(of_class)
    assert _DEVICE.fullmatch(device)


def test_long_resource_names_stay_apart(paths: Paths) -> None:
    names = {cdi.kind("x" * 80 + f".example/{end}") for end in ("a", "b")}
    assert len(names) == 2


def test_an_unchanged_file_is_not_written_again(paths: Paths) -> None:
    cdi.write(paths, "rdma/hca", {OTHER: [_node("uverbs2", 194)], HCA: [_node("uverbs1", 193)]})
    file = cdi.path(paths, "rdma/hca")
    before = file.stat().st_ino
    cdi.write(paths, "rdma/hca", {HCA: [_node("uverbs1", 193)], OTHER: [_node("uverbs2", 194)]})
    assert file.stat().st_ino == before
    cdi.write(paths, "rdma/hca", {HCA: [_node("uverbs7", 199)]})  # the driver was reloaded
    assert file.stat().st_ino != before
    assert "uverbs7" in file.read_text()


def _written(paths: Paths) -> bytes:
    cdi.write(paths, "rdma/hca", {HCA: [_node("uverbs1", 193)]})
    return cdi.path(paths, "rdma/hca").read_bytes()


@pytest.mark.parametrize("content", [b"", b"\0" * 200, b'{\n  "cdiVer'])
def test_file_that_a_power_cut_damaged_is_replaced_and_removed(
    paths: Paths, content: bytes
) -> None:
    whole = _written(paths)
    file = cdi.path(paths, "rdma/hca")
    file.write_bytes(content)
    assert _written(paths) == whole
    file.write_bytes(content)
    cdi.remove_others(paths, [])
    assert not file.exists()


def test_the_directory_can_be_read_by_others_with_any_umask(paths: Paths) -> None:
    umask = os.umask(0o077)
    try:
        cdi.write(paths, "rdma/hca", {HCA: [_node("uverbs1", 193)]})
    finally:
        os.umask(umask)
    assert stat.S_IMODE(paths.cdi.stat().st_mode) == 0o755


def test_a_directory_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    paths = Paths(cdi=tmp_path / "file/cdi")
    with pytest.raises(cdi.Unwritten, match="cannot write the CDI specification"):
        cdi.write(paths, "rdma/hca", {HCA: [_node("uverbs1", 193)]})
