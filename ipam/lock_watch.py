"""Noticing that someone else wants a lock: each of its tries opens the file (inotify(7))."""

import select
from contextlib import suppress
from pathlib import Path

from inotify_simple import INotify, flags

# A lock file that is removed or replaced must be let go of, too.
_WISH = flags.OPEN | flags.ATTRIB | flags.DELETE_SELF | flags.MOVE_SELF


class Wishes:
    """Wishes for a lock file that is held here. OSError where the system gives no inotify."""

    def __init__(self) -> None:
        self._inotify = INotify()
        self._watch = -1
        self._poll = select.poll()
        self._poll.register(self._inotify, select.POLLIN)

    def begin(self, lock: Path) -> None:
        """Notice them from here on. The lock is held: the holder's own opens are over."""
        self.noticed()
        self._watch = self._inotify.add_watch(lock, _WISH)

    def end(self) -> None:
        """Notice none any more. This ends a `wait`."""
        with suppress(OSError):  # the file may be gone, and its watch with it
            self._inotify.rm_watch(self._watch)

    def noticed(self) -> bool:
        """Whether there was one since this was asked last."""
        return bool(self._inotify.read(timeout=0))

    def wait(self, seconds: float) -> None:
        """Until there is one, or for so long."""
        self._poll.poll(seconds * 1e3)

    def close(self) -> None:
        """Give the descriptor back."""
        self._inotify.close()
