"""The journal: an entry is read as it was written, or reported as damaged."""

import multiprocessing
import os
import random
from pathlib import Path

import msgspec
import pytest

from base.interrupts import Call, Terminated, serving
from base.locks import Busy
from base.paths import Paths
from cni.attachments.journal import (
    Journal,
    JournalDamaged,
    JournalEntry,
    Phase,
    from_bytes,
    to_bytes,
)
from cni.spec.attachment import Attachment


def _entry(container_id: str = "c1", ifname: str = "net1") -> JournalEntry:
    return JournalEntry(
        plugin="ipoib",
        network="fabric",
        container_id=container_id,
        ifname=ifname,
        netns="/var/run/netns/x",
        netns_identity="cookie:1",
        boot_id="b",
        phase=Phase.ADDING,
        undo=msgspec.Raw(b'{"parent":"ib0"}'),
    )


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(Paths(run=tmp_path / "run", state=tmp_path / "state"))


def test_entry_is_read_as_it_was_written(journal: Journal) -> None:
    assert journal.read(_entry().attachment) is None
    journal.write(_entry())
    assert journal.read(_entry().attachment) == _entry()
    journal.remove(_entry().attachment)
    assert journal.read(_entry().attachment) is None


def test_every_truncation_is_called_damaged() -> None:
    content = to_bytes(_entry())
    for length in range(len(content) - 1):
        with pytest.raises(JournalDamaged, match="damaged"):
            from_bytes(content[:length], "x.json")


