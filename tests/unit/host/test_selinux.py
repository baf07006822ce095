"""Labels for containers: real extended attributes; the kernel's switch alone is made up."""

import os
import socket
from pathlib import Path

import pytest

from host.selinux import ATTRIBUTE, READ, WRITE, ContainerLabels


@pytest.fixture
def labels(tmp_path: Path) -> ContainerLabels:
    """On a kernel with SELinux."""
    switch = tmp_path / "sys/fs/selinux/enforce"
    switch.parent.mkdir(parents=True)
    switch.write_text("1")
    return ContainerLabels(tmp_path / "sys")


def label(path: Path) -> bytes:
    return os.getxattr(path, ATTRIBUTE, follow_symlinks=False)


def test_files_directories_and_sockets_are_labelled(
    labels: ContainerLabels, tmp_path: Path
) -> None:
    file, directory = tmp_path / "file", tmp_path / "directory"
    file.touch()
    directory.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / "agent.sock"))
    for path in (file, directory, directory / "agent.sock"):
        labels.set(path, WRITE)
        assert label(path) == WRITE
    labels.set(file, READ)
    assert label(file) == READ


def test_a_file_that_has_the_label_is_not_written(
    labels: ContainerLabels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    labels.set(file, READ)
    os.setxattr(file, ATTRIBUTE, READ + b"\0")  # as the kernel's own tools write it
    monkeypatch.setattr(os, "setxattr", lambda *given, **options: pytest.fail("it was written"))
    labels.set(file, READ)


def test_what_a_link_leads_to_is_left_alone(labels: ContainerLabels, tmp_path: Path) -> None:
    (tmp_path / "secret").touch()
    (tmp_path / "link").symlink_to("secret")
    labels.set(tmp_path / "link", WRITE)
    with pytest.raises(OSError):
        label(tmp_path / "secret")


def test_without_selinux_nothing_is_labelled(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    ContainerLabels(tmp_path / "sys").set(file, READ)
    with pytest.raises(OSError):
        label(file)


def test_a_failure_is_logged_once(
    labels: ContainerLabels, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        labels.set(tmp_path / "gone", READ)
    (record,) = caplog.records
    assert "gone cannot get the label system_u:object_r:container_ro_file_t:s0" in record.message
