"""The namespace has gone and the interface is in no namespace: DEL waits for a limited time."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from base.paths import Paths
from cni.attachments.journal import Journal, JournalEntry, Phase
from cni.attachments.orphans import sweep
from cni.attachments.sandbox import PATIENCE
from cni.ipoib import child
from cni.ipoib.plugin import IPoIB
from cni.spec.errors import CNIError
from host.errors import HostError
from host.namespaces import NetworkNamespace, view, where


def test_delete_keeps_the_address_until_the_interface_had_time_to_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "RETURN_TIME", 0.1)
    paths = Paths(run=tmp_path / "run", state=tmp_path / "state")
    journal, plugin = Journal(paths), IPoIB(paths)
    entry = JournalEntry(
        plugin="ipoib",
        network="fabric",
        container_id="c1",
        ifname="net1",
        netns="/var/run/netns/gone",
        netns_identity="cookie:0",
        boot_id=paths.boot_id(),
        phase=Phase.ATTACHED,
        config=json.dumps({"name": "fabric", "type": "ipoib", "master": "ib0"}),
    )
    journal.write(entry)
    for _ in range(2):
        with pytest.raises(CNIError, match="is not back on the host yet") as caught:
            plugin.delete(entry.delete_request())
        assert caught.value.code == 104
    waiting = journal.read(entry.attachment)
    assert waiting is not None
    assert waiting.phase == Phase.LEAVING
    assert waiting.since == entry.since
    long_ago = (datetime.now(UTC) - PATIENCE - timedelta(seconds=1)).isoformat()
    journal.write(msgspec.structs.replace(waiting, leaving_since=long_ago))
    plugin.delete(entry.delete_request())
    assert journal.read(entry.attachment) is None


def entry_of(paths: Paths, container_id: str, **changes: str) -> JournalEntry:
    """An attachment whose namespace cannot be found."""
    entry = JournalEntry(
        plugin="ipoib",
        network="fabric",
        container_id=container_id,
        ifname="net1",
        netns="/var/run/netns/gone",
        netns_identity="cookie:0",
        netns_seen_from=view(),
        boot_id=paths.boot_id(),
        phase=Phase.ATTACHED,
        config=json.dumps({"name": "fabric", "type": "ipoib", "master": "ib0"}),
    )
    return msgspec.structs.replace(entry, **changes)


def left(paths: Paths) -> set[str]:
    return {
        entry.container_id for entry in Journal(paths).entries() if isinstance(entry, JournalEntry)
    }


def test_sweep_continues_after_a_failed_entry_and_spares_uncertain_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "RETURN_TIME", 0.1)
    paths = Paths(run=tmp_path / "run", state=tmp_path / "state")
    journal, plugin = Journal(paths), IPoIB(paths)
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    # The entry is of an earlier container; in this one the same directory is mounted at that path.
    there = f"mnt:[1] {where(str(tmp_path / 'any')).partition(' ')[2]}"
    covered = tmp_path / "covered"
    covered.touch()
    for entry in (
        entry_of(paths, "a-loop", netns=str(loop)),
        entry_of(paths, "b-elsewhere", netns_seen_from="mnt:[1]"),
        entry_of(paths, "c-never-seen", netns_seen_from=""),
        entry_of(paths, "d-earlier", boot_id="earlier"),
        entry_of(paths, "e-removed", netns=str(tmp_path / "gone"), netns_seen_from=there),
        entry_of(paths, "f-covered", netns=str(covered), netns_seen_from=there),
        entry_of(paths, "g-moved", netns="/none/gone", netns_seen_from=there),
    ):
        journal.write(entry)
    outcomes = sweep(plugin)
    spared = {"b-elsewhere", "c-never-seen", "f-covered", "g-moved"}
    assert left(paths) == {"a-loop", "e-removed"} | spared
    texts = "\n".join(map(str, outcomes))
    assert (
        "e-removed/net1: attachment fabric/e-removed/net1 is not fully removed, run DEL again: "
        "the pod" in texts
    )
    assert not any(name in texts for name in spared)
    assert any("a-loop" in str(outcome) for outcome in outcomes)
    assert "removed fabric/d-earlier/net1: its sandbox is gone" in texts.splitlines()


def test_sweep_spares_entries_whose_processes_are_unreadable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = Paths(run=tmp_path / "run", state=tmp_path / "state")
    Journal(paths).write(entry_of(paths, "c1"))

    def blind(identity: str) -> None:
        raise HostError("cannot look into process 1")

    monkeypatch.setattr(NetworkNamespace, "find", blind)
    sweep(IPoIB(paths))
    assert left(paths) == {"c1"}
