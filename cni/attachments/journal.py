"""The directory of journal files, and the lock of each attachment."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from cni.attachments.entry import Attachment, Damaged, Entry, from_bytes, to_bytes
from cni.spec import interrupts
from host import files
from host.paths import Paths

_SLICE, _SHORT, _LONG = 0.3, 0.01, 0.1  # seconds of waiting, and between two looks in it
LOCK_TIMEOUT = 60.0  # seconds; a live ADD of the same attachment takes no longer


class Busy(Exception):
    """Another call for the same attachment did not end in time."""


class Journal:
    """The journal of one node."""

    def __init__(self, paths: Paths) -> None:
        self._directory = paths.attachments
        self._locks = paths.locks

    def path_of(self, attachment: Attachment) -> Path:
        """The file of an attachment: readable first, unambiguous by the key."""
        name = f"{attachment.container_id[:24]}-{attachment.ifname}-{attachment.key}.json"
        return self._directory / name

    def read(self, attachment: Attachment) -> Entry | None:
        """The entry, None if there is none. Raises Damaged."""
        path = self.path_of(attachment)
        try:
            entry = from_bytes(path.read_bytes(), str(path))
        except FileNotFoundError:
            return None
        if entry.attachment != attachment:
            raise Damaged(f"journal file {path} is damaged: it speaks of {entry.attachment}")
        return entry

    def write(self, entry: Entry) -> None:
        """Put an entry on disk; it is there when this returns."""
        files.write_atomically(self.path_of(entry.attachment), to_bytes(entry))

    def remove(self, attachment: Attachment) -> None:
        """Forget an attachment, durably. Only once nothing is left to undo."""
        files.remove(self.path_of(attachment))

    def set_aside(self, attachment: Attachment) -> Path:
        """Keep a damaged file out of the way but for a person to see."""
        path = self.path_of(attachment)
        aside = path.with_suffix(".damaged")
        path.replace(aside)
        files.sync_directory(self._directory)
        return aside

    def entries(self) -> Iterator[Entry | Damaged]:
        """Every entry, or why it cannot be read, in no order."""
        try:
            paths = sorted(self._directory.glob("[!.]*.json"))
        except OSError:
            return
        for path in paths:
            try:
                yield from_bytes(path.read_bytes(), str(path))
            except FileNotFoundError:
                continue  # removed since the directory was listed
            except Damaged as damage:
                yield damage
            except OSError as error:
                yield Damaged(f"journal file {path} cannot be read: {error.strerror}")

    @contextmanager
    def locked(self, attachment: Attachment, timeout: float = LOCK_TIMEOUT) -> Iterator[None]:
        """One call at a time for an attachment. Raises Busy.

        The file goes away with the lock: a waiter that finds its file unlinked tries again
        (filelock looks), so nothing accumulates over a node's life.
        """
        self._locks.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._locks / f"attachment-{attachment.key}"
        lock = FileLock(path)
        deadline = time.monotonic() + timeout
        pause = _SHORT
        while True:
            interrupts.checkpoint()  # a call that nobody waits for any more waits no longer
            slice_ = min(_SLICE, max(0.0, deadline - time.monotonic()))
            try:
                lock.acquire(timeout=slice_, poll_interval=pause)
                break
            except Timeout:
                pause = _LONG
            if time.monotonic() >= deadline:
                raise Busy(
                    f"another call for {attachment} is still running after {timeout:g} s "
                    f"(it holds {path}): try again later"
                )
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            lock.release()