def test_every_flipped_bit_is_called_damaged_or_changes_nothing() -> None:
    content = to_bytes(_entry())
    for position in random.Random(1).sample(range(len(content) * 8), 600):
        flipped = bytearray(content)
        flipped[position // 8] ^= 1 << position % 8
        try:
            assert from_bytes(bytes(flipped), "x.json") == _entry()
        except JournalDamaged:
            continue


def _later() -> JournalEntry:
    return msgspec.structs.replace(_entry(), phase=Phase.ATTACHED, addresses=("10.0.0.2/24",))


def _both(journal: Journal) -> bytes:
    journal.write(_entry())
    journal.write(_later())
    return journal.path_of(_entry().attachment).read_bytes()


def test_later_entry_counts(journal: Journal) -> None:
    _both(journal)
    assert journal.read(_entry().attachment) == _later()
    assert list(journal.entries()) == [_later()]
    journal.write(_entry())
    assert journal.read(_entry().attachment) == _entry()


@pytest.mark.parametrize("behind", [b"", b"\0" * 100])
def test_later_entry_that_was_torn_leaves_the_one_before(journal: Journal, behind: bytes) -> None:
    content = _both(journal)
    first = len(to_bytes(_entry()))
    for length in range(first, len(content) - 2):
        assert from_bytes(content[:length] + behind, "x.json") == _entry()
    # The rest of a killed writer's line does not join the next entry.
    path = journal.path_of(_entry().attachment)
    path.write_bytes(content[: first + 40])
    journal.write(_later())
    assert journal.read(_entry().attachment) == _later()


def test_flipped_bit_never_brings_the_first_entry_back(journal: Journal) -> None:
    """A sweep detaches an attachment whose ADD did not complete."""
    content = _both(journal)
    begin = len(to_bytes(_entry()))
    for position in range(begin * 8, len(content) * 8):
        flipped = bytearray(content)
        flipped[position // 8] ^= 1 << position % 8
        try:
            assert from_bytes(bytes(flipped), "x.json") == _later()
        except JournalDamaged:
            continue


def test_entry_of_a_newer_version_is_an_error(journal: Journal) -> None:
    journal.write(msgspec.structs.replace(_entry(), version=2))
    with pytest.raises(JournalDamaged, match="of a newer podfabric has version"):
        journal.read(_entry().attachment)


def test_file_with_another_attachment_is_damaged(journal: Journal) -> None:
    journal.write(_entry("c2"))
    other = journal.path_of(_entry("c2").attachment)
    other.rename(journal.path_of(_entry("c1").attachment))
    with pytest.raises(JournalDamaged, match="is for fabric/c2/net1, not for fabric/c1"):
        journal.read(_entry("c1").attachment)


def test_damaged_file_is_listed_and_can_be_set_aside(journal: Journal) -> None:
    journal.write(_entry("c1"))
    journal.write(_entry("c2"))
    path = journal.path_of(_entry("c1").attachment)
    path.write_bytes(b"")
    found = list(journal.entries())
    assert [type(entry) for entry in found].count(JournalDamaged) == 1
    assert _entry("c2") in found
    aside = journal.set_aside(_entry("c1").attachment)
    assert aside.exists()
    assert list(journal.entries()) == [_entry("c2")]


def test_attachments_that_look_alike_have_keys_of_their_own() -> None:
    keys = {
        Attachment(*names).key for names in (("a", "b", "c"), ("a", "b.c", "d"), ("a.b", "c", "d"))
    }
    assert len(keys) == 3


def test_second_caller_waits_and_gives_up_in_time(journal: Journal) -> None:
    attachment = _entry().attachment
    with journal.locked(attachment):
        context = multiprocessing.get_context("fork")
        child = context.Process(target=_expect_busy, args=(journal, attachment))
        child.start()
        child.join()
        assert child.exitcode == 0


def _expect_busy(journal: Journal, attachment: Attachment) -> None:
    with pytest.raises(Busy, match="still holds"), journal.locked(attachment, 0.2):
        pass


def test_entry_that_cannot_be_read_does_not_hide_the_others(journal: Journal) -> None:
    journal.write(_entry())
    (journal.path_of(_entry().attachment).parent / "a.json").mkdir()
    unreadable, entry = journal.entries()
    assert isinstance(unreadable, JournalDamaged)
    assert entry == _entry()


def test_call_whose_client_has_gone_does_not_get_the_lock(journal: Journal) -> None:
    """Not even a DEL: it could remove a later attachment."""
    with serving(Call(endable=False, gone=lambda: True)), pytest.raises(Terminated):  # noqa: SIM117
        with journal.locked(_entry().attachment):
            raise AssertionError("it has the lock")
    with journal.locked(_entry().attachment, timeout=0.0):
        pass


def test_what_a_killed_writer_left_goes_but_not_what_is_being_written(journal: Journal) -> None:
    killed, writing = _entry("c1"), _entry("c2")
    left = [_killed_while_writing(journal, entry) for entry in (killed, writing)]
    assert list(journal.entries()) == []
    with journal.locked(writing.attachment):
        journal.remove_unfinished()
        assert [path.exists() for path in left] == [False, True]
    journal.write(writing)
    journal.remove_unfinished()
    assert list(journal.entries()) == [writing]


def _killed_while_writing(journal: Journal, entry: JournalEntry) -> Path:
    """The file that a process left which was killed before its first entry was on disk."""
    directory = journal.path_of(entry.attachment).parent
    before = set(directory.iterdir()) if directory.exists() else set()
    process = multiprocessing.get_context("fork").Process(
        target=_write_and_die, args=(journal, entry)
    )
    process.start()
    process.join()
    assert process.exitcode == 9
    (left,) = set(directory.iterdir()) - before
    return left


def _write_and_die(journal: Journal, entry: JournalEntry) -> None:
    os.fsync = lambda _: os._exit(9)  # type: ignore[assignment]
    journal.write(entry)


def _with_device(container_id: str, device: str) -> JournalEntry:
    return msgspec.structs.replace(_entry(container_id), device=device)


def test_holders_are_found_by_their_device_and_a_release_leaves_nothing_of_it(
    journal: Journal, tmp_path: Path
) -> None:
    first, second = _with_device("c1", "0000:3b:00.2"), _with_device("c2", "0000:3b:00.3")
    for entry in (first, second):
        journal.write(entry)
    assert list(journal.holders("0000:3b:00.2")) == [first]
    assert list(journal.holders("0000:3b:00.4")) == []
    for entry in (first, second):
        journal.release_device(entry)
        assert list(journal.holders(entry.device)) == []
        journal.remove(entry.attachment)
    assert not list((tmp_path / "state/attachments").iterdir())


def test_a_name_that_a_kill_left_is_no_holder_and_goes(journal: Journal, tmp_path: Path) -> None:
    dead, other = _with_device("c1", "0000:3b:00.2"), _with_device("c2", "0000:3b:00.2")
    journal.write(dead)
    journal.write(other)
    journal.remove(dead.attachment)  # as in the next boot: its device was never released
    journal.write(msgspec.structs.replace(other, device=""))  # killed before the name was removed
    assert list(journal.holders("0000:3b:00.2")) == []
    assert not (tmp_path / "state/attachments/devices").exists()


def test_a_damaged_file_of_a_device_may_be_its_holder(journal: Journal) -> None:
    entry = _with_device("c1", "0000:3b:00.2")
    journal.write(entry)
    journal.path_of(entry.attachment).write_bytes(b"{")
    (damage,) = journal.holders("0000:3b:00.2")
    assert isinstance(damage, JournalDamaged)
