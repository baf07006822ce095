"""The groups of this node: processes that share a part of a GPU, and the files that tell them.

A group is the processes of one container. Its directory has

    limits       mounted read-only as /run/podfabric/gpu/limits
    region       mounted read-write as /run/podfabric/gpu/region
    agent/       mounted read-only as /run/podfabric/gpu/agent; the agent's socket is there

below a directory that only root can enter, on a tmpfs. The two mounted files are made whole, and
later only written in place: a mount stays with the file that it began with. The region has a file
system of its own (`region_tmpfs`), since the tenant can write to it.
"""

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from base import files, locks
from gpu.limit_settings import CONTEXT_RESERVE
from gpu.limits import limits_file, region
from gpu.limits.limits_file import (
    GpuEntry,
    GroupError,
    Limit,
    LimitsFile,
    LimitsInvalid,
    LimitsLeased,
    Registered,
    bytes_of,
    limit_of,
)
from gpu.limits.region import Region, RegionInvalid
from gpu.limits.region_tmpfs import TmpfsRooms

_LOCK = ".lock"
_PATIENCE = 10.0  # seconds; a change takes less than a millisecond


class GroupFiles(msgspec.Struct, frozen=True, kw_only=True):
    """What the files of a group say now."""

    limit: Limit
    in_force: GpuEntry  # the same, with what the agent settled
    processes: Mapping[int, Registered]  # by slot
    allocation: bytes  # 16 bytes, which `region` has, too
    sequence: int  # of `limits`, when it was read


