"""Sweeps of several plugins: one that fails does not stop the others, and outcomes have types."""

from pathlib import Path
from typing import Any, ClassVar

import pytest

from base.paths import Paths
from cni.attachments.journal import JournalEntry, Phase
from cni.attachments.lifecycle import InterfacePlugin
from cni.attachments.sweep import (
    REMOVED,
    DamagedFile,
    RemovedAttachment,
    RemovedStray,
    SweepFailure,
    sweep_all,
)
from cni.spec.attachment import Attachment
from cni.spec.errors import CNIError, Code
from cni.spec.request import Request
from host.errors import HostError


class Made(InterfacePlugin):
    """A plugin without a kernel; `stuck` are the containers whose interface cannot be detached."""

    name: ClassVar = "made"
    strays: tuple[str, ...] = ()
    stuck: tuple[str, ...] = ()

    def add(self, request: Request) -> dict[str, Any]:
        raise NotImplementedError

    def detach(self, attachment: Attachment, request: Request, entry: JournalEntry | None) -> None:
        if attachment.container_id in self.stuck:
            raise HostError("removed too early: it is busy")

    def compare(self, attachment: Attachment, request: Request) -> None:
        raise NotImplementedError

    def require_ready(self, request: Request) -> None:
        raise NotImplementedError

    def remove_strays(self) -> list[str]:
        return list(self.strays)


class Failing(Made):
    """A plugin whose sweep fails as a whole."""

    name: ClassVar = "failing"

    def remove_strays(self) -> list[str]:
        raise HostError("listing interfaces: no buffer space")


class Other(Made):
    """Another plugin of the same node."""

    name = "other"


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(run=tmp_path / "run", state=tmp_path / "state")


def killed(plugin: InterfacePlugin, container_id: str) -> Attachment:
    """What an ADD left that was killed."""
    entry = JournalEntry(
        plugin=plugin.name,
        network="fabric",
        container_id=container_id,
        ifname="net1",
        netns="/nowhere",
        netns_identity="cookie:0",
        boot_id=plugin.paths.boot_id(),
        phase=Phase.ADDING,
    )
    plugin.journal.write(entry)
    return entry.attachment


def test_what_one_removed_is_reported_with_the_failure_of_another(paths: Paths) -> None:
    made = Made(paths)
    gone = killed(made, "c1")
    outcomes = sweep_all(Failing(paths), made)
    assert outcomes == (
        RemovedAttachment(gone),
        SweepFailure(None, "listing interfaces: no buffer space"),
    )
    assert list(map(str, outcomes)) == [
        "removed fabric/c1/net1: its sandbox is gone",
        "sweep: listing interfaces: no buffer space",
    ]
    assert list(made.journal.entries()) == []


def test_failure_alone_is_an_error(paths: Paths) -> None:
    with pytest.raises(CNIError, match="no buffer space"):
        sweep_all(Failing(paths), Made(paths))


def test_damaged_file_that_every_sweep_meets_is_reported_once(paths: Paths) -> None:
    first, second = Made(paths), Made(paths)
    second.strays = ("ib0.8001",)
    damaged = first.journal.path_of(killed(first, "c1"))
    damaged.write_bytes(b"{")
    one, other = sweep_all(first, second)
    assert isinstance(one, DamagedFile)
    assert str(damaged) in one.reason
    assert other == RemovedStray("ib0.8001")


def test_removals_are_told_from_failures_by_their_type(paths: Paths) -> None:
    made = Made(paths)
    made.stuck = ("c1",)
    stuck, gone = killed(made, "c1"), killed(made, "c2")
    outcomes = sweep_all(made)
    assert {type(outcome) for outcome in outcomes} == {SweepFailure, RemovedAttachment}
    assert [outcome for outcome in outcomes if isinstance(outcome, REMOVED)] == [
        RemovedAttachment(gone)
    ]
    assert [entry.attachment for entry in made.journal.entries()] == [stuck]  # type: ignore[union-attr]


def test_del_by_another_plugin_removes_nothing_and_says_so(paths: Paths) -> None:
    made, other = Made(paths), Other(paths)
    attachment = killed(made, "c1")
    entry = made.journal.read(attachment)
    assert isinstance(entry, JournalEntry)
    with pytest.raises(CNIError, match='attached by plugin "made"') as caught:
        other.delete(entry.delete_request())
    assert caught.value.code == Code.CLEANUP_INCOMPLETE
    assert made.journal.read(attachment) == entry
    made.delete(entry.delete_request())
    assert made.journal.read(attachment) is None
