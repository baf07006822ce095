"""One holder at a time, also when lock files come and go with their holders."""

import threading
from pathlib import Path

import pytest

from base.locks import Busy, locked


def test_lock_and_its_directory_are_made_and_the_file_goes_with_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "run/lock/a"
    with locked(path, "a test"):
        assert path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(Busy, match="another call for a test is still running after 0 s"):
            locked(path, "a test", 0.0).__enter__()
    assert list(path.parent.iterdir()) == []
    with locked(path, "a test", 0.0):
        pass


def test_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic"), locked(tmp_path / "lock", "a test"):
        pass


def test_waiters_take_turns_though_each_removes_the_file(tmp_path: Path) -> None:
    inside, most, rounds = 0, 0, 0

    def work() -> None:
        nonlocal inside, most, rounds
        for _ in range(20):
            with locked(tmp_path / "lock", "a test"):
                inside += 1
                most = max(most, inside)
                rounds += 1
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (most, rounds) == (1, 160)
    assert list(tmp_path.iterdir()) == []
