"""The groups of this node: processes that share a part of a GPU, and the files that tell them.

A group is the processes of one container. Its directory has

    limits       mounted read-only as /run/podfabric/gpu/limits
    region       mounted read-write as /run/podfabric/gpu/region
    agent/       mounted read-only as /run/podfabric/gpu/agent; the agent's socket is there

below a directory that only root can enter, on a tmpfs. The two mounted files are made whole, and
later only written in place: a mount stays with the file that it began with. The region has a file
system of its own (`rooms`), since the tenant can write to it.
"""

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from base import files, locks
from gpu import group_limits, layout, limits_file, region
from gpu.group_limits import GroupError, Limit, bytes_of, limit_of
from gpu.limits_file import (
    GpuEntry,
    LimitsFile,
    LimitsInvalid,
    LimitsLeased,
    Outlasting,
    Registered,
)
from gpu.region import Region, RegionInvalid
from gpu.rooms import RegionRooms, TmpfsRooms
from gpu.settings import CONTEXT_RESERVE

_LOCK = ".lock"
_PATIENCE = 10.0  # seconds; a change takes less than a millisecond


class GroupLeased(GroupError):
    """The tenant keeps the group's limits from being opened for a while."""


@dataclass(frozen=True)
class Compute:
    """How what launches pay for is corrected."""

    kappa: float  # the factor of estimated costs
    settled: float  # seconds of GPU time owed beside what launches paid for; negative: less


class GroupFiles(msgspec.Struct, frozen=True, kw_only=True):
    """What the files of a group say now."""

    limit: Limit  # as the device plugin set it
    in_force: GpuEntry
    processes: Mapping[int, Registered]  # by slot
    allocation: bytes  # 16 bytes, which `region` has, too


