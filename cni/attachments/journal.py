"""The journal: one file for each attachment, which says how to undo the attachment.

A plugin writes the file before the first change to the kernel, and removes the file when nothing is
left to undo. The checksum covers the bytes of "entry":

    {"crc32": "89abcdef", "entry": {"version": 1, "plugin": "ipoib", "network": ..., ...}}

A later entry is appended as a line. Readers use the last line that is not torn.

For each attachment that may have a device, `devices/<device>/` has an empty file with the name of
the journal file. A plugin makes the empty file before the entry, and removes the empty file after
the release of the device. So a kill can only leave an unneeded file. A power cut may lose the empty
file, but after a reboot no attachment has a device.
"""

import json
import os
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

import msgspec

from base import decoding, files, interrupts, locks
from base.locks import LockFile
from base.paths import Paths
from base.pod import Pod
from cni.spec.attachment import Attachment
from cni.spec.config import IpamConfig, decode_for_removal
from cni.spec.request import Request, of_environ
from host.namespaces import NetworkNamespace, where

VERSION = 1
_CONTAINER = 24  # characters of the container id in a file's name
_UNFINISHED = ".json.tmp"  # the suffix while files.write_atomically writes the file

U = TypeVar("U")


class JournalDamaged(Exception):
    """A journal file cannot be read, or is damaged. The text names the file and the reason."""


class Phase(StrEnum):
    """The progress of an attachment."""

    ADDING = "adding"  # an ADD runs or was killed: any part of the attachment may exist
    ATTACHED = "attached"  # the ADD completed
    LEAVING = "leaving"  # the namespace is gone, its interface is not back on the host yet


class JournalEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One attachment. `undo` is the plugin's own record for the removal.

    GC and the sweep call the IPAM plugin's DEL with `config`, `args` and `path` of the ADD.
    """

    version: int = VERSION
    plugin: str
    network: str
    container_id: str
    ifname: str
    netns: str
    netns_identity: str
    netns_seen_from: str = ""  # host.namespaces.where(netns), if the path led to the namespace
    boot_id: str
    phase: Phase
    pod_namespace: str = ""
    pod_name: str = ""
    pod_uid: str = ""
    since: str = ""  # start of the ADD: RFC 3339, UTC
    leaving_since: str = ""  # start of the phase LEAVING, in the same form
    config: str = "{}"
    args: str = ""
    path: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    segment: str = ""  # the link of the addresses (ipam.config.segments)
    device: str = ""  # the exclusive device, "" once it is released
    rail_of: str = ""  # the first interface of the ADD, "" for an ADD of one interface
    undo: msgspec.Raw = msgspec.Raw(b"{}")

    @classmethod
    def begun(
        cls,
        plugin: str,
        request: Request,
        namespace: NetworkNamespace | None,
        boot_id: str,
        record: msgspec.Struct,
        pod: Pod | None = None,
        device: str = "",
    ) -> "JournalEntry":
        """The entry of a new ADD. `namespace` is `None` if the pod's namespace is gone."""
        pod = pod or Pod()
        return cls(
            plugin=plugin,
            network=request.network,
            container_id=request.container_id,
            ifname=request.ifname,
            netns=request.netns,
            netns_identity=namespace.identity if namespace is not None else "",
            netns_seen_from=namespace.seen_from if namespace is not None else where(request.netns),
            boot_id=boot_id,
            phase=Phase.ADDING,
            pod_namespace=pod.namespace,
            pod_name=pod.name,
            pod_uid=pod.uid,
            since=datetime.now(UTC).isoformat(timespec="seconds"),
            config=request.config.raw.decode(),
            args=request.args,
            path=request.path,
            device=device,
            rail_of=request.rail_of,
            undo=msgspec.Raw(msgspec.json.encode(record)),
        )

    @property
    def attachment(self) -> Attachment:
        return Attachment(self.network, self.container_id, self.ifname)

    @property
    def first(self) -> Attachment:
        """The first attachment of the ADD. Its lock is the lock of all of them."""
        return Attachment(self.network, self.container_id, self.rail_of or self.ifname)

    @property
    def ipam(self) -> IpamConfig:
        """The configuration of the IPAM plugin that the ADD ran."""
        return self.delete_request().config.ipam

    def delete_request(self) -> Request:
        """The DEL that the runtime would send for this attachment."""
        environ = {
            "CNI_COMMAND": "DEL",
            "CNI_CONTAINERID": self.container_id,
            "CNI_NETNS": self.netns,
            "CNI_IFNAME": self.ifname,
            "CNI_ARGS": self.args,
            "CNI_PATH": ":".join(self.path),
        }
        return of_environ(environ, decode_for_removal(self.config.encode()), self.network)

    def undo_as(self, shape: type[U]) -> U:
        """The plugin's record as a `shape`. Raises JournalDamaged if the record does not fit."""
        try:
            return decoding.decode(self.undo, shape)
        except msgspec.MsgspecError as error:
            raise JournalDamaged(
                f"journal entry of {self.attachment} is damaged: {error}"
            ) from None

    def with_record(self, record: msgspec.Struct) -> "JournalEntry":
        return msgspec.structs.replace(self, undo=msgspec.Raw(msgspec.json.encode(record)))

    def attached(
        self, record: msgspec.Struct, addresses: Sequence[str], segment: str = ""
    ) -> "JournalEntry":
        """The entry of a completed ADD. `segment` is the link of the addresses."""
        return msgspec.structs.replace(
            self.with_record(record),
            phase=Phase.ATTACHED,
            addresses=tuple(addresses),
            segment=segment,
        )


