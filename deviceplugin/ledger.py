"""Who holds what: the checkpoint in memory and on disk, with its log, which are one.

What the kubelet tells is compared with it now and then. An allocation that the kubelet does not
know is dropped, once it is old enough for the kubelet to have noted it; one that only the kubelet
knows is taken over.
"""

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime

import msgspec

from deviceplugin import checkpoint, checkpoint_log
from deviceplugin.checkpoint import Allocation, Damaged, Device
from deviceplugin.checkpoint_log import Log
from host import files
from host.paths import Paths

YOUNG = 120.0  # seconds in which the kubelet may not have noted an allocation yet

Key = tuple[str, str]
"""A resource and a device id of it."""


class Ledger:
    """The allocations of this node. Any thread may use it."""

    def __init__(self, paths: Paths, boot_id: str, warn: Callable[[str], object]) -> None:
        self._paths = paths
        self._boot_id = boot_id
        self._resources: tuple[str, ...] = ()
        self._lock = threading.Lock()
        self._log: Log | None = None  # with the first change the checkpoint is written whole
        try:
            kept = checkpoint.read(paths).allocations
        except Damaged as damage:
            warn(f"{damage} (it is set aside, and the kubelet is asked)")
            _set_aside(paths)
            kept = ()
        self._allocations: dict[Key, Allocation] = {one.key: one for one in kept}
        self._encoded = {one.key: msgspec.json.encode(one) for one in kept}

    def serve(self, resources: Sequence[str]) -> None:
        """Note which resources are this plugin's. Raises OSError."""
        with self._lock:
            if tuple(resources) != self._resources:
                before, self._resources = self._resources, tuple(resources)
                try:
                    self._replace(self._allocations, self._encoded)
                except OSError:
                    self._resources = before
                    raise

    def allocations(self) -> list[Allocation]:
        """All of them, in the order of their first grant."""
        with self._lock:
            return list(self._allocations.values())

    def keys(self) -> frozenset[Key]:
        """The (resource, id) of all of them."""
        with self._lock:
            return frozenset(self._allocations)

    def held(self, resource: str) -> dict[str, Allocation]:
        """The allocations of one resource, by device id."""
        with self._lock:
            return {known: one for (of, known), one in self._allocations.items() if of == resource}

    def loads(self, free: Collection[Key] = ()) -> Counter[str]:
        """How many allocations each adapter has, over all resources.

        Those of `free` do not count: the kubelet says that they ended.
        """
        with self._lock:
            return Counter(
                device.id
                for key, one in self._allocations.items()
                if key not in free
                for device in one.devices
            )

    def grant(
        self, resource: str, devices: Mapping[str, tuple[Device, ...]], *, adopted: bool = False
    ) -> None:
        """Note an Allocate, before it is answered; it is on disk when this returns.

        Or what was `adopted`: an allocation that only the kubelet knew of. Raises OSError.
        """
        now = _now()
        self._put(
            Allocation(
                resource=resource,
                id=known,
                devices=given,
                time=now,
                boot_id=self._boot_id,
                adopted=adopted,
            )
            for known, given in devices.items()
        )

    def drop_unknown(self, known: Collection[Key], age: float = YOUNG) -> list[Key]:
        """Drop what the kubelet does not know and is older than `age` seconds; what that was."""
        now = datetime.now(UTC)
        with self._lock:
            gone = [
                key
                for key, one in self._allocations.items()
                if key not in known and _age(one.time, now) > age
            ]
            if gone:
                kept = {key: one for key, one in self._allocations.items() if key not in gone}
                self._replace(kept, {key: self._encoded[key] for key in kept})
        return gone

    def settle(self) -> None:
        """Write the checkpoint whole, if its log has lines or the file is gone. Raises OSError."""
        with self._lock:
            if self._log is not None and (self._log.used or not self._paths.checkpoint.exists()):
                self._replace(self._allocations, self._encoded)

    def _put(self, allocations: Iterable[Allocation]) -> None:
        with self._lock:
            new = {one.key: one for one in allocations}
            encoded = {key: msgspec.json.encode(one) for key, one in new.items()}
            if self._append(encoded.values()):
                self._allocations.update(new)
                self._encoded.update(encoded)
            else:
                self._replace(self._allocations | new, self._encoded | encoded)

    def _append(self, lines: Collection[bytes]) -> bool:
        """Whether the log took them. One that failed takes no more."""
        try:
            return self._log is not None and self._log.append(lines)
        except OSError:
            self._log = None
            return False

    def _replace(self, allocations: dict[Key, Allocation], encoded: dict[Key, bytes]) -> None:
        """Nothing is known here that could not be written down."""
        directory = self._paths.checkpoint.parent
        log = Log.create(directory)
        try:
            whole = [msgspec.Raw(one) for one in encoded.values()]
            checkpoint.write(self._paths, self._resources, whole, log.path.name)
        except BaseException:
            log.path.unlink()
            raise
        self._log, self._allocations, self._encoded = log, allocations, encoded
        files.sync_directory(directory)
        checkpoint_log.remove_others(directory, log.path)  # not before: it may still be named


def _set_aside(paths: Paths) -> None:
    paths.checkpoint.replace(paths.checkpoint.with_suffix(".damaged"))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _age(time: str, now: datetime) -> float:
    """Seconds since `time`, without end if it is no time."""
    try:
        return (now - datetime.fromisoformat(time)).total_seconds()
    except (ValueError, TypeError):
        return float("inf")
