"""Elects one of several processes by a Lease of coordination.k8s.io.

As in client-go, a process never compares its clock with the clock of another machine. A candidate
takes a Lease that has not changed for the Lease's whole duration. A leader stops when it has not
renewed the Lease for RENEW_WITHIN. The duration minus RENEW_WITHIN is longer than a request takes.
So a leader's last request ends before the next leader begins.
"""

import logging
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime

from msgspec.structs import replace

from base.loop import boottime
from base.problems import Problems
from kube.client import ClusterApi
from kube.resources import AlreadyExists, ApiError, Conflict, Lease, NotFound, ServerMeta

DURATION = 30.0  # seconds without a change, after which a candidate takes the Lease
RENEW_WITHIN = 15.0  # seconds from the start of the last renewal, after which a leader stops
RENEW_EVERY = 5.0

_log = logging.getLogger(__name__)


class Leadership:
    """One process in the election. Its `identity` is unique, even among restarts of one pod.

    `clock` returns seconds, includes the time in suspend, and never goes back. `wall` returns the
    Unix time, for readers of the Lease.
    """

    def __init__(
        self,
        api: ClusterApi,
        namespace: str,
        name: str,
        identity: str,
        *,
        clock: Callable[[], float] = boottime,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._clock = clock
        self._wall = wall
        self._lock = threading.Lock()
        self._problems = Problems(_log, clock)
        self._seen: Lease | None = None  # the Lease of another holder
        self._seen_at = 0.0
        self._mine: Lease | None = None
        self._until = 0.0

    @property
    def holds(self) -> bool:
        return self._clock() < self._until

    def step(self) -> bool:
        """Try once to take or to renew the Lease. Returns whether this process leads."""
        with self._lock:
            begun = self._clock()
            if self._mine is not None and begun >= self._until:
                self._lose("the Lease could not be renewed in time")
            try:
                mine = self._renew() if self._mine is not None else self._take(begun)
            except (Conflict, AlreadyExists, NotFound) as error:
                self._lose(str(error))
            except ApiError as error:
                self._problems.tell(f"lease {self._name}", error)
            else:
                self._problems.tell(f"lease {self._name}", None)
                self._keep(mine, begun)
            return self.holds

    def give_back(self) -> None:
        """Stop leading, so that another process can begin at once."""
        with self._lock:
            mine, self._mine, self._until = self._mine, None, 0.0
            if mine is None:
                return
            try:
                self._write(mine, holder_identity="", renew_time=self._now())
            except ApiError as error:
                _log.warning("lease %s: cannot be released: %s", self._name, error)
            else:
                _log.info("lease %s: released", self._name)

    def _renew(self) -> Lease:
        assert self._mine is not None
        try:
            return self._write(self._mine, renew_time=self._now())
        except Conflict:
            there = self._api.get(Lease, self._name, self._namespace)
            if there.spec.holder_identity != self._identity:
                raise
            return self._write(there, renew_time=self._now())  # the answer was lost

    def _take(self, begun: float) -> Lease | None:
        """Take the Lease if it is free. Returns `None` if another process holds it."""
        now = self._now()
        try:
            there = self._api.get(Lease, self._name, self._namespace)
        except NotFound:
            there = Lease(metadata=ServerMeta(namespace=self._namespace, name=self._name))
        spec = there.spec
        if spec.holder_identity not in ("", self._identity):
            if self._seen != there:
                self._seen, self._seen_at = there, self._clock()
            # The holder may have a longer duration than this process.
            if begun - self._seen_at < max(DURATION, spec.lease_duration_seconds):
                return None
        # A Lease with this identity comes from a request that lost its answer.
        return self._write(
            there,
            holder_identity=self._identity,
            lease_duration_seconds=int(DURATION),
            lease_transitions=spec.lease_transitions + bool(there.metadata.uid),
            acquire_time=now,
            renew_time=now,
        )

    def _write(self, lease: Lease, **changes: str | int) -> Lease:
        changed = replace(lease, spec=replace(lease.spec, **changes))
        return self._api.update(changed) if lease.metadata.uid else self._api.create(changed)

    def _keep(self, mine: Lease | None, begun: float) -> None:
        if mine is None:
            return
        if self._mine is None:
            _log.info("lease %s: this process leads", self._name)
        self._mine, self._seen = mine, None
        self._until = begun + RENEW_WITHIN

    def _lose(self, why: str) -> None:
        if self._mine is not None:
            _log.warning("lease %s: this process stopped leading: %s", self._name, why)
        self._mine, self._until = None, 0.0

    def _now(self) -> str:
        return datetime.fromtimestamp(self._wall(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
