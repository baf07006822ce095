"""What the journal knows of one attachment, and its form on disk.

    {"crc32": "89abcdef", "entry": {"version": 1, "plugin": "ipoib", "network": ..., ...}}

The checksum covers the bytes of "entry", so that a torn or flipped file is told from a good one.
"""

import zlib
from typing import TypeVar

import msgspec

from cni.spec.attachment import Attachment

VERSION = 1
ADDING = "adding"  # an ADD is at work, or died there: anything of it may exist
ATTACHED = "attached"  # the ADD's answer was complete
LEAVING = "leaving"  # the namespace is gone, and the interface has not come back from it yet

U = TypeVar("U")


class JournalDamaged(Exception):
    """A journal file that does not say what was written. The text names file and reason."""


class JournalEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One attachment. `undo` is the plugin's own record of what to take back.

    `config`, `args` and `path` are the call's own, so that a removal nobody asked for in time
    (GC, sweep) can call the IPAM delegate as the runtime would have.
    """

    version: int = VERSION
    plugin: str
    network: str
    container_id: str
    ifname: str
    netns: str
    netns_identity: str
    netns_seen_from: str = ""  # the view (mounts) in which its path led there, if any did
    boot_id: str
    phase: str
    pod_namespace: str = ""
    pod_name: str = ""
    pod_uid: str = ""
    since: str = ""  # RFC 3339, UTC
    config: str = "{}"
    args: str = ""
    path: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    device: str = ""  # the hardware that is the attachment's alone, until it is given back
    undo: msgspec.Raw = msgspec.Raw(b"{}")

    @property
    def attachment(self) -> Attachment:
        return Attachment(self.network, self.container_id, self.ifname)

    def undo_as(self, shape: type[U]) -> U:
        """The plugin's record as its type; Damaged if it is of another shape."""
        try:
            return msgspec.json.decode(self.undo, type=shape)
        except msgspec.MsgspecError as error:
            raise JournalDamaged(f"journal of {self.attachment}: {error}") from None


class _JournalFile(msgspec.Struct):
    crc32: str
    entry: msgspec.Raw


def to_bytes(entry: JournalEntry) -> bytes:
    """The file's content."""
    body = msgspec.json.encode(entry)
    return msgspec.json.encode(_JournalFile(f"{zlib.crc32(body):08x}", msgspec.Raw(body))) + b"\n"


def from_bytes(content: bytes, name: str) -> JournalEntry:
    """Read a file's content. Raises Damaged; `name` is for its text."""
    try:
        file = msgspec.json.decode(content, type=_JournalFile)
        if file.crc32 != f"{zlib.crc32(bytes(file.entry)):08x}":
            raise JournalDamaged(f"journal file {name} is damaged: its checksum differs")
        entry = msgspec.json.decode(file.entry, type=JournalEntry)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise JournalDamaged(f"journal file {name} is damaged: {error}") from None
    if entry.version != VERSION:
        raise JournalDamaged(
            f"journal file {name} has version {entry.version}, this podfabric reads {VERSION}: "
            "it was written by a newer one"
        )
    return entry
