"""Watches the registered processes of all groups until the processes end."""

import os
import select
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from gpu.limits import processes

REMEMBERED = 3.0  # seconds; the driver reports the use of an ended process late


@dataclass(eq=False)
class LivingProcess:
    pidfd: int
    pid: int
    start_time: int
    slots: dict[tuple[str, int], int] = field(default_factory=dict)  # registrations by slot


class LivingProcesses:
    """The living processes and their slots. Any thread may use an object.

    The pidfd of a process is in `epoll` and becomes readable when the process ends. A process
    without a slot is dropped, so a group has no more pidfds than slots.
    """

    def __init__(self, epoll: select.epoll) -> None:
        self._epoll = epoll
        self._lock = threading.Lock()  # guards the fields below
        self._by_pidfd: dict[int, LivingProcess] = {}
        self._by_pid: dict[int, LivingProcess] = {}  # the same processes
        self._holders: dict[tuple[str, int], LivingProcess] = {}  # by group and slot
        # Processes that ended in the last `REMEMBERED` seconds, by pid: the group, and the time.
        self._ended: dict[int, tuple[str, float]] = {}

    def groups_of(self, pids: Iterable[int]) -> dict[int, str]:
        """The groups of registered, living processes, by pid."""
        with self._lock:
            known = [self._by_pid[pid] for pid in pids if pid in self._by_pid]
            ended = processes.ended(process.pidfd for process in known)
            return {
                process.pid: next(iter(process.slots))[0]
                for process in known
                if process.slots and process.pidfd not in ended
            }

    def last_groups_of(self, pids: Iterable[int]) -> dict[int, str]:
        """Like `groups_of`, but with recently ended processes, whose pids may be in use again."""
        with self._lock:
            self._forget_ended(time.monotonic())
            ended = {pid: self._ended[pid][0] for pid in pids if pid in self._ended}
            known = [self._by_pid[pid] for pid in pids if pid in self._by_pid]
            return ended | {
                living.pid: next(iter(living.slots))[0] for living in known if living.slots
            }

    def _forget_ended(self, now: float) -> None:
        for pid in [pid for pid, (_, at) in self._ended.items() if now - at >= REMEMBERED]:
            del self._ended[pid]

    def watch(
        self, pidfd: int, pid: int, start_time: int, group: str, slot: int, registration: int
    ) -> None:
        """Watch for the end of the process in a slot. The caller must not close `pidfd`."""
        with self._lock:
            previous = self._holders.pop((group, slot), None)
            if previous is not None:
                del previous.slots[group, slot]
            process = self._by_pid.get(pid)
            if process is not None and process.start_time == start_time:
                os.close(pidfd)
            else:
                process = LivingProcess(pidfd, pid, start_time)
                self._by_pidfd[pidfd] = self._by_pid[pid] = process
                self._epoll.register(pidfd, select.EPOLLIN)
            process.slots[group, slot] = registration
            self._holders[group, slot] = process
            if previous is not None and not previous.slots:
                self._drop(previous)

    def other_holder(self, group: str, slot: int, pid: int, start_time: int) -> int | None:
        """The registration of another living process in the slot; `None` if there is none."""
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
        """Drop the ended processes among `pidfds`. Returns registrations by group and slot."""
        dead: dict[str, dict[int, int]] = {}
        now = time.monotonic()
        with self._lock:
            self._forget_ended(now)
            for pidfd in pidfds:
                process = self._by_pidfd.get(pidfd)
                # Check: the event may be of an earlier descriptor with this number.
                if process is None or not processes.has_ended(pidfd):
                    continue
                for (group, slot), registration in process.slots.items():
                    self._ended[process.pid] = group, now
                    del self._holders[group, slot]
                    dead.setdefault(group, {})[slot] = registration
                self._drop(process)
        return dead

    def forget(self, group: str) -> None:
        """Release the slots of a removed group."""
        with self._lock:
            for key in [key for key in self._holders if key[0] == group]:
                process = self._holders.pop(key)
                del process.slots[key]
                if not process.slots:
                    self._drop(process)
            for pid in [pid for pid, (owner, _) in self._ended.items() if owner == group]:
                del self._ended[pid]

    def _drop(self, process: LivingProcess) -> None:
        del self._by_pidfd[process.pidfd]
        if self._by_pid.get(process.pid) is process:
            del self._by_pid[process.pid]
        self._epoll.unregister(process.pidfd)
        os.close(process.pidfd)

    def close(self) -> None:
        with self._lock:
            for pidfd in self._by_pidfd:
                os.close(pidfd)
            self._by_pidfd, self._by_pid, self._holders, self._ended = {}, {}, {}, {}
