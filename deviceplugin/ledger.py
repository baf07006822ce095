"""Who holds what: the checkpoint in memory and on disk, with its log, which are one.

A grant is written before it is answered, so a kill loses nothing; it is brought to disk right
behind the answer. A power cut may lose the last grants: what of them the kubelet has in its own
checkpoint is taken over from there, nodes included, and for the rest it asks again.

What the kubelet tells is compared with it now and then. An allocation that the kubelet does not
know is dropped, once it is old enough for the kubelet to have noted it; one that only the kubelet
knows is taken over.
"""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec

from base import files
from base.paths import Paths
from deviceplugin import checkpoint, checkpoint_log
from deviceplugin.checkpoint import (
    AllocatedHCA,
    Allocation,
    CheckpointDamaged,
    CheckpointUnreadable,
)
from deviceplugin.checkpoint_log import Log

YOUNG = 120.0  # seconds in which the kubelet may not have noted an allocation yet

Key = tuple[str, str]
"""A resource and a device id of it."""

_NOTHING: Mapping[str, Allocation] = {}


class _LedgerEntry(NamedTuple):
    """An allocation, as the file has it, and when it was made by this process' own clock."""

    allocation: Allocation
    encoded: bytes
    made: float  # time.monotonic(): the time of day may be set, above all after a boot


