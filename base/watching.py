"""Tells when a file's content may be another, however it is changed."""

import logging
import os
import select
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from inotify_simple import INotify, flags

LOOK_EVERY = 5.0  # seconds, where the kernel does not tell of a change
SETTLE = 0.2  # seconds without another change, before a changed file is read

_log = logging.getLogger(__name__)

_EVENTS = (
    flags.CLOSE_WRITE
    | flags.CREATE
    | flags.DELETE
    | flags.MOVED_FROM
    | flags.MOVED_TO
    | flags.ATTRIB
)


class WatchedFile:
    """Calls `changed` whenever the file may say something else than before, and once at first.

    A thread of its own looks, until `close`. The directory is watched and not the file, which
    editors and ConfigMap mounts replace; and what inotify cannot tell of (no directory yet, a
    link's target elsewhere) is seen by a look every few seconds. The first call is for a change
    between the caller's own reading and the watch. `changed` reads the file and raises nothing.
    """

    def __init__(
        self,
        path: Path,
        changed: Callable[[], object],
        look_every: float = LOOK_EVERY,
        name: str = "settings",
    ) -> None:
        self._path = path
        self._changed = changed
        self._look_every = look_every
        self._watch: int | None = None
        self._end = os.eventfd(0, os.EFD_CLOEXEC)
        self._any, self._ended = select.poll(), select.poll()
        self._any.register(self._end, select.POLLIN)
        self._ended.register(self._end, select.POLLIN)
        self._inotify = self._open()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """No call of `changed` begins after this."""
        if not self._thread.is_alive():
            return
        os.eventfd_write(self._end, 1)
        self._thread.join()
        os.close(self._end)
        if self._inotify is not None:
            self._inotify.close()

    def _open(self) -> INotify | None:
        try:
            inotify = INotify(nonblocking=True)
        except OSError as error:  # fs.inotify.max_user_instances, or no descriptor left
            _log.warning("inotify: %s: %s is looked at now and then", error.strerror, self._path)
            return None
        self._any.register(inotify, select.POLLIN)
        return inotify

    def _run(self) -> None:
        seen: tuple[int, ...] = ()  # so that a change since the file was read counts
        while True:
            self._follow_directory()
            if self._fingerprint() != seen:
                settled = self._settled()
                if settled is None:
                    return
                seen = settled
                self._changed()
            self._any.poll(self._look_every * 1000)
            if self._ended.poll(0):
                return
            if self._inotify is not None and self._inotify.read(timeout=0):
                seen = ()  # whatever the fingerprint says: its times are coarse

    def _follow_directory(self) -> None:
        """Watch what has the directory's name now. To watch what is watched changes nothing."""
        if self._inotify is None:
            return
        try:
            watch = self._inotify.add_watch(self._path.parent, _EVENTS)
        except OSError:  # no directory yet
            watch = None
        if self._watch not in (None, watch):
            with suppress(OSError):  # gone with its directory
                self._inotify.rm_watch(self._watch)
        self._watch = watch

    def _fingerprint(self) -> tuple[int, ...]:
        """What changes with the file's content, whoever replaces it and how."""
        try:
            found = self._path.stat()
        except OSError as error:
            return (error.errno or 0,)
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

    def _settled(self) -> tuple[int, ...] | None:
        """The fingerprint once it stays, for a writer may be at work; None if it is the end."""
        last = self._fingerprint()
        for _ in range(25):
            if self._ended.poll(SETTLE * 1000):
                return None
            if last == (last := self._fingerprint()):
                break
        if self._inotify is not None:
            self._inotify.read(timeout=0)
        return last
