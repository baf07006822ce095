"""The checkpoint's log: what is in it after a cut anywhere, a full disk, and a lost file."""

import os
import stat
from pathlib import Path

import pytest

from deviceplugin import checkpoint_log
from deviceplugin.checkpoint_log import ROOM, Log

FIRST, SECOND = b'{"id":"0"}', b'{"id":"1"}'


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log.create(tmp_path / "devices")


def content(log: Log) -> bytes:
    return checkpoint_log.lines(log.path)


def full(*_: object) -> int:
    raise OSError(28, "No space left on device")


def test_new_one_is_empty_and_for_root_only(log: Log) -> None:
    assert not log.used
    assert content(log) == b""
    assert stat.S_IMODE(log.path.stat().st_mode) == 0o600


def test_lines_come_back_in_order(log: Log) -> None:
    assert log.append([FIRST])
    assert log.append([SECOND, FIRST])
    assert log.used
    assert content(log).splitlines() == [FIRST, SECOND, FIRST]


def test_its_size_never_changes(log: Log) -> None:
    log.append([FIRST])
    assert log.path.stat().st_size == ROOM


def test_is_read_when_append_returns_and_on_disk_when_sync_does(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[bytes] = []
    monkeypatch.setattr("os.fdatasync", lambda _: synced.append(content(log)))
    log.append([FIRST])
    log.append([SECOND])
    assert content(log) == FIRST + b"\n" + SECOND + b"\n"
    assert synced == []
    log.sync()
    assert synced == [content(log)]


def test_last_byte_of_its_room_is_used_and_not_the_one_behind(log: Log) -> None:
    assert log.append([b"x" * (ROOM - len(FIRST) - 2)])
    assert not log.append([FIRST + b" "])
    assert log.append([FIRST])
    assert content(log).splitlines()[1:] == [FIRST]
    assert log.path.stat().st_size == ROOM


def test_nothing_is_added_where_only_some_lines_have_room(log: Log) -> None:
    log.append([b"x" * (ROOM - len(FIRST) - 2)])
    assert not log.append([FIRST, SECOND])
    assert len(content(log).splitlines()) == 1


@pytest.mark.parametrize("rest", [b"", b"\0" * 50], ids=["cut", "zeros"])
def test_line_that_was_not_written_to_its_end_is_none(log: Log, rest: bytes) -> None:
    log.append([FIRST])
    log.append([SECOND])
    whole = content(log)
    for end in range(len(whole)):
        log.path.write_bytes(whole[:end] + rest)
        assert content(log) in (b"", FIRST + b"\n")
        assert (content(log) == b"") == (end <= len(FIRST))


def test_what_came_to_the_disk_behind_a_hole_is_not_read(log: Log) -> None:
    log.append([FIRST])
    log.append([SECOND])
    with log.path.open("r+b") as file:
        file.seek(len(FIRST) + 1)
        file.write(bytes(4))
    assert content(log) == FIRST + b"\n"


@pytest.mark.parametrize("done", [0, 3, len(SECOND)])
def test_line_that_failed_is_taken_back(
    log: Log, monkeypatch: pytest.MonkeyPatch, done: int
) -> None:
    log.append([FIRST])
    write, parts = os.pwrite, iter([done] if done else [])

    def broken(descriptor: int, line: bytes, offset: int) -> int:
        if not any(line):  # it is taken back
            return write(descriptor, line, offset)
        if (part := next(parts, None)) is None:
            return full()
        return write(descriptor, line[:part], offset)

    with monkeypatch.context() as patched:
        patched.setattr("os.pwrite", broken)
        with pytest.raises(OSError, match="No space"):
            log.append([SECOND])
    assert log.path.read_bytes().rstrip(b"\0") == FIRST + b"\n"


def test_written_in_parts_is_written_all(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwrite
    monkeypatch.setattr("os.pwrite", lambda fd, data, offset: write(fd, data[:3], offset))
    log.append([FIRST, SECOND])
    assert content(log).splitlines() == [FIRST, SECOND]


def test_lost_file_is_an_error(log: Log) -> None:
    log.path.unlink()
    for act in (lambda: log.append([FIRST]), log.sync):
        with pytest.raises(FileNotFoundError):
            act()
    assert not log.path.exists()


@pytest.mark.parametrize("call", ["os.pwrite", "os.fsync"])
def test_one_that_cannot_be_made_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(call, full)
    with pytest.raises(OSError, match="No space"):
        Log.create(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_only_the_others_are_removed(log: Log) -> None:
    directory = log.path.parent
    other = Log.create(directory)
    checkpoint, left = directory / "checkpoint.json", directory / "checkpoint.damaged"
    checkpoint.touch()
    left.touch()
    checkpoint_log.remove_others(directory, log.path)
    assert set(directory.iterdir()) == {log.path, checkpoint, left}
    assert not other.path.exists()
