"""The groups of this node and their files. A group is the processes of one container.

The container of a group sees these parts of the group's directory in /run/podfabric/gpu:

    limits   read-only
    region   read-write, on a separate file system (`region_tmpfs`)
    agent/   read-only, has the agent's socket

`limits` and `region` are only written in place, because a mount keeps showing the mounted file.
Only root can enter the directories of groups.
"""

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from base import files, locks
from gpu.limits import limits_file, region
from gpu.limits.limits_file import GroupError, Limit, LimitsFile, LimitsInvalid, Registered
from gpu.limits.region import Region, RegionInvalid
from gpu.limits.region_tmpfs import RegionTmpfs

_LOCK = ".lock"
_PATIENCE = 10.0  # seconds; a change takes less than a millisecond


class GroupFiles(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a group's files."""

    limit: Limit
    processes: Mapping[int, Registered]  # by slot
    allocation: bytes  # 16 bytes, the same as in `region`
    sequence: int  # of `limits`, when it was read


class Groups:
    """All groups of the node. Any thread and process may use them.

    Methods raise GroupError and OSError.
    """

    def __init__(self, root: Path, *, regions: RegionTmpfs | None = None) -> None:
        self.root = root
        self._regions = regions or RegionTmpfs()
        self.made: Callable[[str], object] = lambda group: None
        self.removed: Callable[[str], object] = lambda group: None
        lock = root / _LOCK
        self._lock = locks.locked(
            lock, "the limits of GPUs", _PATIENCE, keep=True, pause=0.001, stay_open=True
        )
        self._thread_lock = threading.RLock()  # guards the fields below
        self._known: dict[str, GroupFiles] = {}
        self._opened: dict[str, LimitsFile] = {}  # by group; an open file stops leases
        self._opening: set[str] = set()  # groups whose file a tenant has leased

    def make(self, group: str, limit: Limit) -> Path:
        """Make or change a group before its container starts. Returns the group's directory.

        Undamaged files for the same GPU stay and get the new limit. Other files are replaced.
        Raises GroupError if a living process uses files that must be replaced.
        """
        limits_file.check_limit(group, limit)
        directory = self.root / group
        with self._exclusive():
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            sockets = directory / "agent"
            sockets.mkdir(exist_ok=True)
            sockets.chmod(0o755)  # despite the umask: any user of the container may use it
            if not self._keep(group, limit):
                self._replace(group, limit)
                self._open(group)
        self.made(group)
        return directory

    def remove(self, group: str) -> None:
        """Remove the files of a group that no container uses."""
        limits_file.check_name(group)
        directory = self.root / group
        with self._exclusive():
            # `limits` first: a directory without `limits` is not a group, even after a kill.
            for name in ("limits", "agent/agent.sock", "agent/.new"):
                with suppress(FileNotFoundError, NotADirectoryError):
                    files.remove(directory / name, durable=False)
            self._regions.remove(directory / "region")
            for empty in (directory / "agent", directory):
                with suppress(FileNotFoundError):
                    empty.rmdir()
            self._forget(group)
        self.removed(group)

    def obstacle(self) -> str | None:
        """The reason why no group can be made on this node; `None` if there is none."""
        with self._thread_lock:
            return self._regions.obstacle(self.root)

    def names(self) -> list[str]:
        with suppress(FileNotFoundError):
            root = str(self.root)  # a Path costs more, and this runs each half second
            found = os.listdir(root)  # noqa: PTH208
            return sorted(name for name in found if os.path.exists(f"{root}/{name}/limits"))  # noqa: PTH110
        return []

    def read(self, group: str) -> GroupFiles:
        with self._thread_lock:
            opened = self._open(group)
            sequence, known = opened.header().sequence, self._known.get(group)
            if known is not None and sequence == known.sequence:
                return known
            read = GroupFiles(
                limit=opened.limit(),
                processes=opened.processes(),
                allocation=bytes(opened.header().allocation),
                sequence=sequence,
            )
            if sequence % 2 == 0 and opened.header().sequence == sequence:
                self._known[group] = read
            return read

    def region(self, group: str, of: GroupFiles) -> Region:
        """Open the region of a group. Raises RegionInvalid."""
        return Region(f"{self.root}/{group}/region", of.allocation)

    def set_compute(self, group: str, kappa: float, settled: float) -> None:
        """Set two fields of the group's Limit. `settled` is in seconds."""
        with self._exclusive():
            opened, settled_ns = self._open(group), round(settled * 1e9)
            opened.write(
                msgspec.structs.replace(opened.limit(), kappa=kappa, settled_ns=settled_ns)
            )

    def settle(self, group: str) -> None:
        """Complete a change that a killed agent began."""
        with self._exclusive():
            opened = self._open(group)
            limit = opened.limit()
            self._write(opened, Limit(limit.uuid, limit.memory_bytes, limit.compute_share))

    def register(self, group: str, slot: int, host_pid: int, start_time: int) -> Registered:
        """Record a living process in a slot, with a new registration number."""
        with self._exclusive():
            opened = self._open(group)
            previous = opened.process(slot)
            registered = Registered(
                registration=previous.registration + 1 if previous else 1,
                host_pid=host_pid,
                start_time=start_time,
                alive=True,
            )
            opened.write(processes={slot: registered})
            return registered

    def mark_dead(self, group: str, registrations: Mapping[int, int]) -> None:
        """Mark processes dead, by slot. A newer process in the slot stays alive."""
        self._change(
            group,
            registrations,
            lambda _, process: msgspec.structs.replace(process, alive=False, overhead_bytes=None),
        )

    def set_overheads(self, group: str, overheads: Mapping[int, Registered]) -> None:
        """Record the measured overheads of living processes, by slot."""
        self._change(
            group,
            {slot: measured.registration for slot, measured in overheads.items()},
            lambda slot, process: msgspec.structs.replace(
                process, overhead_bytes=overheads[slot].overhead_bytes
            ),
        )

    def _change(
        self,
        group: str,
        registrations: Mapping[int, int],
        change: Callable[[int, Registered], Registered],
    ) -> None:
        """Change the entries of living processes with these registrations, by slot."""
        with self._exclusive():
            opened = self._open(group)
            changed = {
                slot: change(slot, process)
                for slot, registration in registrations.items()
                if (process := opened.process(slot)) is not None
                and process.alive
                and process.registration == registration
            }
            if changed:
                opened.write(processes=changed)

    def _keep(self, group: str, limit: Limit) -> bool:
        """Set the limit in the present files. Returns False if the files must be replaced."""
        try:
            opened = self._open(group)
        except GroupError:
            if group in self._opening:  # a tenant's lease delays the opening
                raise
            return False
        try:
            Region(self.root / group / "region", bytes(opened.header().allocation)).close()
            whole = True
        except RegionInvalid:
            whole = False
        if whole and limits_file.bytes_of(opened.limit().uuid) == limits_file.bytes_of(limit.uuid):
            self._write(opened, limit)
            return True
        alive = [process.host_pid for process in opened.processes().values() if process.alive]
        if alive:
            raise GroupError(
                f"group {group}: its files are damaged or for another GPU, but processes {alive} "
                "use them: end these processes first"
            )
        return False

    def _replace(self, group: str, limit: Limit) -> None:
        directory = self.root / group
        allocation = os.urandom(16)
        content = limits_file.content_of(limit, allocation)
        # Write `limits` last: a kill before the write leaves no group.
        files.remove(directory / "limits", durable=False)
        self._forget(group)
        self._regions.put(directory / "region", region.content_of(allocation))
        files.write_atomically(directory / "limits", content, 0o644, durable=False)

    def _write(self, opened: LimitsFile, limit: Limit) -> None:
        """Set the limit without a change of `kappa` and `settled_ns`."""
        before = opened.limit()
        opened.write(
            msgspec.structs.replace(limit, kappa=before.kappa, settled_ns=before.settled_ns)
        )

    def _open(self, group: str) -> LimitsFile:
        """The open file `limits` of a group. The caller holds `_thread_lock`."""
        path = f"{self.root}/{group}/limits"  # a Path costs more
        opened = self._opened.get(group)
        if opened is not None and opened.is_at(path):
            return opened
        self._forget(group)
        try:
            self._opened[group] = LimitsFile(path)
        except LimitsInvalid as error:
            if isinstance(error, limits_file.LimitsLeased) and group not in self._opening:
                self._opening.add(group)
                threading.Thread(target=self._outlast, args=(group, path), daemon=True).start()
            raise GroupError(f"group {group}: {error}") from None
        return self._opened[group]

    def _outlast(self, group: str, path: str) -> None:
        """Wait for the end of a tenant's lease of `limits`, and open the file."""
        try:
            opened = LimitsFile(path, waits=True)
        except LimitsInvalid:  # the file was removed
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
        """Admit one writer on this node. An old and a new agent may both run during an update."""
        with self._thread_lock:
            try:
                self._lock.acquire()
            except locks.Busy as busy:
                raise GroupError(str(busy)) from None
            try:
                yield
            finally:
                self._lock.release()
