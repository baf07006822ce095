"""The lessee of a node leases, confirms and returns blocks in one thread.

ADDs request a block from the lessee and wait (`Claims`). The lessee repeats failed work later. The
lessee never calls the API server while holding the store's lock.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from base.loop import Backoff, StepThread, boottime
from cni.spec.errors import CNIError, Code
from ipam.leases.block_store import BlockStore
from ipam.leases.claim_request import (
    PATIENCE,
    Attempts,
    Lease,
    LeasesNothing,
    PoolPending,
    Want,
    key_of,
)
from ipam.leases.claims import Claimant, Late
from ipam.leases.confirmation import Confirmation
from ipam.leases.failures import LoggedFailures
from ipam.leases.lease_context import Leasing, identified
from ipam.leases.leased_ranges import may_have
from ipam.leases.objects import AddressBlock
from ipam.leases.pool_cache import NotReadyYet, Pools, Unusable
from ipam.leases.upkeep import Upkeep
from ipam.ranges import size_of
from ipam.store.reservations import AddressInUse, AddressUnprobed, Owner
from ipam.store.store_files import StoreFiles
from kube.client import ClusterApi, PendingEvents
from kube.resources import ApiError, Refused

CONFIRM_EVERY = 450.0  # most seconds between two; fewer if a pool's maxOffline is below 30 min
LOOK_EVERY = 1.0  # seconds between two surveys of the store
_FIRST_RETRY, _LAST_RETRY = 1.0, 20.0  # seconds from a failure to the next attempt
_AHEAD = 3.0  # most seconds for leasing blocks ahead, because ADDs may wait
_RETURN_RETRY = 5.0  # seconds after a failed return
_QUIET = 120.0  # seconds without claims after the API server lost blocks

_REASONS: Mapping[type[CNIError], str] = {
    AddressInUse: "AddressInUse",
    AddressUnprobed: "AddressNotProbed",
}  # of events on pods

_log = logging.getLogger(__name__)


class Counted(NamedTuple):
    """Numbers for metrics. `confirmed` is `None` before the first confirmation."""

    blocks: int = 0
    used: int = 0
    free: int = 0
    claims: int = 0
    conflicts: int = 0
    errors: int = 0
    confirmed: float | None = None  # seconds ago
    unprobed: int = 0
    answered: int = 0


class Lessee(StepThread):
    """Implements `Claims` for one node.

    `clock` is CLOCK_BOOTTIME. If `start` was not called, `claim` leases blocks in the caller's
    thread. The caller must also call `step`."""

    def __init__(
        self,
        api: ClusterApi,
        files: StoreFiles,
        node: str,
        boot: str,
        *,
        clock: Callable[[], float] = boottime,
        attempts: Callable[[Lease], Attempts] = Attempts,
    ) -> None:
        super().__init__("leases")
        self._api = api
        self._store = BlockStore(files)
        self._node = node
        self._boot = boot
        self._clock = clock
        self._pools = Pools(api)
        self._events = PendingEvents(api)
        self._claimant: Claimant | None = None
        self._objects: dict[str, AddressBlock] = {}
        self.leaving = False  # podfabric leaves the node, and returns every empty block
        self._upkeep = Upkeep(
            api, self._store, self._pools, self._objects, boot, clock, lambda: self.leaving
        )
        self._working = threading.Lock()  # one thread at a time leases
        self._attempts = attempts(self._lease)
        self._confirmed: float | None = None
        self._confirm_at = self._look_at = self._return_at = clock()
        self._in_touch = False  # whether the last confirmation succeeded
        self._backoff = Backoff(_FIRST_RETRY, _LAST_RETRY)
        self._quiet_until = 0.0
        self._failures = LoggedFailures()

    def close(self) -> None:
        """See StepThread.close. Afterwards, the lessee changes nothing in the store."""
        self._ended.set()
        self._failures.close()
        self._attempts.wake()
        super().close()
        self._attempts.end(CNIError(Code.TRY_AGAIN, "this agent is being replaced: try again"))
        self._store.close()

    def step(self) -> float:
        """Do the work that is due, ADDs first. Returns the seconds until the next work is due."""
        with self._working:
            self._attempts.serve()
            if self._is_due(self._confirm_at):
                self._failures.guarded("confirm the leases", self._confirm)
            self._attempts.serve()
            if self._is_due(self._look_at):
                self._look_at = self._clock() + LOOK_EVERY
                self._failures.guarded("keep the leases", self._keep)
        with self._attempts.changed:
            if self._attempts:
                return 0.0
        return max(0.0, min(self._confirm_at, self._look_at) - self._clock())

    def counted(self) -> Counted:
        blocks = [each for each in self._upkeep.survey.blocks if each.block.state != "lost"]
        used = sum(each.used for each in blocks)
        claimant = self._claimant
        return Counted(
            blocks=len(blocks),
            used=used,
            free=sum(each.block.size for each in blocks) - used,
            claims=claimant.claims if claimant else 0,
            conflicts=claimant.conflicts if claimant else 0,
            errors=self._failures.api_errors,
            confirmed=None if self._confirmed is None else self._clock() - self._confirmed,
            unprobed=sum(size_of(each.block.unprobed) for each in blocks),
            answered=sum(size_of(each.block.answered) for each in blocks),
        )

    def _run(self) -> None:
        # Opens the files early: the first confirmation may take long.
        self._failures.guarded("read the store", self._upkeep.look)
        super()._run()
        self._attempts.serve()  # each fails at once

    def _rest(self, seconds: float) -> None:
        with self._attempts.changed:
            if not self._ended.is_set() and not self._attempts:
                self._attempts.changed.wait(seconds)

    def _is_due(self, at: float) -> bool:
        return not self._ended.is_set() and self._clock() >= at

    def claim(self, wants: Sequence[Want], deadline: float) -> None:
        """See Claims.claim. ADDs with the same want share one claim."""
        until = deadline if self._thread is not None else math.inf
        attempts = [self._attempts.add(want, until) for want in wants]
        if self._ended.is_set():  # otherwise the thread ends the attempts
            raise LeasesNothing(_no_address(wants[0], "this agent is being replaced").message)
        if self._thread is None:
            with self._working:
                self._attempts.serve()
        errors: list[CNIError] = []
        for attempt in attempts:
            if not attempt.over.wait(max(0.0, deadline - time.monotonic())):
                why = f"the API server did not answer within {PATIENCE:g} s"
                errors.append(_no_address(attempt.want, why))
            elif attempt.error is not None:
                errors.append(attempt.error)
        if len(errors) == len(attempts):  # a block for one of the wants is enough
            raise errors[0]

    def low(self, wants: Sequence[Want]) -> None:
        self._upkeep.low.update((key_of(want), want) for want in wants)

    def failed(self, owner: Owner, error: CNIError) -> None:
        if error.code == Code.NO_FREE_ADDRESS:
            self._events.of_pod("AddressPoolExhausted", error.message, owner.pod)
        reason = _REASONS.get(type(error))
        if reason is not None:  # one event for each address
            each = isinstance(error, AddressInUse)
            self._events.of_pod(reason, error.message, owner.pod, each_message=each)

    def unable(self, wants: Sequence[Want]) -> str | None:
        return self._attempts.unable(wants)

    def _lease(self, want: Want, is_late: Callable[[], bool]) -> None:
        """Claim a block. Every failure raises CNIError."""

        def is_over() -> bool:
            return self._ended.is_set() or is_late()

        try:
            if is_over():
                raise Late
            if not self._in_touch:  # a claim alone would not see that the Node object is gone
                self._confirm()
                if may_have(self._store.survey(), want, self._boot, self._clock()):
                    return  # the ADD looks again
            if self._clock() < self._quiet_until:
                raise Unusable(
                    "the API server lost AddressBlocks of this node (perhaps etcd was restored), "
                    "so this node leases no block for two minutes"
                )
            assert self._claimant is not None
            block = self._claimant.claim(want, is_over)
            if block is not None:
                self._objects[block.metadata.name] = block
                self._upkeep.leased()
                _log.info("leases: leased %s", block.metadata.name)
                # Its pool's maxOffline may be the shortest.
                interval = self._interval([block.spec.max_offline_seconds])
                self._confirm_at = min(self._confirm_at, self._clock() + interval)
        except Late:
            raise _no_address(want, "the deadline of the call has passed") from None
        except NotReadyYet as error:
            raise PoolPending(_no_address(want, str(error)).message) from None
        except Unusable as error:
            raise _no_address(want, str(error)) from None
        except ApiError as error:
            self._failures.api_errors += 1
            # The next confirmation finds a claim that succeeded anyway.
            self._confirm_at = min(self._confirm_at, self._clock() + self._backoff.next)
            what = "refuses" if isinstance(error, Refused) else "does not answer"
            raise _no_address(want, f"the API server {what}: {error}") from None

    def _confirm(self) -> None:
        self._confirm_at = self._clock() + self._backoff.pause()
        self._in_touch = False
        at = self._clock()
        is_first = self._confirmed is None
        holder = identified(self._api, self._store, self._node, self._boot)
        leasing = Leasing(self._api, self._store, self._pools, holder, self._clock)
        confirmation = Confirmation(leasing, self._events)
        if is_first:
            confirmation.adopt()
        if self._claimant is None or self._claimant.holder != holder:
            former = self._claimant
            self._claimant = Claimant(leasing)
            if former is not None:
                self._claimant.claims = former.claims
                self._claimant.conflicts = former.conflicts
        if is_first:
            _log.info("leases: this store leases as %s on node %s", holder.instance, holder.node)
        confirmed = confirmation.run(at)
        self._objects.clear()
        self._objects |= confirmed.objects
        if confirmed.rolled_back:
            self._quiet_until = self._clock() + _QUIET
        self._upkeep.confirmed(at)
        self._confirmed = at
        self._in_touch = True
        self._backoff.reset()
        rows = self._store.blocks().values()
        self._confirm_at = at + self._interval(row.max_offline for row in rows)

    def _interval(self, limits: Iterable[float]) -> float:
        """Seconds between two confirmations. The limit 0 (of an unusable pool) does not count."""
        return max(_FIRST_RETRY, min([CONFIRM_EVERY, *(limit / 4 for limit in limits if limit)]))

    def _keep(self) -> None:
        self._upkeep.look()
        if self._confirmed is not None and self._upkeep.has_unconfirmed:
            self._confirm_at = min(self._confirm_at, self._confirmed + _LAST_RETRY)
        if self._claimant is None or not self._in_touch:
            return
        self._events.send()
        if self._is_due(self._return_at) and not self._upkeep.give_back(
            self._claimant.holder.instance, self._after_adds
        ):
            self._return_at = self._clock() + _RETURN_RETRY
        late = time.monotonic() + _AHEAD
        self._upkeep.lease_ahead(self._lease, lambda: time.monotonic() > late, self._after_adds)
        self._upkeep.tell()

    def _after_adds(self, what: str, work: Callable[[], object]) -> bool:
        """Serve pending ADDs, and then do the work with `guarded`."""
        self._attempts.serve()
        return self._failures.guarded(what, work)


def _no_address(want: Want, why: str) -> CNIError:
    return CNIError(
        Code.TRY_AGAIN,
        f"this node has no free address of {want.range}, and cannot lease a block now: {why}: "
        f"nothing was reserved; the runtime tries again",
    )
