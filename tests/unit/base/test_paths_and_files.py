"""Paths, and atomic writes: a reader never sees half a file."""

from pathlib import Path

import pytest

from base import files
from base.paths import Paths


def test_every_root_can_be_moved_by_the_environment() -> None:
    paths = Paths.from_environ({"PODFABRIC_STATE": "/a", "PODFABRIC_RUN": "/b", "X": "y"})
    assert (paths.ipam, paths.attachments, paths.locks) == (
        Path("/a/ipam"),
        Path("/a/attachments"),
        Path("/b/lock"),
    )
    assert paths.agent_socket == Path("/b/agent.sock")
    assert paths.sys == Path("/sys")
    assert paths.config == Path("/etc/podfabric/config.yaml")
    assert Paths.from_environ({"PODFABRIC_ETC": "/c"}).config == Path("/c/config.yaml")


def test_failed_write_leaves_the_old_content_and_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    files.write_atomically(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        files.write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_killed_writers_temporary_file_is_removed_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    files.write_atomically(path, b"content")
    (tmp_path / ".file.tmp").write_bytes(b"half")
    files.remove(path)
    files.remove(path)
    assert list(tmp_path.iterdir()) == []
    files.remove(tmp_path / "absent/file")


def test_files_are_for_root_only(tmp_path: Path) -> None:
    path = tmp_path / "directory/file"
    files.write_atomically(path, b"content")
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(("durable", "waits"), [(True, 2), (False, 1)])
def test_content_is_on_disk_before_it_gets_its_name_and_the_name_if_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool, waits: int
) -> None:
    path = tmp_path / "file"
    named = []
    monkeypatch.setattr("os.fsync", lambda descriptor: named.append(path.exists()))
    files.write_atomically(path, b"content", durable=durable)
    assert named == [False, True][:waits]


def test_a_file_of_proc_is_read_to_its_end() -> None:
    """One read of it gives a page of whole records at most."""
    assert files.read("/proc/self/smaps").count(b"VmFlags") > 100