class Groups:
    """All groups of the node. Any thread may use it, and any process of the node's.

    Methods raise GroupError and OSError. `made` is called with a group's name before `make`
    returns, from the caller's thread; `removed` after its files have gone.
    """

    def __init__(
        self,
        root: Path,
        *,
        context_reserve: int = CONTEXT_RESERVE,
        rooms: RegionRooms | None = None,
    ) -> None:
        self.root = root
        self._rooms = rooms or TmpfsRooms()
        self.made: Callable[[str], object] = lambda group: None
        self.removed: Callable[[str], object] = lambda group: None
        self._context_reserve = context_reserve
        self._thread_lock = threading.Lock()
        self._known: dict[str, tuple[bytes, GroupFiles]] = {}  # with the state of `limits`
        self._outlasting: dict[str, Outlasting] = {}  # leases of `limits`, by group

    def make(self, group: str, limit: Limit) -> Path:
        """The directory of a group with this limit, before its container is created or started.

        Called again it does the same: the files of a group of the same GPU stay, with what its
        processes have allocated, and get this limit. Others are replaced, unless a process uses
        them.
        """
        group_limits.check(group, limit, self._context_reserve)
        directory = self.root / group
        with self._exclusive():
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            sockets = directory / "agent"
            sockets.mkdir(exist_ok=True)
            sockets.chmod(0o755)  # whatever the umask: the container's user looks the socket up
            if not self._keep(group, limit):
                self._replace(group, limit)
        self.made(group)
        return directory

    def change(self, group: str, limit: Limit) -> None:
        """Change the limit of a group while its processes run. They see it at once."""
        group_limits.check(group, limit, self._context_reserve)
        with self._exclusive(), self._open(group) as opened:
            if opened.gpu().uuid != bytes_of(limit.uuid):
                raise GroupError(
                    f"group {group}: its GPU cannot change while it lives: remove it, and make it "
                    "again for a new container"
                )
            self._write(opened, limit)

    def remove(self, group: str) -> None:
        """Remove the files of a group whose containers are gone, if there are any."""
        group_limits.check_name(group)
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
            self._known.pop(group, None)
            self._end_outlasting(group)
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
        """What the files of a group say now.

        While the tenant keeps `limits` from being opened, what was read last counts: so it cannot
        hide what it uses.
        """
        try:
            with self._open(group) as opened:
                state, known = self._known.get(group, (b"", None))
                if known is not None and state == opened.state:
                    return known
                in_force = opened.gpu()
                read = GroupFiles(
                    limit=limit_of(in_force),
                    in_force=in_force,
                    processes=opened.processes(),
                    allocation=bytes(opened.header.allocation),
                )
                if not opened.is_changing():
                    self._known[group] = opened.state, read
                return read
        except GroupLeased:
            if group not in self._known:
                raise
            return msgspec.structs.replace(self._known[group][1], processes={}, allocation=b"")

    def region(self, group: str, of: GroupFiles) -> Region:
        """The open region of a group that was read. Raises RegionInvalid."""
        return Region(f"{self.root}/{group}/region", of.allocation)

    def set_compute(self, group: str, compute: Compute) -> None:
        """Correct what launches pay for; the share stays as it is."""
        with self._exclusive(), self._open(group) as opened:
            settled = round(compute.settled * 1e9)
            entry = opened.gpu()
            opened.write(msgspec.structs.replace(entry, kappa=compute.kappa, settled_ns=settled))

    def settle(self, group: str) -> None:
        """Write the limit again: finish a killed agent's change."""
        with self._exclusive(), self._open(group) as opened:
            self._write(opened, limit_of(opened.gpu()))

    def register(self, group: str, slot: int, host_pid: int, start_time: int) -> Registered:
        """Enter a living process in a slot, under a new registration."""
        return self.register_all(group, {slot: (host_pid, start_time)})[slot]

    def register_all(
        self, group: str, processes: Mapping[int, tuple[int, int]]
    ) -> dict[int, Registered]:
        """Enter living processes in slots, under new registrations, with one change of the file.

        `processes` has the pid on the host and the start time of each, by slot.
        """
        with self._exclusive(), self._open(group) as opened:
            registered: dict[int, Registered] = {}
            for slot, (host_pid, start_time) in processes.items():
                registered[slot] = Registered(
                    registration=opened.registration(slot) + 1,
                    host_pid=host_pid,
                    start_time=start_time,
                    alive=True,
                )
            opened.write(processes=registered)
            return registered

    def bury(self, group: str, slots: Mapping[int, int]) -> None:
        """Say that processes are dead. `slots` has their registrations: a later one stays."""
        with self._exclusive(), self._open(group) as opened:
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
        with self._exclusive(), self._open(group) as opened:
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
            with self._open(group) as opened:
                allocation = bytes(opened.header.allocation)
                alive = [each.host_pid for each in opened.processes().values() if each.alive]
                try:
                    Region(self.root / group / "region", allocation).close()
                    whole = True
                except RegionInvalid:
                    whole = False
                if whole and opened.gpu().uuid == bytes_of(limit.uuid):
                    self._write(opened, limit)
                    return True
        except GroupLeased:
            raise
        except GroupError:
            return False
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
        self._end_outlasting(group)
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
            memory_bytes=min(limit.memory_bytes, layout.NO_LIMIT),
            context_bytes=self._context_reserve,
            share=limit.compute_share,
        )

    def _end_outlasting(self, group: str) -> None:
        outlasting = self._outlasting.pop(group, None)
        if outlasting is not None:
            outlasting.close()

    @contextmanager
    def _open(self, group: str) -> Iterator[LimitsFile]:
        path = f"{self.root}/{group}/limits"  # an object costs more
        try:
            opened = LimitsFile(path)
        except LimitsLeased as error:
            begun = self._outlasting.get(group)
            if begun is None or begun.failed:
                self._outlasting[group] = Outlasting(path)
            raise GroupLeased(f"group {group}: {error}") from None
        except LimitsInvalid as error:
            raise GroupError(f"group {group}: {error}") from None
        with opened:
            yield opened

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """One writer on this node: an agent that stops, and the next one, write for a while."""
        with self._thread_lock:
            lock = locks.locked(
                self.root / _LOCK, "the limits of GPUs", _PATIENCE, keep=True, pause=0.001
            )
            try:
                lock.acquire()
            except locks.Busy as busy:
                raise GroupError(str(busy)) from None
            try:
                yield
            finally:
                lock.release()