class Ledger:
    """The allocations of this node. Any thread may use it.

    Raises checkpoint.Unreadable if what was handed out cannot be read now: try again.
    """

    def __init__(self, paths: Paths, boot_id: str, warn: Callable[[str], object]) -> None:
        self._paths = paths
        self._boot_id = boot_id
        self._offered: dict[str, tuple[str, ...]] = {}  # by resource the pool's HCAs
        self._written: dict[str, tuple[str, ...]] = {}  # as the file has them
        self.granting = threading.Lock()  # from the look at who holds what until it is noted
        self.appended = threading.Event()  # the log has lines that are to be brought to disk
        self._lock = threading.Lock()
        self._begun = False  # the file is of this process
        self._log: Log | None = None  # without it the checkpoint is written whole next
        try:
            kept = checkpoint.read(paths).allocations
        except CheckpointUnreadable:
            raise  # to set a sound file aside would forget who holds what
        except CheckpointDamaged as damage:
            warn(f"{damage} (it is set aside, and the kubelet is asked)")
            _set_aside(paths)
            kept = ()
        now, today = time.monotonic(), datetime.now(UTC)
        self._entries: dict[Key, _LedgerEntry] = {
            one.key: _LedgerEntry(one, msgspec.json.encode(one), now - _age(one, boot_id, today))
            for one in kept
        }

    def serve(self, offered: Mapping[str, Sequence[str]]) -> None:
        """Note which resources are this plugin's, and the ids of each pool's HCAs.

        Raises OSError; `settle` tries again then.
        """
        with self._lock:
            self._offered = {name: tuple(hcas) for name, hcas in sorted(offered.items())}
            if self._offered != self._written:
                self._replace(self._entries)

    def allocations(self) -> list[Allocation]:
        """All of them, in the order of their first grant."""
        with self._lock:
            return [one.allocation for one in self._entries.values()]

    def keys(self) -> frozenset[Key]:
        """The (resource, id) of all of them."""
        with self._lock:
            return frozenset(self._entries)

    def held(self, resource: str) -> dict[str, Allocation]:
        """The allocations of one resource, by device id."""
        return {one.id: one for one in self.allocations() if one.resource == resource}

    def loads(self, free: Collection[Key] = ()) -> Counter[str]:
        """How many allocations each HCA has, over all resources.

        Those of `free` do not count: the kubelet says that they ended.
        """
        return Counter(
            device.id for one in self.allocations() if one.key not in free for device in one.devices
        )

    @property
    def boot_id(self) -> str:
        """Of this boot: it is in every entry that is made now."""
        return self._boot_id

    def grant(self, resource: str, devices: Mapping[str, tuple[AllocatedHCA, ...]]) -> None:
        """Note an Allocate, before it is answered; `sync` is to follow. Raises OSError."""
        with self._lock:
            self._put(self._made(resource, devices))

    def adopt(
        self,
        resource: str,
        devices: Mapping[str, tuple[AllocatedHCA, ...]],
        moot: Mapping[str, Allocation] = _NOTHING,
    ) -> None:
        """Note what only the kubelet knew of, by device id. Raises OSError.

        In place of an entry only if that is the one that is `moot`: what was noted meanwhile stays.
        """
        with self._lock:
            self._put(
                one
                for one in self._made(resource, devices, adopted=True)
                if one.key not in self._entries
                or self._entries[one.key].allocation is moot.get(one.id)
            )

    def sync(self) -> None:
        """Bring what was granted to disk, by the log or else whole. Raises OSError.

        Grants do not wait for it.
        """
        self.appended.clear()  # before, so that what comes meanwhile is told again
        with self._lock:
            log = self._log
            if log is None and self._begun:  # what could not be written whole, or not made durable
                self._replace(self._entries)
        if log is None:
            return
        try:
            log.sync()
        except OSError:
            with self._lock:
                if self._log is log:  # else it was written whole meanwhile, which removes the log
                    self._log = None
                    self._replace(self._entries)

    def drop_unknown(self, known: Collection[Key], age: float = YOUNG) -> list[Key]:
        """Drop what the kubelet does not know and is older than `age` seconds; what that was."""
        now = time.monotonic()
        with self._lock:
            gone = [
                key
                for key, one in self._entries.items()
                if key not in known and now - one.made > age
            ]
            if gone:
                self._replace({key: one for key, one in self._entries.items() if key not in gone})
        return gone

    def settle(self) -> None:
        """Write the checkpoint whole, if it has a log with lines, is gone, or could not be written.

        Raises OSError.
        """
        with self._lock:
            failed = self._offered != self._written or (self._begun and self._log is None)
            logged = self._log is not None and self._log.used
            if failed or logged or (self._begun and not self._paths.checkpoint.exists()):
                self._replace(self._entries)

    def _made(
        self,
        resource: str,
        devices: Mapping[str, tuple[AllocatedHCA, ...]],
        *,
        adopted: bool = False,
    ) -> Iterator[Allocation]:
        now = _now()
        for known, given in devices.items():
            yield Allocation(
                resource=resource,
                id=known,
                devices=given,
                time=now,
                boot_id=self._boot_id,
                adopted=adopted,
            )

    def _put(self, allocations: Iterable[Allocation]) -> None:
        made = time.monotonic()
        new = {one.key: _LedgerEntry(one, msgspec.json.encode(one), made) for one in allocations}
        if not new:
            return
        if self._append([one.encoded for one in new.values()]):
            self._entries.update(new)
            self.appended.set()
        else:
            self._replace(self._entries | new)

    def _append(self, lines: Collection[bytes]) -> bool:
        """Whether the log took them. One that failed, or that no file names, takes no more."""
        try:
            named = self._paths.checkpoint.exists()
            return named and self._log is not None and self._log.append(lines)
        except OSError:
            self._log = None
            return False

    def _replace(self, entries: dict[Key, _LedgerEntry]) -> None:
        """Nothing is known here that could not be written down."""
        directory = self._paths.checkpoint.parent
        log = Log.create(directory)
        try:
            whole = [msgspec.Raw(one.encoded) for one in entries.values()]
            checkpoint.write(self._paths, list(self._offered), whole, log.path.name, self._offered)
        except BaseException:
            log.path.unlink()
            raise
        self._begun, self._entries, self._written = True, entries, self._offered
        self._log = None  # as long as a power cut may bring back the file that names another one
        files.sync_directory(directory)
        self._log = log
        with suppress(OSError):  # the next one removes it
            checkpoint_log.remove_others(directory, log.path)  # not before: it may still be named


def _set_aside(paths: Paths) -> None:
    paths.checkpoint.replace(paths.checkpoint.with_suffix(".damaged"))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _age(one: Allocation, boot_id: str, now: datetime) -> float:
    """Seconds since it was made; none if that is yet to come, for a clock was set meanwhile.

    Without end if its time is none, or of another boot: the kubelet has had its time then.
    """
    try:
        seconds = (now - datetime.fromisoformat(one.time)).total_seconds()
    except (ValueError, TypeError):
        return math.inf
    return max(seconds, 0.0) if one.boot_id == boot_id else math.inf