class _JournalFile(msgspec.Struct):
    crc32: str
    entry: msgspec.Raw


def to_bytes(entry: JournalEntry) -> bytes:
    body = msgspec.json.encode(entry)
    return b'{"crc32":"%08x","entry":%b}\n' % (zlib.crc32(body), body)


def from_bytes(content: bytes, name: str) -> JournalEntry:
    """The last entry in a file's content. Raises JournalDamaged with the file's `name`."""
    try:
        file = decoding.decode(_last_line(content), _JournalFile)
        if file.crc32 != f"{zlib.crc32(bytes(file.entry)):08x}":
            raise JournalDamaged(f"journal file {name} is damaged: its checksum is wrong")
        entry = decoding.decode(file.entry, JournalEntry)
    except msgspec.MsgspecError as error:
        raise JournalDamaged(f"journal file {name} is damaged: {error}") from None
    if entry.version != VERSION:
        raise JournalDamaged(
            f"journal file {name} of a newer podfabric has version {entry.version}, but this "
            f"podfabric reads version {VERSION}"
        )
    return entry


def _last_line(content: bytes) -> bytes:
    """The last line. A torn last line counts only if the content has no other line."""
    *ended, rest = content.split(b"\n")
    lines = [line for line in ended if line]
    return rest if rest and (not lines or _begins_with_json(rest)) else lines[-1] if lines else b""


def _begins_with_json(text: bytes) -> bool:
    """Whether the text begins with a whole JSON value. A torn text does not."""
    try:
        json.JSONDecoder().raw_decode(text.decode(errors="replace"))
    except (ValueError, RecursionError):
        return False
    return True


class AttachmentLock(LockFile):
    def acquire(self, timeout: float | None = None) -> None:
        """Wait for the lock. Raises Busy, OSError, or Terminated if the client has disconnected."""
        super().acquire(timeout)
        try:
            interrupts.require_client()
        except BaseException:
            self.release()
            raise


