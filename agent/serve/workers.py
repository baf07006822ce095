"""The threads that run the calls. They start on demand and end after IDLE_TIME without work.

A thread may enter a pod's network namespace. A thread that cannot return to the host's namespace
ends. A thread counts as stuck if its job does not end in time. A new thread replaces such threads.

A running job holds one of `limit` places. A job that waits (for a block of addresses, a carrier, a
foreign executable) keeps its thread, but gives its place to another job. The server's limit of
connections also limits the threads of jobs that wait.
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
IDLE_TIME = 30.0  # seconds; then a thread ends, and the kernel frees its stack

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Job:
    """Work for a thread. `does` is the function to run. The function handles its own failures.

    If the job still runs at the time `due` (monotonic), its worker counts as stuck, and the server
    calls `stuck`. `about` has the fields for the log.
    """

    does: Callable[["Job"], object]
    due: float = math.inf
    stuck: Callable[[], object] = lambda: None
    about: Mapping[str, object] = field(default_factory=dict)
    begun: float = math.inf


class Workers:
    """The threads, with `limit` places.

    Each stuck thread adds a place. Stuck threads add at most `limit` places.
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
        """The number of places while no thread is stuck. A caller may set another number."""
        return self._limit

    @limit.setter
    def limit(self, limit: int) -> None:
        with self._changed:
            self._limit = limit
            self._begin_more()
            self._changed.notify_all()

    def tend(self) -> None:
        """Find stuck workers, and start threads for waiting jobs. Must be called regularly."""
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
                    "the call is still running after %.0f s and cannot be ended: a new worker "
                    "replaces its worker (%d stuck workers). Find out what the call waits for, or "
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
        """A context in which the running job waits and gives its place to another job.

        After the wait the job continues at once, even without a place, because other jobs may wait
        for its lock. If too many jobs run, no job begins until enough jobs have ended.
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
        """Whether at least one worker is not stuck, or can be started."""
        with self._changed:
            most = self._most if self._startable else len(self._threads)
            return len(self._stuck) < most

    @property
    def problem(self) -> str:
        """A text with the remedy if half of the workers or more are stuck, otherwise ""."""
        stuck, limit = self.stuck, self.limit
        if not self.able:
            return (
                f"no worker is free, {stuck} are stuck in calls that do not end (the log names "
                "them): restart the agent"
            )
        if 2 * stuck >= limit:
            return (
                f"{stuck} of {limit} workers are stuck in calls that do not end (the log names "
                "them): end what the calls wait for, or restart the agent"
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
        """End the threads after all jobs. Returns whether they ended within `timeout` seconds."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._threads, timeout)

    @property
    def _free(self) -> int:
        """The number of free places. Negative while jobs run without a place."""
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
        # A daemon thread that hangs in the kernel does not keep the process from ending.
        thread = threading.Thread(target=self._work, name="worker", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no memory or no pid is left: `tend` tries again
            self._startable = False
            if not self._threads:
                _log.error("no memory or process id is left for a thread: calls wait")
        else:
            self._startable = True
            self._threads.add(thread)
        finally:
            threading.stack_size(before)

    def _work(self) -> None:
        home = self._home.restore()  # a new thread is in the namespace of the thread that starts it
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
                _log.warning("the call of a stuck worker has ended after %.0f s", seconds)

    def _leave(self) -> None:
        self._threads.discard(threading.current_thread())
        self._changed.notify_all()
