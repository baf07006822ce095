"""The threads that do the calls, made when they are needed and kept.

Each may enter a pod's network namespace, and must be home again for the next call: one that
cannot be brought back ends, and another takes its place.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable

from host.namespaces import Home

STACK = 1 << 20  # bytes; a plugin's deepest call needs far less, and there may be many threads

Job = Callable[[], object]

_log = logging.getLogger(__name__)


class Workers:
    """At most `limit` threads; jobs beyond that wait in the order they came."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._home = Home()
        self._changed = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self._closed = False

    @property
    def limit(self) -> int:
        """How many threads there may be; more or fewer from now on."""
        return self._limit

    @limit.setter
    def limit(self, limit: int) -> None:
        with self._changed:
            self._limit = limit
            self._changed.notify_all()

    def tend(self) -> None:
        """Start the threads that waiting jobs lack, now and then, where `submit` is called.

        Not in a worker: a thread begins in its maker's namespace, wherever that is.
        """
        with self._changed:
            lacking = min(len(self._jobs) - self._idle, self._limit - len(self._threads))
            for _ in range(lacking):
                self._start()

    def submit(self, job: Job) -> None:
        """Have a thread do the job, which handles its own failures."""
        with self._changed:
            self._jobs.append(job)
            if self._idle >= len(self._jobs):
                self._changed.notify()
            elif len(self._threads) < self._limit:
                self._start()

    @property
    def running(self) -> int:
        """How many jobs are being done."""
        with self._changed:
            return len(self._threads) - self._idle

    @property
    def waiting(self) -> int:
        """How many jobs no thread has begun."""
        with self._changed:
            return len(self._jobs)

    def close(self, timeout: float) -> bool:
        """Let the threads end once no job is left. Whether they did within `timeout` seconds."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._threads, timeout)

    def _start(self) -> None:
        try:
            self._make_thread()
        except RuntimeError:  # no memory or no pid is left: what waits is looked at again (tend)
            if not self._threads:
                _log.error("no thread can be started: calls wait")

    def _make_thread(self) -> None:
        before = threading.stack_size(STACK)
        try:
            # A daemon, so that one that hangs in the kernel does not keep the process.
            thread = threading.Thread(target=self._work, name="worker", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
        self._threads.add(thread)

    def _work(self) -> None:
        while job := self._next():
            try:
                job()
            except BaseException:  # noqa: BLE001 - the pool must not shrink by a job's mistake
                _log.exception("a worker's job failed")
            if not self._home.bring_back():
                _log.error("a worker is lost in a pod's network namespace: it is replaced")
                break
        with self._changed:
            self._threads.discard(threading.current_thread())
            self._changed.notify_all()

    def _next(self) -> Job | None:
        with self._changed:
            self._idle += 1
            try:
                while not self._jobs:
                    surplus = len(self._threads) > self._limit
                    if self._closed or surplus:
                        return None
                    self._changed.wait()
                return self._jobs.popleft()
            finally:
                self._idle -= 1
