"""The threads that run the calls. They start on demand and end after a while without work.

A thread may enter a pod's network namespace and must be back in the host's for the next call; a
thread that cannot return ends, and another replaces it. A thread cannot be ended from outside: if
its job does not end in time, the thread counts as stuck, and another one replaces it.

A running job holds one of `limit` places. A job that waits (for a block of addresses, a carrier, a
foreign executable) gives its place to another job for that time, and keeps its thread. So jobs that
wait delay no other job, and the server's limit of connections bounds their threads.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from agent.observe.logs import fields
from host.namespaces import Home

STACK = 1 << 20  # bytes; a plugin's deepest call needs far less, and there may be many threads
IDLE_TIME = 30.0  # seconds; then a thread ends, and its stack goes back to the kernel

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Job:
    """Work for a thread. The function `does` handles its own failures.

    A worker whose job runs after `due` (monotonic) is stuck, and `stuck` is called. `about` has the
    log's fields.
    """

    does: Callable[["Job"], object]
    due: float = math.inf
    stuck: Callable[[], object] = lambda: None
    about: Mapping[str, object] = field(default_factory=dict)
    begun: float = math.inf


class Workers:
    """At most `limit` places, and another for each stuck thread, up to twice the limit.

    More jobs wait in their order.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._home = Home()
        self._changed = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._threads: set[threading.Thread] = set()
        self._doing: set[Job] = set()
        self._stuck: set[Job] = set()
        self._aside: set[Job] = set()  # they wait, and have no place
        self._startable = True
        self._closed = False

    @property
    def limit(self) -> int:
        """The number of places while no thread is stuck. This number can be changed."""
        return self._limit

    @limit.setter
    def limit(self, limit: int) -> None:
        """The number of places while no thread is stuck. This number can be changed."""
        with self._changed:
            self._limit = limit
            self._begin_more()
            self._changed.notify_all()

    def tend(self) -> None:
        """Find stuck workers, and start the threads that waiting jobs need. Call it regularly."""
        now = time.monotonic()
        with self._changed:
            late = [job for job in self._doing - self._stuck if job.due <= now]
            self._stuck.update(late)
            count = len(self._stuck)
            self._begin_more()
        for job in late:
            job.stuck()
            with fields(**job.about):
                _log.error(
                    "the call is still running after %.0f s and cannot be ended: another worker "
                    "replaces its worker (%d stuck workers): find what the call waits for, or "
                    "restart the agent",
                    now - job.begun,
                    count,
                )

    def submit(self, job: Job) -> None:
        with self._changed:
            self._jobs.append(job)
            self._begin_more()

    @contextmanager
    def aside(self, job: Job) -> Iterator[None]:
        """In the block the running job waits, and a new job may have its place.

        At the end the job goes on at once, because it may hold a lock that jobs with places need.
        If a new job has the place, no other job begins until enough jobs have ended.
        """
        with self._changed:
            inner = job in self._aside
            self._aside.add(job)
            self._begin_more()
        try:
            yield
        finally:
            if not inner:
                with self._changed:
                    self._aside.discard(job)

    @property
    def running(self) -> int:
        """The number of running jobs, including those of stuck workers."""
        return len(self._doing)

    @property
    def busy(self) -> int:
        """The number of running jobs without those of stuck workers."""
        with self._changed:
            return len(self._doing) - len(self._stuck)

    @property
    def stuck(self) -> int:
        return len(self._stuck)

    @property
    def able(self) -> bool:
        """Whether a worker can take a job, now or when its present job has ended."""
        with self._changed:
            most = self._most if self._startable else len(self._threads)
            return len(self._stuck) < most

    @property
    def problem(self) -> str:
        """The reason if calls wait or will wait soon.

        Returns "" while most workers are not stuck.
        """
        stuck, limit = self.stuck, self.limit
        if not self.able:
            return (
                f"no worker is free, {stuck} are stuck in calls that do not end (the log names "
                "them): restart the agent"
            )
        if 2 * stuck >= limit:
            return (
                f"{stuck} of {limit} workers are stuck in calls that do not end: see the log for "
                "the calls, and end what they wait for, or restart the agent"
            )
        return ""

    @property
    def threads(self) -> int:
        """The number of threads, including those of stuck workers and of jobs that wait."""
        return len(self._threads)

    @property
    def waiting(self) -> int:
        """The number of jobs that wait for a thread."""
        return len(self._jobs)

    def close(self, timeout: float) -> bool:
        """End the threads once no job is left.

        Returns whether they ended within `timeout` seconds.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._threads, timeout)

    @property
    def _free(self) -> int:
        """The number of free places. It is negative if jobs work without a place after a wait."""
        places = self._limit + min(len(self._stuck - self._aside), self._limit)
        return places - (len(self._doing) - len(self._aside))

    @property
    def _most(self) -> int:
        return len(self._doing) + self._free

    def _begin_more(self) -> None:
        count = min(len(self._jobs), self._free)
        if count > 0:
            self._changed.notify(count)
            idle = len(self._threads) - len(self._doing)
            for _ in range(count - idle):
                self._start()

    def _start(self) -> None:
        before = threading.stack_size(STACK)
        # A daemon thread that hangs in the kernel does not keep the process.
        thread = threading.Thread(target=self._work, name="worker", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no memory or no pid is left: `tend` tries again
            self._startable = False
            if not self._threads:
                _log.error("no thread can be started: calls wait")
        else:
            self._startable = True
            self._threads.add(thread)
        finally:
            threading.stack_size(before)

    def _work(self) -> None:
        home = self._home.restore()  # a thread begins in the namespace of the one that starts it
        while home and (job := self._next()):
            try:
                job.does(job)
            except BaseException:  # noqa: BLE001 - a job's failure must not shrink the pool
                _log.exception("a worker's job failed")
            home = self._home.restore()
            self._done(job)
        if not home:
            with self._changed:
                self._leave()
            _log.error("a worker cannot leave a pod's network namespace: it is replaced")

    def _next(self) -> Job | None:
        with self._changed:
            while len(self._threads) <= self._most:
                if self._jobs and self._free > 0:
                    job = self._jobs.popleft()
                    job.begun = time.monotonic()
                    self._doing.add(job)
                    return job
                if self._closed and not self._jobs:
                    break
                if not self._changed.wait(IDLE_TIME) and not self._jobs:
                    break
            self._leave()
            return None

    def _done(self, job: Job) -> None:
        with self._changed:
            self._doing.discard(job)
            was_stuck = job in self._stuck
            self._stuck.discard(job)
            self._begin_more()
        if was_stuck:
            with fields(**job.about):
                seconds = time.monotonic() - job.begun
                _log.warning("the call that held its worker has ended after %.0f s", seconds)

    def _leave(self) -> None:
        self._threads.discard(threading.current_thread())
        self._changed.notify_all()
