"""Waits for a call of `wake`, a change in a directory, or a timeout."""

import contextlib
import logging
import math
import os
import select
import threading
from collections.abc import Iterable
from pathlib import Path

from inotify_simple import INotify, flags

_EVENTS = (
    flags.CREATE
    | flags.MOVED_TO
    | flags.MOVED_FROM
    | flags.DELETE
    | flags.DELETE_SELF
    | flags.MOVE_SELF
)

_log = logging.getLogger(__name__)


class Waker:
    """One thread waits, any thread wakes it. Without inotify, directories do not wake it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._event, select.POLLIN)
        self._inotify = self._open()
        self._watches: dict[Path, int] = {}

    def wake(self) -> None:
        """End the current wait, or the next one."""
        with self._lock:
            if self._event >= 0:
                os.eventfd_write(self._event, 1)

    def follow(self, directories: Iterable[Path]) -> None:
        """Watch the directories that have these names now. Call again if they are replaced."""
        if self._inotify is None:
            return
        for path in directories:
            try:
                watch = self._inotify.add_watch(path, _EVENTS)
            except OSError:  # does not exist yet
                watch = -1
            before = self._watches.get(path, -1)
            if before not in (-1, watch):
                with contextlib.suppress(OSError):  # gone with its directory
                    self._inotify.rm_watch(before)
            self._watches[path] = watch

    def wait(self, seconds: float) -> None:
        """Wait until woken, at most so many seconds."""
        self._poll.poll(max(0, math.ceil(seconds * 1000)))
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        if self._inotify is not None:
            self._inotify.read(timeout=0)

    def close(self) -> None:
        """Close the descriptors. No thread may wait. May be called again."""
        with self._lock:
            if self._event < 0:
                return
            os.close(self._event)
            self._event = -1
        if self._inotify is not None:
            self._inotify.close()

    def _open(self) -> INotify | None:
        try:
            inotify = INotify(nonblocking=True)
        except OSError as error:  # fs.inotify.max_user_instances, or no descriptor left
            _log.warning("inotify: %s: directories are polled", error.strerror)
            return None
        self._poll.register(inotify, select.POLLIN)
        return inotify
