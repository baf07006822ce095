"""The directory of journal files, and the lock of each attachment."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import msgspec

from base import files, interrupts, locks
from base.paths import Paths
from cni.attachments.entry import ADDING, JournalDamaged, JournalEntry, from_bytes, to_bytes
from cni.spec.attachment import Attachment


class Journal:
    """The journal of one node."""

    def __init__(self, paths: Paths) -> None:
        self._directory = paths.attachments
        self._locks = paths.locks

    def path_of(self, attachment: Attachment) -> Path:
        """The file of an attachment: readable first, unambiguous by the key."""
        name = f"{attachment.container_id[:24]}-{attachment.ifname}-{attachment.key}.json"
        return self._directory / name

    def read(self, attachment: Attachment) -> JournalEntry | None:
        """The entry, None if there is none. Raises Damaged."""
        path = self.path_of(attachment)
        try:
            entry = from_bytes(path.read_bytes(), str(path))
        except FileNotFoundError:
            return None
        if entry.attachment != attachment:
            raise JournalDamaged(f"journal file {path} is damaged: it speaks of {entry.attachment}")
        return entry

    def write(self, entry: JournalEntry) -> None:
        """Put an entry on disk. It survives a kill, and the first one of an ADD a power cut.

        After a power cut there is nothing left in the kernel to undo, and the entry of an earlier
        boot is removed in every phase alike: so a later one needs to outlive this boot only.
        """
        durable = entry.phase == ADDING
        files.write_atomically(self.path_of(entry.attachment), to_bytes(entry), durable=durable)

    def remove(self, attachment: Attachment) -> None:
        """Forget an attachment. Only once nothing is left to undo.

        If a power cut brings the entry back, it is one of an earlier boot, which a sweep removes.
        """
        files.remove(self.path_of(attachment), durable=False)

    def set_aside(self, attachment: Attachment) -> Path:
        """Keep a damaged file out of the way but for a person to see."""
        path = self.path_of(attachment)
        aside = path.with_suffix(".damaged")
        path.replace(aside)
        files.sync_directory(self._directory)
        return aside

    def entries(self) -> Iterator[JournalEntry | JournalDamaged]:
        """Every entry, or why it cannot be read, in no order."""
        try:
            paths = self._files()
        except OSError as error:
            yield JournalDamaged(f"journal {self._directory} cannot be read: {error.strerror}")
            return
        for path in paths:
            try:
                yield from_bytes(path.read_bytes(), str(path))
            except FileNotFoundError:
                continue  # removed since the directory was listed
            except JournalDamaged as damage:
                yield damage
            except OSError as error:
                yield JournalDamaged(f"journal file {path} cannot be read: {error.strerror}")

    @contextmanager
    def locked(self, attachment: Attachment, timeout: float = locks.TIMEOUT) -> Iterator[None]:
        """One call at a time for an attachment. Raises Busy; Terminated if the client has gone."""
        path = self._locks / f"attachment-{attachment.key}"
        with locks.locked(path, str(attachment), timeout):
            interrupts.require_client()
            yield

    def device_locked(
        self, device: str, timeout: float = locks.TIMEOUT
    ) -> AbstractContextManager[None]:
        """One call at a time decides whose a device is. Raises Busy."""
        return locks.locked(self._locks / f"device-{device}", f"device {device}", timeout)

    def holders(self, device: str) -> Iterator[JournalEntry | JournalDamaged]:
        """The attachments that a device belongs to, and what names it but is damaged.

        Raises OSError: a device is free only if the whole journal could be read.
        """
        # Most entries are of other devices: a look at the bytes costs less than their reading.
        mark = msgspec.json.encode(device)
        for path in self._files():
            try:
                content = path.read_bytes()
                if mark in content and (entry := from_bytes(content, str(path))).device == device:
                    yield entry
            except FileNotFoundError:
                continue  # removed since the directory was listed
            except JournalDamaged as damage:
                yield damage

    def _files(self) -> list[Path]:
        """Not by glob: it takes a directory that cannot be read for an empty one. OSError."""
        try:
            paths = sorted(self._directory.iterdir())
        except FileNotFoundError:
            return []
        return [one for one in paths if one.suffix == ".json" and not one.name.startswith(".")]
