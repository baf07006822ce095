"""The kubelet's checkpoint is decoded again exactly when it may have changed."""

import os
from pathlib import Path

import msgspec
import pytest

from base.paths import Paths
from deviceplugin.kubelet import records

LONG_AGO = 1_000_000_000


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    paths = Paths(kubelet=tmp_path)
    paths.device_plugins.mkdir(parents=True)
    return paths


def _write(paths: Paths, *ids: str) -> None:
    """As the kubelet does: a new file in the place of the old one."""
    entry = {"PodUID": "u", "ContainerName": "c", "ResourceName": "r", "DeviceIDs": {"0": ids}}
    new = paths.device_plugins / "new"
    new.write_bytes(msgspec.json.encode({"Data": {"PodDeviceEntries": [entry]}}))
    new.rename(paths.device_plugins / "kubelet_internal_checkpoint")


def _ids(paths: Paths) -> list[tuple[str, ...]]:
    return [row.ids for row in records.from_checkpoint(paths)]


@pytest.mark.parametrize("now", [LONG_AGO, None])
def test_change_is_seen_whatever_the_clock_says(
    paths: Paths, monkeypatch: pytest.MonkeyPatch, now: int | None
) -> None:
    if now is not None:
        monkeypatch.setattr("time.time", lambda: now)  # no file is young then
    for ids in (("a",), ("b",), ("b", "c"), ("d",)):
        _write(paths, *ids)
        assert _ids(paths) == [ids]
        assert _ids(paths) == [ids]
    (paths.device_plugins / "kubelet_internal_checkpoint").unlink()
    assert _ids(paths) == []


def test_file_that_was_just_written_is_not_believed_to_stay(paths: Paths) -> None:
    """Two changes of one size within a tick of the kernel's clock look alike."""
    _write(paths, "a")
    assert _ids(paths) == [("a",)]
    file = paths.device_plugins / "kubelet_internal_checkpoint"
    status = file.stat()
    file.write_bytes(file.read_bytes().replace(b'"a"', b'"b"'))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert _ids(paths) == [("b",)]


def test_unchanged_file_is_decoded_once(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: LONG_AGO)
    _write(paths, "a")
    assert _ids(paths) == [("a",)]
    monkeypatch.setattr(msgspec.json, "decode", pytest.fail)
    assert _ids(paths) == [("a",)]
