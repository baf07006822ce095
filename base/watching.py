"""Watches a file and reports when its content may have changed."""

import logging
import os
import select
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from inotify_simple import INotify, flags

LOOK_EVERY = 5.0  # seconds between two checks, for changes that inotify does not report
SETTLE = 0.2  # seconds without another change before `changed` is called

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
    """Calls `changed` when the file's content may have changed, and once at the start.

    A thread does this until `close`. It watches the directory, because editors and ConfigMap
    mounts replace the file. It also checks every few seconds for what inotify does not report: a
    directory that does not exist yet, or a link's target elsewhere. The call at the start covers
    a change between the caller's own reading and the watch. `changed` reads the file and must not
    raise.
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
        """Stop watching. `changed` is not called after this returns."""
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
            _log.warning(
                "inotify: %s: %s is checked every %g s instead",
                error.strerror,
                self._path,
                self._look_every,
            )
            return None
        self._any.register(inotify, select.POLLIN)
        return inotify

    def _run(self) -> None:
        seen: tuple[int, ...] = ()  # differs from every fingerprint: `changed` is called at once
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
                seen = ()  # the fingerprint may be the same: file times are coarse

    def _follow_directory(self) -> None:
        """Watch the directory that has the name now. Watching it again changes nothing."""
        if self._inotify is None:
            return
        try:
            watch = self._inotify.add_watch(self._path.parent, _EVENTS)
        except OSError:  # no directory yet
            watch = None
        if self._watch not in (None, watch):
            with suppress(OSError):  # the watch ended with its directory
                self._inotify.rm_watch(self._watch)
        self._watch = watch

    def _fingerprint(self) -> tuple[int, ...]:
        """Numbers that change with the file's content, however it is written or replaced."""
        try:
            status = self._path.stat()
        except OSError as error:
            return (error.errno or 0,)
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns

    def _settled(self) -> tuple[int, ...] | None:
        """The fingerprint once a writer has finished; None after `close`."""
        last = self._fingerprint()
        for _ in range(25):
            if self._ended.poll(SETTLE * 1000):
                return None
            if last == (last := self._fingerprint()):
                break
        if self._inotify is not None:
            self._inotify.read(timeout=0)
        return last
