"""The registered processes of all groups that have not ended: a pidfd of each tells its end."""

import os
import select
import threading
import time
from collections.abc import Iterable

from gpu.limits import processes

REMEMBERED = 3.0  # seconds after its end: the driver tells of its use later


class LivingProcess:
    """A process that is registered, until it ends."""

    def __init__(self, pidfd: int, pid: int, start_time: int) -> None:
        self.pidfd = pidfd
        self.pid = pid
        self.start_time = start_time
        self.slots: dict[tuple[str, int], int] = {}  # registrations by group and slot


class LivingProcesses:
    """Which processes live, and which slots they have. Any thread may use it.

    A process that has lost its last slot to another one is forgotten: a group has at most as many
    pidfds here as slots, however many of its processes register. The pidfds are in `epoll`, where
    each can be read once its process has ended.
    """

    def __init__(self, epoll: select.epoll) -> None:
        self._epoll = epoll
        self._lock = threading.Lock()  # of the following
        self._by_pidfd: dict[int, LivingProcess] = {}
        self._by_pid: dict[int, LivingProcess] = {}  # the same
        self._holders: dict[tuple[str, int], LivingProcess] = {}  # by group and slot
        # Those that ended in the last seconds, by pid: the group, and when.
        self._ended: dict[int, tuple[str, float]] = {}

    def groups_of(self, pids: Iterable[int]) -> dict[int, str]:
        """The groups of those that are registered and have not ended, by pid.

        A pid is theirs until then: no other process can have it.
        """
        with self._lock:
            known = [self._by_pid[pid] for pid in pids if pid in self._by_pid]
            ended = processes.ended(process.pidfd for process in known)
            return {
                process.pid: next(iter(process.slots))[0]
                for process in known
                if process.slots and process.pidfd not in ended
            }

    def last_groups_of(self, pids: Iterable[int]) -> dict[int, str]:
        """The groups of those that are registered, or were until they ended a moment ago, by pid.

        One that has ended may be another process by now.
        """
        with self._lock:
            self._forget_ended(time.monotonic())
            found = {pid: self._ended[pid][0] for pid in pids if pid in self._ended}
            known = [self._by_pid[pid] for pid in pids if pid in self._by_pid]
            return found | {each.pid: next(iter(each.slots))[0] for each in known if each.slots}

    def _forget_ended(self, now: float) -> None:
        for pid in [pid for pid, (_, at) in self._ended.items() if now - at >= REMEMBERED]:
            del self._ended[pid]

    def watch(
        self, pidfd: int, pid: int, start_time: int, group: str, slot: int, registration: int
    ) -> None:
        """Notice the end of the process that is registered in a slot now. Takes the pidfd."""
        with self._lock:
            former = self._holders.pop((group, slot), None)
            if former is not None:
                del former.slots[group, slot]
            process = self._by_pid.get(pid)
            if process is not None and process.start_time == start_time:
                os.close(pidfd)
            else:
                process = LivingProcess(pidfd, pid, start_time)
                self._by_pidfd[pidfd] = self._by_pid[pid] = process
                self._epoll.register(pidfd, select.EPOLLIN)
            process.slots[group, slot] = registration
            self._holders[group, slot] = process
            if former is not None and not former.slots:
                self._drop(former)

    def other_holder(self, group: str, slot: int, pid: int, start_time: int) -> int | None:
        """The registration of another process, which lives, in the slot; None if there is none."""
        with self._lock:
            holder = self._holders.get((group, slot))
            if (
                holder is None
                or (holder.pid, holder.start_time) == (pid, start_time)
                or processes.has_ended(holder.pidfd)
            ):
                return None
            return holder.slots[group, slot]

    def take_ended(self, pidfds: Iterable[int]) -> dict[str, dict[int, int]]:
        """Forget those of these that have ended: their registrations, by group and slot."""
        dead: dict[str, dict[int, int]] = {}
        now = time.monotonic()
        with self._lock:
            self._forget_ended(now)
            for pidfd in pidfds:
                process = self._by_pidfd.get(pidfd)
                # Ask: the event may be about an earlier descriptor of this number.
                if process is None or not processes.has_ended(pidfd):
                    continue
                for (group, slot), registration in process.slots.items():
                    self._ended[process.pid] = group, now
                    del self._holders[group, slot]
                    dead.setdefault(group, {})[slot] = registration
                self._drop(process)
        return dead

    def forget(self, group: str) -> None:
        """A group was removed: its slots are of no process any more."""
        with self._lock:
            for key in [key for key in self._holders if key[0] == group]:
                process = self._holders.pop(key)
                del process.slots[key]
                if not process.slots:
                    self._drop(process)
            for pid in [pid for pid, (of, _) in self._ended.items() if of == group]:
                del self._ended[pid]

    def _drop(self, process: LivingProcess) -> None:
        del self._by_pidfd[process.pidfd]
        if self._by_pid.get(process.pid) is process:
            del self._by_pid[process.pid]
        self._epoll.unregister(process.pidfd)
        os.close(process.pidfd)

    def close(self) -> None:
        """Forget all."""
        with self._lock:
            for pidfd in self._by_pidfd:
                os.close(pidfd)
            self._by_pidfd, self._by_pid, self._holders, self._ended = {}, {}, {}, {}
