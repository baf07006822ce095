"""What this process does, as `podfabric agent --state` of the same container tells.

A file for each agent, in the directory of the agent's socket. The process holds the file's lock,
so the kernel says whether it lives. The name has the mount namespace, which tells containers apart
that share the directory, whether or not they share process ids.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from base.locks import Busy, LockFile, shared

_PREFIX = "agent-"


class Presence:
    """The state of this process, from its start to the end of the block that made it."""

    def __init__(self, lock: LockFile, state: str) -> None:
        self._lock = lock
        self._length = len(_line(state))

    def tell(self, state: str) -> None:
        """Replace the state by this line, in one write: a reader sees the old or the new one."""
        line = _line(state).ljust(self._length)
        self._length = len(line)
        os.pwrite(self._lock.descriptor, line, 0)


@contextmanager
def present(run: Path, state: str) -> Iterator[Presence]:
    """Tell in the directory `run` that this process is an agent. Raises OSError."""
    run.mkdir(mode=0o700, parents=True, exist_ok=True)
    remove_dead(run)
    path = run / f"{_PREFIX}{_mounts()}-{os.getpid()}.state"
    lock = _locked(path, state)
    try:
        yield Presence(lock, state)
    finally:
        path.unlink(missing_ok=True)
        lock.release()


def remove_dead(run: Path) -> None:
    """Remove the files of agents that were killed. Raises OSError."""
    for path in (*_files(run, ""), *run.glob(f".{_PREFIX}*.state")):
        if not _lives(path):
            path.unlink(missing_ok=True)


def states(run: Path) -> list[str]:
    """The states of the living agents that have the mounts of this process."""
    told = []
    for path in _files(run, f"{_mounts()}-"):
        with suppress(FileNotFoundError):
            if _lives(path):
                told.append(path.read_text().strip())
    return told


def others(run: Path, state: str) -> bool:
    """Whether a living agent of the node tells that state, whichever mounts it has."""
    for path in _files(run, ""):
        with suppress(FileNotFoundError):
            if path.read_text().strip() == state and _lives(path):
                return True
    return False


def _locked(path: Path, state: str) -> LockFile:
    """The lock of the file, which is held before the file has its name.

    Until it is held another agent that starts may take the file for a dead one's, and remove it.
    """
    hidden = path.with_name(f".{path.name}")
    lock = LockFile(hidden, "this agent", keep=True)
    while True:
        lock.acquire()
        try:
            os.pwrite(lock.descriptor, _line(state), 0)
            hidden.replace(path)
        except FileNotFoundError:
            lock.release()
        except BaseException:
            lock.release()
            raise
        else:
            return lock


def _line(state: str) -> bytes:
    return f"{state}\n".encode()


def _files(run: Path, of: str) -> list[Path]:
    return sorted(run.glob(f"{_PREFIX}{of}*.state"))


def _mounts() -> int:
    return Path("/proc/self/ns/mnt").stat().st_ino


def _lives(path: Path) -> bool:
    """Whether a process holds the lock of that file."""
    try:
        os.close(shared(path))
    except FileNotFoundError:
        return False
    except Busy:
        return True
    return False