class Journal:
    """The journal files of one node, and the lock of each attachment and device."""

    def __init__(self, paths: Paths) -> None:
        self._directory = paths.attachments
        self._files_below = str(paths.attachments)
        self._devices = f"{paths.attachments}/devices"
        self._locks = str(paths.locks)

    def path_of(self, attachment: Attachment) -> Path:
        return Path(self._file_of(attachment))

    def read(self, attachment: Attachment) -> JournalEntry | None:
        """The entry of the attachment, or `None`. Raises JournalDamaged."""
        path = self._file_of(attachment)
        try:
            entry = from_bytes(files.read(path), path)
        except FileNotFoundError:
            return None
        if entry.attachment != attachment:
            raise JournalDamaged(
                f"journal file {path} is damaged: its entry is for {entry.attachment}, not for "
                f"{attachment}"
            )
        return entry

    def write(self, entry: JournalEntry) -> None:
        """Store an entry, which survives a kill. An ADD's first entry also survives a power cut.

        A later entry need not survive a power cut: a reboot leaves nothing to undo in the kernel. A
        later entry begins with a newline, because a killed writer may have left a part of a line.
        """
        path, line = self._file_of(entry.attachment), to_bytes(entry)
        if entry.device:
            _make(f"{self._devices}/{entry.device}", path)
        first = entry.phase is Phase.ADDING
        if first or not files.append(path, b"\n" + line):
            files.write_atomically(path, line, durable=first)

    def release_device(self, entry: JournalEntry) -> None:
        """Store that the attachment no longer has its device. The caller has the device's lock."""
        self.write(msgspec.structs.replace(entry, device=""))
        self._forget(entry.device, os.path.basename(self._file_of(entry.attachment)))  # noqa: PTH119

    def remove(self, attachment: Attachment) -> None:
        """Remove an entry, once nothing is left to undo. A power cut may bring the entry back."""
        path = self._file_of(attachment)
        files.remove(path, durable=False)
        self._forget_devices_of(os.path.basename(path))  # noqa: PTH119

    def remove_unfinished(self) -> None:
        """Remove the unfinished files of killed ADDs."""
        with suppress(OSError):
            for path in self._paths(_UNFINISHED):
                key = path.name.removesuffix(_UNFINISHED).rpartition("-")[2]
                lock = locks.locked(self._lock_of(key), path.name, timeout=0.0)
                with suppress(locks.Busy), lock:  # busy: its writer is alive
                    path.unlink(missing_ok=True)

    def set_aside(self, attachment: Attachment) -> Path:
        """Keep a damaged file under another name, for an administrator. Returns the new path."""
        path = self.path_of(attachment)
        aside = path.with_suffix(".damaged")
        path.replace(aside)
        files.sync_directory(self._directory)
        self._forget_devices_of(path.name)
        return aside

    def counts(self) -> Mapping[tuple[str, str], int]:
        """The number of entries by plugin and phase. ("", "damaged") counts damaged files."""
        return Counter(
            ("", "damaged") if isinstance(entry, JournalDamaged) else (entry.plugin, entry.phase)
            for entry in self.entries()
        )

    def entries(self, container_id: str = "") -> Iterator[JournalEntry | JournalDamaged]:
        """Every entry, or those of `files_of`. Yields a JournalDamaged for an unreadable file."""
        try:
            paths = self.files_of(container_id) if container_id else self._paths(".json")
        except OSError as error:
            yield JournalDamaged(f"the journal {self._directory} cannot be read: {error.strerror}")
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

    def files_of(self, container_id: str) -> list[Path]:
        """The files of the container's attachments, also those that a killed ADD has begun."""
        paths = self._paths((".json", _UNFINISHED))
        names = {path.name.removesuffix(".tmp").removeprefix(".") for path in paths}
        beginning = f"{container_id[:_CONTAINER]}-"
        return [self._directory / name for name in sorted(names) if name.startswith(beginning)]

    def holders(self, device: str) -> Iterator[JournalEntry | JournalDamaged]:
        """The entries of attachments that have the device. The caller has the device's lock.

        Yields a JournalDamaged for a damaged file. Raises OSError for an unreadable file.
        """
        try:
            names = sorted(os.listdir(f"{self._devices}/{device}"))  # noqa: PTH208
        except FileNotFoundError:
            return
        for name in names:
            path = f"{self._files_below}/{name}"
            try:
                entry = from_bytes(files.read(path), path)
            except FileNotFoundError:
                self._forget(device, name)  # left by a killed process or a power cut
            except JournalDamaged as damage:
                yield damage
            else:
                if entry.device == device:
                    yield entry
                else:
                    self._forget(device, name)

    def locked(
        self, attachment: Attachment, timeout: float = locks.TIMEOUT
    ) -> AbstractContextManager[None]:
        """The attachment's lock. Raises Busy, or Terminated if the client has disconnected."""
        return AttachmentLock(self._lock_of(attachment.key), str(attachment), timeout)

    def device_locked(
        self, device: str, timeout: float = locks.TIMEOUT
    ) -> AbstractContextManager[None]:
        """The lock for every decision about a device. Raises Busy."""
        return locks.locked(f"{self._locks}/device-{device}", f"device {device}", timeout)

    def _forget(self, device: str, name: str) -> None:
        """Remove an empty file of `devices`, and directories that become empty."""
        below = f"{self._devices}/{device}"
        with suppress(OSError):
            os.unlink(f"{below}/{name}")  # noqa: PTH108
            os.rmdir(below)  # noqa: PTH106
            os.rmdir(self._devices)  # noqa: PTH106

    def _forget_devices_of(self, name: str) -> None:
        """Remove the attachment's remaining files in `devices`."""
        with suppress(OSError):
            for device in os.listdir(self._devices):  # noqa: PTH208
                self._forget(device, name)

    def _file_of(self, attachment: Attachment) -> str:
        name = f"{attachment.container_id[:_CONTAINER]}-{attachment.ifname}-{attachment.key}.json"
        return f"{self._files_below}/{name}"

    def _lock_of(self, key: str) -> str:
        return f"{self._locks}/attachment-{key}"

    def _paths(self, ending: str | tuple[str, ...]) -> list[Path]:
        """The files with this ending. Unlike glob, raises OSError for an unreadable directory."""
        try:
            paths = sorted(self._directory.iterdir())
        except FileNotFoundError:
            return []
        return [path for path in paths if path.name.endswith(ending)]


def _make(directory: str, path: str) -> None:
    """Make an empty file in the directory, with the name of `path`. Raises OSError."""
    name = f"{directory}/{os.path.basename(path)}"  # noqa: PTH119
    while True:  # another process may remove an empty directory
        try:
            os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except FileNotFoundError:
            for missing in (*reversed(Path(directory).parents), Path(directory)):
                missing.mkdir(mode=0o700, exist_ok=True)
        else:
            return
