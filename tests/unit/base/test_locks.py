"""The lock helper, with other holders in threads and processes."""

import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from base import interrupts, locks
from base.interrupts import Call, Terminated
from base.locks import Busy, LockFile, locked, remove_abandoned
from tests.unit.ipam.kills import Line, kill_at, lines_of

HOLDER = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "locks/device"


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_lock_file_is_removed_at_the_end(path: Path) -> None:
    with locked(path, "the device"):
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
    assert not path.exists()


def test_kept_lock_file_keeps_its_inode(path: Path) -> None:
    with locked(path, "the store", keep=True):
        inode = path.stat().st_ino
    with locked(path, "the store", keep=True):
        assert path.stat().st_ino == inode
    assert path.stat().st_ino == inode


def test_lock_that_stays_open_is_the_one_of_the_path(path: Path) -> None:
    """Also after another program put a new file there, or removed the directory."""
    lock = LockFile(path, "a test", keep=True, stay_open=True)
    before = _descriptors()
    changes: tuple[Callable[[], object], ...] = (
        lambda: None,
        path.unlink,
        lambda: shutil.rmtree(path.parent),
    )
    for change in changes:
        with lock:
            pass
        assert _descriptors() <= before + 1
        change()
        with lock, pytest.raises(Busy), locked(path, "a test", timeout=0.0):
            pass
        with locked(path, "a test", timeout=0.0, keep=True):  # it is free though it is open
            pass
    lock.close()
    assert _descriptors() <= before


def test_lock_that_is_held_is_busy_after_the_timeout(path: Path) -> None:
    with (
        locked(path, "the device"),
        pytest.raises(
            Busy, match=r"call for the device still holds .*device after a wait of 0.05 s: "
        ),
        locked(path, "the device", 0.05),
    ):
        pass


def test_timeout_of_zero_is_one_attempt(path: Path) -> None:
    with locked(path, "the agent", 0.0, keep=True):
        with (
            pytest.raises(Busy, match=r"still holds \S+: try again later"),
            locked(path, "the agent", 0.0, keep=True, pause=30.0),
        ):
            pass
        assert path.exists()


def test_lock_of_a_killed_process_is_free(path: Path) -> None:
    path.parent.mkdir()
    arguments = (sys.executable, "-c", HOLDER, str(path))
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(Busy), locked(path, "the device", 0.0):
            pass
        holder.kill()
        holder.wait()
    with locked(path, "the device", 0.0):
        pass


def test_only_one_thread_at_a_time_has_the_lock(path: Path) -> None:
    inside: list[int] = []
    most: list[int] = []

    def work() -> None:
        for _ in range(20):
            with locked(path, "the device", pause=0.001, longest_pause=0.001):
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 80
    assert not path.exists()


def test_waiting_call_ends_when_it_is_interrupted(path: Path) -> None:
    call = Call(endable=True)
    with locked(path, "the device"):
        call.end()
        with (
            interrupts.serving(call),
            pytest.raises(Terminated),
            locked(path, "the device", 60.0, pause=30.0),
        ):
            pass


def test_symbolic_link_is_refused(path: Path) -> None:
    path.parent.mkdir()
    (path.parent / "else").touch()
    path.symlink_to("else")
    with pytest.raises(OSError, match="symbolic"), locked(path, "the device", 0.0):
        pass


def test_error_in_the_block_releases_the_lock_and_leaves_no_descriptor(path: Path) -> None:
    before = _descriptors()
    with pytest.raises(ValueError, match="broken"), locked(path, "the device"):
        raise ValueError("broken")
    with locked(path, "the device", 0.0):
        pass
    assert _descriptors() <= before


def test_files_of_killed_holders_are_removed_and_held_ones_stay(path: Path) -> None:
    path.parent.mkdir(parents=True)
    abandoned = path.with_name("abandoned")
    abandoned.touch()
    with locked(path, "the device"):
        remove_abandoned(path.parent)
        assert [left.name for left in path.parent.iterdir()] == [path.name]
        with pytest.raises(Busy), locked(path, "the device", timeout=0.0):
            pass
    remove_abandoned(path.parent / "missing")


def test_removal_of_abandoned_files_killed_at_any_line_harms_no_holder(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before every line: the next call gets each lock that is free, and the next removal ends."""
    monkeypatch.setattr("tests.unit.ipam.kills.MODULES", {locks.__file__, interrupts.__file__})
    abandoned = [path.with_name(f"abandoned-{number}") for number in range(3)]
    remove = partial(remove_abandoned, path.parent)
    with locked(path, "the device"):

        def kill_before(line: int | None) -> dict[Line, int]:
            for file in abandoned:
                file.touch()
            if line is None:
                return lines_of(remove)
            kill_at(line, remove)
            return {}

        lines = kill_before(None)
        assert len(lines) > 10
        for line, count in lines.items():
            kill_before(count)
            assert path.exists(), f"line {line}"
            with pytest.raises(Busy), locked(path, "the device", timeout=0.0):
                pass
            with locked(abandoned[0], "another", timeout=0.0):
                remove()
                left = {file.name for file in path.parent.iterdir()}
                assert left == {path.name, abandoned[0].name}, f"line {line}"
            assert not abandoned[0].exists(), f"line {line}"
