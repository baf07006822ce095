"""Watches directories and files for changes."""

import logging
import math
import os
import select
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from inotify_simple import INotify, flags

from base import files
from base.loop import StepThread

LOOK_EVERY = 5.0  # seconds between two checks, for changes that inotify does not report
SETTLE = 0.2  # seconds without another change before `changed` is called

_log = logging.getLogger(__name__)

_EVENTS = (
    flags.CLOSE_WRITE
    | flags.CREATE
    | flags.DELETE
    | flags.DELETE_SELF
    | flags.MOVED_FROM
    | flags.MOVED_TO
    | flags.MOVE_SELF
    | flags.ATTRIB
)


class Waker:
    """Lets one thread wait for a call of `wake`, a change in a directory, or a timeout.

    Any thread may call `wake`. Without inotify, a change in a directory does not end the wait.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._event, select.POLLIN)
        self._watches: dict[Path, int] = {}
        self._inotify: INotify | None = None
        try:
            self._inotify = INotify(nonblocking=True)
        except OSError as error:  # no instance or descriptor is left
            _log.warning("inotify: %s: directories are polled", error.strerror)
        else:
            self._poll.register(self._inotify, select.POLLIN)

    def wake(self) -> None:
        """End the current wait. If no thread waits, the next wait ends at once."""
        with self._lock:
            if self._event >= 0:
                os.eventfd_write(self._event, 1)

    def follow(self, directories: Iterable[Path]) -> None:
        """Watch these directories. Call this again after a directory is replaced."""
        if self._inotify is None:
            return
        for path in directories:
            try:
                watch = self._inotify.add_watch(path, _EVENTS)
            except OSError:  # does not exist yet
                watch = -1
            before = self._watches.get(path, -1)
            if before not in (-1, watch):
                with suppress(OSError):  # gone with its directory
                    self._inotify.rm_watch(before)
            self._watches[path] = watch

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds`. Returns whether a directory has changed."""
        self._poll.poll(max(0, math.ceil(seconds * 1000)))
        with suppress(BlockingIOError):
            os.eventfd_read(self._event)
        return self._inotify is not None and bool(self._inotify.read(timeout=0))

    def close(self) -> None:
        """Close the descriptors. No thread may be in `wait`. May be called again."""
        with self._lock:
            if self._event < 0:
                return
            os.close(self._event)
            self._event = -1
        if self._inotify is not None:
            self._inotify.close()


class WatchedFile(StepThread):
    """Calls `changed` in a thread when the file may have changed, and once at the start.

    The thread watches the directory, because editors and ConfigMap mounts replace the file. It also
    checks the file every few seconds, because inotify may miss the change of a link's target. The
    first call of `changed` covers a change that came before the watch.
    """

    def __init__(
        self,
        path: Path,
        changed: Callable[[], object],
        look_every: float = LOOK_EVERY,
        name: str = "settings",
    ) -> None:
        super().__init__(name, join=None)
        self._path = path
        self._changed = changed
        self._look_every = look_every
        self._seen: tuple[int, ...] = ()  # equals no version: `changed` is called at once
        self._waker = Waker()
        self.start()

    def wake(self) -> None:
        self._waker.wake()

    def close(self) -> None:
        """Stop watching. `changed` is not called after this returns."""
        super().close()
        self._waker.close()

    def step(self) -> float:
        self._waker.follow((self._path.parent,))
        if files.version(self._path) != self._seen:
            self._seen = self._settled()
            if not self._ended.is_set():
                self._changed()
        return self._look_every

    def _rest(self, seconds: float) -> None:
        if self._waker.wait(seconds):
            self._seen = ()  # call `changed` even if the version is equal: file times are coarse

    def _settled(self) -> tuple[int, ...]:
        """Wait until the file is unchanged for SETTLE seconds. Returns its version."""
        last = files.version(self._path)
        for _ in range(25):
            if self._ended.wait(SETTLE) or last == (last := files.version(self._path)):
                break
        self._waker.wait(0.0)
        return last
