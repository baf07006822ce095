"""The journal on a full disk, or without descriptors: an entry is complete or absent."""

from collections.abc import Callable
from contextlib import suppress

import msgspec
import pytest

from base.paths import Paths
from cni.attachments.journal import Journal, JournalDamaged, JournalEntry, Phase
from cni.attachments.lifecycle import explained
from cni.spec.errors import CNIError
from tests.attacks.full_disk import SmallDisk, calls_left, descriptors_left, small_disk

DEVICE = "0000:3b:00.2"
LEFT = {"descriptors": descriptors_left, "memory": calls_left}
ENOUGH = 6  # pages, or descriptors

Act = Callable[[Journal], None]


def entry(container_id: str, phase: Phase = Phase.ADDING) -> JournalEntry:
    """An entry of some pages."""
    return JournalEntry(
        plugin="sriov",
        network="fabric",
        container_id=container_id,
        ifname="net1",
        netns=f"/run/netns/{container_id}",
        netns_identity="cookie:1",
        boot_id="this boot",
        phase=phase,
        since="2026-11-22T10:00:00+00:00",
        config=msgspec.json.encode({"padding": "x" * 9000}).decode(),
        device=DEVICE,
    )


NEW, BEFORE, AFTER = entry("new"), entry("c1"), entry("c1", Phase.ATTACHED)


def write_new(journal: Journal) -> None:
    journal.write(NEW)


def replace(journal: Journal) -> None:
    journal.write(AFTER)


def remove(journal: Journal) -> None:
    journal.remove(BEFORE.attachment)


def held(journal: Journal) -> list[JournalEntry]:
    """Every entry. An unreadable entry fails the test."""
    read = list(journal.entries())
    entries = [entry for entry in read if isinstance(entry, JournalEntry)]
    assert entries == read
    return sorted(entries, key=msgspec.json.encode)


def begun(disk: SmallDisk) -> Journal:
    """A journal with one entry on that disk, and nothing else."""
    disk.empty()
    journal = Journal(Paths(state=disk.directory, run=disk.directory / "run"))
    journal.write(BEFORE)
    return journal


def require_before_or_after(disk: SmallDisk, journal: Journal, act: Act, *, done: bool) -> None:
    """With room again, check that entries match the answers, the act works, and no other file is
    left."""
    afterwards: dict[Act, list[JournalEntry]] = {
        write_new: [BEFORE, NEW],
        replace: [AFTER],
        remove: [],
    }
    after = sorted(afterwards[act], key=msgspec.json.encode)
    assert held(journal) == (after if done else [BEFORE])
    act(journal)
    assert held(journal) == after
    assert list(journal.holders(DEVICE)) == after
    names = [journal.path_of(entry.attachment).name for entry in after]
    assert disk.files() == {
        f"attachments/{where}{name}" for where in ("", f"devices/{DEVICE}/") for name in names
    }


@pytest.mark.parametrize("act", [write_new, replace, remove])
@pytest.mark.parametrize("what", ["pages", "inodes", "descriptors", "memory"])
def test_entry_is_complete_or_absent_as_answered(act: Act, what: str) -> None:
    answers = []
    with small_disk() as disk:
        for number in range(ENOUGH):
            journal = begun(disk)
            answers.append(False)
            with suppress(OSError):
                if what in LEFT:
                    with LEFT[what](number):
                        act(journal)
                else:
                    (disk.leave_pages if what == "pages" else disk.leave_inodes)(number)
                    act(journal)
                answers[-1] = True
            disk.make_room()
            require_before_or_after(disk, journal, act, done=answers[-1])
    assert answers[-1]
    # A removal needs neither room nor a descriptor. A later entry is appended to the first.
    assert answers[0] is (act is remove or (act is replace and what == "inodes"))


@pytest.mark.parametrize("act", [write_new, replace, remove])
def test_read_only_disk_is_the_error_and_nothing_changes(act: Act) -> None:
    with small_disk() as disk:
        journal = begun(disk)
        disk.make_read_only()
        with pytest.raises(OSError, match="Read-only file system"):
            act(journal)
        assert held(journal) == [BEFORE]
        disk.make_writable()
        require_before_or_after(disk, journal, act, done=False)


def test_error_names_the_file_and_the_remedy() -> None:
    with small_disk() as disk:
        journal = begun(disk)
        disk.leave_pages(0)
        with pytest.raises(CNIError) as caught, explained():
            write_new(journal)
    assert str(journal.path_of(NEW.attachment)) in caught.value.message
    assert "No space left on device: check that" in caught.value.message
    assert "\n" not in caught.value.message


def test_device_has_no_holders_only_if_the_journal_could_be_read() -> None:
    with small_disk() as disk:
        journal = begun(disk)
        answers = []
        for number in range(ENOUGH):
            with descriptors_left(number), suppress(OSError):
                answers.append(list(journal.holders(DEVICE)))
        assert answers == [[BEFORE]] * len(answers)
        assert answers


def test_journal_that_cannot_be_read_is_reported_and_does_not_count_as_empty() -> None:
    with small_disk() as disk:
        journal = begun(disk)
        with descriptors_left(0):
            (unreadable,) = journal.entries()
        assert isinstance(unreadable, JournalDamaged)
        assert "Too many open files" in str(unreadable)
