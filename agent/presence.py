"""Publishes the state of this agent, for `podfabric agent --state` and for systemd.

Each agent locks a state file. A file without a lock belongs to a dead agent. The file's name has
the mount namespace, because agents of two containers may have the same process id.

The functions for systemd (sd_notify(3), sd_watchdog_enabled(3)) do nothing without systemd.
"""

import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from base.locks import Busy, LockFile, locked, shared
from base.loop import StepThread

LOOK_EVERY = 1.0  # seconds between checks for SIGTERM while another agent serves
PAUSE = 0.02  # seconds between two attempts to get that agent's lock
NOTIFY_TIME = 1.0  # seconds to wait until the service manager reads
_PREFIX = "agent-"

_log = logging.getLogger(__name__)


def has_turn(
    lock: Path, held: ExitStack, stand_by: Callable[[], object], is_stopping: Callable[[], bool]
) -> bool:
    """Wait for the lock of the agent that listens. Returns False if this process stops first.

    Calls `stand_by` once if another agent has the lock.
    """
    patience = 0.0
    while not is_stopping():
        try:
            turn = locked(lock, "the agent", timeout=patience, keep=True, longest_pause=PAUSE)
            held.enter_context(turn)
        except Busy:
            if not patience:
                stand_by()
            patience = LOOK_EVERY
        else:
            return True
    return False


@contextmanager
def present(run: Path, state: str) -> Iterator[Callable[[str], object]]:
    """Write this agent's state file, and remove it at the end. Raises OSError.

    Yields a function that replaces the state in one write. A reader sees the old or the new line.
    """
    run.mkdir(mode=0o700, parents=True, exist_ok=True)
    remove_dead(run)
    path = run / f"{_PREFIX}{_mounts()}-{os.getpid()}.state"
    lock = _locked(path, state)

    def change(state: str) -> None:
        length = os.fstat(lock.descriptor).st_size
        os.pwrite(lock.descriptor, _line(state).ljust(length), 0)

    try:
        yield change
    finally:
        path.unlink(missing_ok=True)
        lock.release()


def remove_dead(run: Path) -> None:
    """Remove the state files of agents that were killed. Raises OSError."""
    for path in (*_files(run, ""), *run.glob(f".{_PREFIX}*.state")):
        if not _lives(path):
            path.unlink(missing_ok=True)


def states(run: Path) -> list[str]:
    """The states of the living agents in the mount namespace of this process."""
    return list(_living(run, f"{_mounts()}-"))


def others(run: Path, state: str) -> bool:
    """Whether a living agent in any mount namespace of the node has the state `state`."""
    return state in _living(run, "")


def _living(run: Path, of: str) -> Iterator[str]:
    for path in _files(run, of):
        with suppress(FileNotFoundError):
            if _lives(path):
                yield path.read_text().strip()


def _locked(path: Path, state: str) -> LockFile:
    """Create and lock the state file under a hidden name, then rename it.

    Otherwise an agent that starts could find the file without a lock, and remove it.
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
    try:
        os.close(shared(path))
    except FileNotFoundError:
        return False
    except Busy:
        return True
    return False


def notify(*states: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Send states such as "READY=1" to systemd, if possible. Safe in a signal handler."""
    address = environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    if address.startswith("@"):  # an abstract address
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.settimeout(NOTIFY_TIME)
            manager.sendto("\n".join(states).encode(), address)
    except OSError:
        return False
    return True


def notify_stopping(within: float) -> bool:
    """Report the stop. systemd then waits `within` seconds instead of TimeoutStopSec=."""
    return notify("STOPPING=1", f"EXTEND_TIMEOUT_USEC={round(within * 1e6)}")


class Watchdog(StepThread):
    """Sends systemd WATCHDOG=1 while `alive` returns true, if the unit has WatchdogSec=."""

    def __init__(self, alive: Callable[[], bool], environ: Mapping[str, str] = os.environ) -> None:
        super().__init__("watchdog")
        self._alive = alive
        self._environ = environ
        self._silent = False
        self._interval = _watchdog_interval(environ)
        if self._interval:
            self.start()

    def step(self) -> float:
        alive = self._alive()
        if alive:
            notify("WATCHDOG=1", environ=self._environ)
        elif not self._silent:
            _log.error("the agent does not serve: systemd will end it")
        self._silent = not alive
        return self._interval


def _watchdog_interval(environ: Mapping[str, str]) -> float:
    """Half of the time that systemd allows, in seconds. Returns 0 without a watchdog."""
    allowed = environ.get("WATCHDOG_USEC", "")
    process = environ.get("WATCHDOG_PID", "")
    if not allowed.isdecimal() or (process and process != str(os.getpid())):
        return 0.0
    return int(allowed) / 2e6