class Groups:
    """All groups of the node. Any thread may use it, and any process of the node's.

    Methods raise GroupError and OSError. `made` is called with a group's name before `make`
    returns, from the caller's thread; `removed` after its files have gone.
    """

    def __init__(
        self,
        root: Path,
        *,
        rooms: TmpfsRooms | None = None,
    ) -> None:
        self.root = root
        self._rooms = rooms or TmpfsRooms()
        self.made: Callable[[str], object] = lambda group: None
        self.removed: Callable[[str], object] = lambda group: None
        lock = root / _LOCK
        self._lock = locks.locked(
            lock, "the limits of GPUs", _PATIENCE, keep=True, pause=0.001, stay_open=True
        )
        self._thread_lock = threading.RLock()  # of the following
        self._known: dict[str, GroupFiles] = {}
        self._opened: dict[str, LimitsFile] = {}  # by group; open, so that no tenant gets a lease
        self._opening: set[str] = set()

    def make(self, group: str, limit: Limit) -> Path:
        """The directory of a group with this limit, before its container is created or started.

        Called again it does the same: the files of a group of the same GPU stay, with what its
        processes have allocated, and get this limit. Others are replaced, unless a process uses
        them.
        """
        limits_file.check_limit(group, limit)
        directory = self.root / group
        with self._exclusive():
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            sockets = directory / "agent"
            sockets.mkdir(exist_ok=True)
            sockets.chmod(0o755)  # whatever the umask: the container's user looks the socket up
            if not self._keep(group, limit):
                self._replace(group, limit)
                self._open(group)
        self.made(group)
        return directory

    def remove(self, group: str) -> None:
        """Remove the files of a group whose containers are gone, if there are any."""
        limits_file.check_name(group)
        directory = self.root / group
        with self._exclusive():
            # Without `limits` it is none of the groups; a kill leaves the rest to the next call.
            for name in ("limits", "agent/agent.sock", "agent/.new"):
                with suppress(FileNotFoundError, NotADirectoryError):
                    files.remove(directory / name, durable=False)
            self._rooms.remove(directory / "region")
            for empty in (directory / "agent", directory):
                with suppress(FileNotFoundError):
                    empty.rmdir()
            self._forget(group)
        self.removed(group)

    def obstacle(self) -> str | None:
        """Why no group can be made on this node; None if one can."""
        with self._thread_lock:
            return self._rooms.obstacle(self.root)

    def names(self) -> list[str]:
        """The groups that are made, sorted."""
        with suppress(FileNotFoundError):
            root = str(self.root)  # paths cost more, each half second
            found = os.listdir(root)  # noqa: PTH208
            return sorted(name for name in found if os.path.exists(f"{root}/{name}/limits"))  # noqa: PTH110
        return []

    def read(self, group: str) -> GroupFiles:
        """What the files of a group say now."""
        with self._thread_lock:
            opened = self._open(group)
            sequence, known = opened.header().sequence, self._known.get(group)
            if known is not None and sequence == known.sequence:
                return known
            in_force = opened.gpu()
            read = GroupFiles(
                limit=limit_of(in_force),
                in_force=in_force,
                processes=opened.processes(),
                allocation=bytes(opened.header().allocation),
                sequence=sequence,
            )
            if sequence % 2 == 0 and opened.header().sequence == sequence:
                self._known[group] = read
            return read

    def region(self, group: str, of: GroupFiles) -> Region:
        """The open region of a group that was read. Raises RegionInvalid."""
        return Region(f"{self.root}/{group}/region", of.allocation)

    def set_compute(self, group: str, kappa: float, settled: float) -> None:
        """Correct what launches pay for: the factor of their costs, and GPU time owed beside them.

        `settled` is in seconds; negative: less is owed.
        """
        with self._exclusive():
            opened, owed = self._open(group), round(settled * 1e9)
            opened.write(msgspec.structs.replace(opened.gpu(), kappa=kappa, settled_ns=owed))

    def settle(self, group: str) -> None:
        """Write the limit again: finish a killed agent's change."""
        with self._exclusive():
            opened = self._open(group)
            self._write(opened, limit_of(opened.gpu()))

    def register(self, group: str, slot: int, host_pid: int, start_time: int) -> Registered:
        """Enter a living process in a slot, under a new registration."""
        with self._exclusive():
            opened = self._open(group)
            former = opened.process(slot)
            registered = Registered(
                registration=former.registration + 1 if former else 1,
                host_pid=host_pid,
                start_time=start_time,
                alive=True,
            )
            opened.write(processes={slot: registered})
            return registered

    def bury(self, group: str, slots: Mapping[int, int]) -> None:
        """Say that processes are dead. `slots` has their registrations: a later one stays."""
        with self._exclusive():
            opened = self._open(group)
            known = ((slot, opened.process(slot), of) for slot, of in slots.items())
            dead = {
                slot: msgspec.structs.replace(process, alive=False, overhead_bytes=None)
                for slot, process, registration in known
                if process is not None and process.alive and process.registration == registration
            }
            if dead:
                opened.write(processes=dead)

    def measured(self, group: str, overheads: Mapping[int, Registered]) -> None:
        """Enter what contexts were measured to need: processes as they were read, but for that."""
        with self._exclusive():
            opened = self._open(group)
            known = ((slot, opened.process(slot), of) for slot, of in overheads.items())
            changed = {
                slot: msgspec.structs.replace(process, overhead_bytes=of.overhead_bytes)
                for slot, process, of in known
                if process is not None
                and process.alive
                and process.registration == of.registration
                and process.overhead_bytes != of.overhead_bytes
            }
            if changed:
                opened.write(processes=changed)

    def _keep(self, group: str, limit: Limit) -> bool:
        """Whether the files that are there can stay; they have the limit then."""
        try:
            opened = self._open(group)
        except GroupError:
            if group in self._opening:  # a lease, which ends
                raise
            return False
        try:
            Region(self.root / group / "region", bytes(opened.header().allocation)).close()
            whole = True
        except RegionInvalid:
            whole = False
        if whole and opened.gpu().uuid == bytes_of(limit.uuid):
            self._write(opened, limit)
            return True
        alive = [each.host_pid for each in opened.processes().values() if each.alive]
        if alive:
            raise GroupError(
                f"group {group}: processes {alive} still use its files, which are of another GPU "
                "or damaged: end them first"
            )
        return False

    def _replace(self, group: str, limit: Limit) -> None:
        directory = self.root / group
        allocation = os.urandom(16)
        content = limits_file.content_of(self._entry(limit), allocation)
        # Last `limits`, by which the group is one: a kill before that leaves none.
        files.remove(directory / "limits", durable=False)
        self._forget(group)
        self._rooms.put(directory / "region", region.content_of(allocation))
        files.write_atomically(directory / "limits", content, 0o644, durable=False)

    def _write(self, opened: LimitsFile, limit: Limit) -> None:
        former = opened.gpu()
        opened.write(
            msgspec.structs.replace(
                self._entry(limit), kappa=former.kappa, settled_ns=former.settled_ns
            )
        )

    def _entry(self, limit: Limit) -> GpuEntry:
        return GpuEntry(
            uuid=bytes_of(limit.uuid),
            memory_bytes=limit.memory_bytes,
            context_bytes=CONTEXT_RESERVE,
            share=limit.compute_share,
        )

    def _open(self, group: str) -> LimitsFile:
        """`limits` of a group, which stays open. Under a lock."""
        path = f"{self.root}/{group}/limits"  # an object costs more
        opened = self._opened.get(group)
        if opened is not None and opened.is_at(path):
            return opened
        self._forget(group)
        try:
            self._opened[group] = LimitsFile(path)
        except LimitsInvalid as error:
            if isinstance(error, LimitsLeased) and group not in self._opening:
                self._opening.add(group)
                threading.Thread(target=self._outlast, args=(group, path), daemon=True).start()
            raise GroupError(f"group {group}: {error}") from None
        return self._opened[group]

    def _outlast(self, group: str, path: str) -> None:
        """Open `limits` of which a tenant took a lease while no agent had it open."""
        try:
            opened = LimitsFile(path, waits=True)
        except LimitsInvalid:  # it is removed
            opened = None
        with self._thread_lock:
            self._opening.discard(group)
            if opened is not None:
                self._forget(group)
                self._opened[group] = opened

    def _forget(self, group: str) -> None:
        self._known.pop(group, None)
        opened = self._opened.pop(group, None)
        if opened is not None:
            opened.close()

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """One writer on this node: an agent that stops, and the next one, write for a while."""
        with self._thread_lock:
            try:
                self._lock.acquire()
            except locks.Busy as busy:
                raise GroupError(str(busy)) from None
            try:
                yield
            finally:
                self._lock.release()
