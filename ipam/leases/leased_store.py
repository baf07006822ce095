"""The store of a node that leases its addresses from the cluster.

An ADD calls the API server only if this node's blocks have no free address. In this case, the ADD
waits until the lessee (`Claims`) leases a block. No other verb calls the API server.
"""

import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from base import interrupts
from base.loop import Backoff, boottime
from cni.spec.errors import CNIError, Code
from ipam.leases.claim_request import (
    PATIENCE,
    POOL_PATIENCE,
    Claims,
    LeasesNothing,
    NotReserved,
    PodInterface,
    PoolPending,
    PoolRange,
    Want,
)
from ipam.leases.leased_ranges import LeasedView
from ipam.ranges import Range, RangeSet
from ipam.store.reservations import Grant, Owner
from ipam.store.sqlite_store import SqliteStore
from ipam.store.store_files import StoreFiles

_AGAIN, _LONGEST_AGAIN = 0.2, 1.0  # seconds between two attempts of an ADD to get a block
_POOL_AGAIN = 0.5  # seconds between two reads of a pool
_MOST_WAITS = 32  # successful waits for blocks before a late ADD fails
_MOST_USELESS = 3  # useless blocks that an ADD leases before it fails


class ClusterStore(SqliteStore):
    """A `SqliteStore` that takes pool addresses only from this node's leased blocks.

    `leased` has the ranges of pools. Other ranges need no lease. `clock` is CLOCK_BOOTTIME. An ADD
    waits `patience` seconds for a block, and `pool_patience` seconds for a pool. With `sticky`,
    pods get the addresses that are reserved for their names.
    """

    def __init__(
        self,
        files: Path | StoreFiles,
        boot: str,
        claims: Claims,
        leased: Collection[PoolRange],
        *,
        clock: Callable[[], float] = boottime,
        patience: float = PATIENCE,
        pool_patience: float = POOL_PATIENCE,
        sticky: bool = False,
    ) -> None:
        super().__init__(files, boot)
        self._claims = claims
        self._leased = frozenset(leased)
        self._boottime = clock
        self._patience = patience
        self._pool_patience = pool_patience
        self._sticky = sticky
        self._unreserved: set[PoolRange] = set()

    def reserve(
        self,
        owner: Owner,
        sets: Sequence[RangeSet],
        *,
        segment: str = "",
        alone: Sequence[Range] = (),
    ) -> Grant:
        """See SqliteStore.reserve. Waits for a block if a set has no free address."""
        pool_deadline = time.monotonic() + self._pool_patience
        useless = waits = 0
        view: LeasedView | None = None
        try:
            while True:
                view = self._view(owner, sets)
                grant = self._attempt(view, segment, alone)
                if grant is not None:
                    break
                if not waits and self.release_stale():
                    continue
                if view.is_passed_over:
                    useless += 1
                    if useless > max(_MOST_USELESS, len(sets)):  # a block may have one address
                        raise _passed_over(view.wants)
                if waits > _MOST_WAITS and time.monotonic() > pool_deadline + self._patience:
                    raise _still_wanted(view.wants)
                waits += 1
                with interrupts.waiting():
                    self._wait(view, pool_deadline)
        except CNIError as error:
            explained = _explained(error, view)
            self._claims.failed(owner, explained)
            raise explained from None
        self._claims.low(view.low)
        return grant

    def exhausted(self, sets: Sequence[RangeSet]) -> str | None:
        """See SqliteStore.exhausted. Makes no call to the API server."""
        view = self._view(None, [each for each in sets if not each.fixed])
        self.look(view.narrowed)
        why = self._claims.unable(view.wants) if view.wants else None
        return f"{view.why_unconfirmed}: {why}" if why and view.why_unconfirmed else why

    def _view(self, owner: Owner | None, sets: Sequence[RangeSet]) -> LeasedView:
        pod = None
        if self._sticky and owner is not None and owner.pod.namespace and owner.pod.name:
            pod = PodInterface(owner.pod.namespace, owner.pod.name, owner.attachment.ifname)
        return LeasedView(
            owner, sets, self._leased, self.boot, self._boottime, pod, self._unreserved
        )

    def _attempt(self, view: LeasedView, segment: str, alone: Sequence[Range]) -> Grant | None:
        """Returns `None` if the node lacks a block."""
        assert view.owner is not None
        try:
            grant = self.reserve_seen(view.owner, view.narrowed, segment=segment, alone=alone)
        except CNIError as error:
            # On the same link, another domain may hold the addresses that are free in our blocks.
            if error.code != Code.NO_FREE_ADDRESS or not view.want_all():
                raise
            return None
        return None if view.wants else grant

    def _wait(self, view: LeasedView, pool_deadline: float) -> None:
        """Wait until a new block, or a DEL on this node, may provide an address for a set."""
        deadline = time.monotonic() + self._patience
        backoff = Backoff(_AGAIN, _LONGEST_AGAIN)
        while True:
            interrupts.checkpoint()
            try:
                return self._claims.claim(view.wants, deadline)
            except NotReserved as error:
                self._unreserved.add(error.want.pool)
                return None
            except PoolPending:
                if time.monotonic() + _POOL_AGAIN > pool_deadline:
                    raise
                time.sleep(_POOL_AGAIN)
                deadline = time.monotonic() + self._patience
            except LeasesNothing:
                raise
            except CNIError as error:
                if error.code != Code.TRY_AGAIN or time.monotonic() + backoff.next > deadline:
                    raise
                time.sleep(backoff.pause())
            if not view.is_passed_over:
                self.look(view.narrowed)
                if not view.wants:
                    return None


def _explained(error: CNIError, view: LeasedView | None) -> CNIError:
    """Begin the error's text with the reason why a block is not confirmed."""
    why = view.why_unconfirmed if view is not None else ""
    if error.code != Code.TRY_AGAIN or not why:
        return error
    return CNIError(error.code, f"{why}: {error.message}", error.details)


def _passed_over(wants: Sequence[Want]) -> CNIError:
    listed = ", ".join(str(want.range) for want in wants)
    return CNIError(
        Code.NO_FREE_ADDRESS,
        f"the blocks of this node have too few addresses of {listed} that are free on this link, "
        "because pods of other networks use such addresses: nothing was reserved; delete pods "
        "that need no address any more, or widen the range",
    )


def _still_wanted(wants: Sequence[Want]) -> CNIError:
    listed = ", ".join(str(want.range) for want in wants)
    return CNIError(
        Code.TRY_AGAIN,
        f"this node leased blocks for {listed}, but other pods took every free address in them: "
        "nothing was reserved; the runtime tries again",
    )
