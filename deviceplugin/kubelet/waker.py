"""Waiting until there may be something to do: a call of `wake`, a change in a directory, a time."""

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


class Wakes:
    """One thread waits, any thread wakes it. Without inotify there are only calls and times."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._event, select.POLLIN)
        self._inotify = self._open()
        self._watches: dict[Path, int] = {}

    def wake(self) -> None:
        """End a wait, this one or the next."""
        with self._lock:
            if self._event >= 0:
                os.eventfd_write(self._event, 1)

    def follow(self, directories: Iterable[Path]) -> None:
        """Be woken by what comes and goes in what has these names now. Again is fine."""
        if self._inotify is None:
            return
        for path in directories:
            try:
                watch = self._inotify.add_watch(path, _EVENTS)
            except OSError:  # not there yet
                watch = -1
            before = self._watches.get(path, -1)
            if before not in (-1, watch):
                with contextlib.suppress(OSError):  # gone with its directory
                    self._inotify.rm_watch(before)
            self._watches[path] = watch

    def wait(self, seconds: float) -> None:
        """Until woken, or that long."""
        self._poll.poll(max(0, math.ceil(seconds * 1000)))
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        if self._inotify is not None:
            self._inotify.read(timeout=0)

    def close(self) -> None:
        """Let go of everything; nobody may wait. Again is fine."""
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
            _log.warning("inotify: %s: directories are looked at now and then", error.strerror)
            return None
        self._poll.register(inotify, select.POLLIN)
        return inotify
