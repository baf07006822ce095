"""The remainder on a node, and a removal that may be killed at any line."""

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent import leave_node
from agent.leave_node import Departure
from base.paths import Paths
from ipam.store.store_files import StoreFiles
from tests.waiting import PATIENCE


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    """A node with every kind of file."""
    roots = {name: tmp_path / name for name in ("state", "run", "cni_bin")}
    paths = Paths(**roots)
    for directory in (paths.attachments, paths.ipam, paths.devices, paths.locks, paths.cni_bin):
        directory.mkdir(parents=True)
    for path in (
        paths.attachments / "old.damaged",
        paths.ipam / "store.db",
        paths.ipam / "mark",
        paths.checkpoint,
        paths.state / "of-somebody-else",
        paths.agent_lock,
        paths.cluster_policies,
        paths.state / ".cluster_policies.json.tmp",
        paths.run / ".agent-1-2.state",
        paths.agent_socket,
        paths.run / "of-somebody-else",
        paths.cni_bin / "ipoib",
        paths.cni_bin / "bridge",
    ):
        path.touch()
    return paths


def uninstall(directory: Path) -> list[str]:
    (directory / "ipoib").unlink(missing_ok=True)
    return ["removed ipoib"]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def is_removed(paths: Paths) -> bool:
    return (
        names(paths.state) == ["of-somebody-else"]
        and names(paths.run) == ["of-somebody-else"]
        and names(paths.cni_bin) == ["bridge"]
    )


def test_everything_of_podfabric_is_removed_and_nothing_else(paths: Paths) -> None:
    leave_node.remove(paths, uninstall, lambda: False)
    assert is_removed(paths)
    assert not leave_node.removal_has_begun(paths)


def test_files_that_cannot_be_removed_are_tried_again(
    paths: Paths, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(leave_node, "TRY_AGAIN", 0.0)
    failures = [PermissionError(13, "Permission denied", "/opt/cni/bin/ipoib")] * 2

    def refused(directory: Path) -> list[str]:
        if failures:
            raise failures.pop()
        return uninstall(directory)

    leave_node.remove(paths, refused, lambda: False)
    assert is_removed(paths)
    assert (
        caplog.messages.count("cannot remove /opt/cni/bin/ipoib: Permission denied (tried again)")
        == 1
    )


def test_a_node_is_left_although_a_look_at_it_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(leave_node, "LOOK_EVERY", 0.01)
    seen: Iterator[OSError | str] = iter([OSError(24, "Too many open files"), "1 address"])

    def left(paths: Paths, store: StoreFiles) -> str:
        answer = next(seen, "")
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(leave_node, "left", left)
    over = threading.Event()
    paths = Paths(state=tmp_path / "state", run=tmp_path / "run")
    leaving = Departure(paths, 0.0, StoreFiles(paths.ipam, kept=False), lambda text: None, over.set)
    try:
        assert over.wait(PATIENCE)
    finally:
        leaving.close()
    assert leaving.empty
    assert [message for message in caplog.messages if "until empty" in message] == [
        "serving until empty: attachments that cannot be counted "
        "([Errno 24] Too many open files) left",
        "serving until empty: 1 address left",
        "serving until empty: nothing left",
    ]
