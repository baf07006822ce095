"""The state that an agent publishes while it lives."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import lock_descriptor

from agent import presence
from tests.plugins import CHECKOUT

DIES = """
import os, sys
from pathlib import Path
from agent import presence
with presence.present(Path(sys.argv[1]), "serving"):
    os.kill(os.getpid(), 9)
"""


def test_state_is_told_and_replaced_and_ends_with_the_agent(tmp_path: Path) -> None:
    assert presence.states(tmp_path) == []
    with presence.present(tmp_path / "run", "starting, which takes a while") as told:
        assert presence.states(tmp_path / "run") == ["starting, which takes a while"]
        told("serving")
        assert presence.states(tmp_path / "run") == ["serving"]
        assert presence.others(tmp_path / "run", "serving")
        told("standing by for a while")
        assert presence.states(tmp_path / "run") == ["standing by for a while"]
        assert not presence.others(tmp_path / "run", "standing by")
    assert presence.states(tmp_path / "run") == []
    assert list((tmp_path / "run").iterdir()) == []


def test_killed_agent_tells_nothing_and_the_next_removes_its_file(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", DIES, tmp_path], cwd=CHECKOUT, check=False)
    (left,) = tmp_path.iterdir()
    assert left.read_text() == "serving\n"
    assert presence.states(tmp_path) == []
    assert not presence.others(tmp_path, "serving")
    with presence.present(tmp_path, "starting"):
        assert not left.exists()


def test_an_agent_that_is_killed_before_it_tells_anything_leaves_nothing_for_long(
    tmp_path: Path,
) -> None:
    dies = DIES.replace("with ", "Path.replace = lambda *_: os.kill(os.getpid(), 9)\nwith ")
    subprocess.run([sys.executable, "-c", dies, tmp_path], cwd=CHECKOUT, check=False)
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".agent-")
    with presence.present(tmp_path, "starting"):
        assert not left.exists()


def test_agents_that_start_at_once_take_none_for_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meanwhile(descriptor: int, *, blocking: bool) -> bool:
        monkeypatch.undo()
        with presence.present(tmp_path, "another"):  # removes what nobody has locked
            pass
        return lock_descriptor(descriptor, blocking=blocking)

    monkeypatch.setattr("base.locks.lock_descriptor", meanwhile)
    with presence.present(tmp_path, "starting"):
        assert presence.states(tmp_path) == ["starting"]


def test_agent_with_other_mounts_is_another_container_s(tmp_path: Path) -> None:
    with presence.present(tmp_path, "standing by"):
        (own,) = tmp_path.iterdir()
        mounts = Path("/proc/self/ns/mnt").stat().st_ino
        elsewhere = own.with_name(own.name.replace(str(mounts), "1"))
        os.link(own, elsewhere)  # with the lock of this process
        own.unlink()
        assert presence.states(tmp_path) == []
        assert presence.others(tmp_path, "standing by")
