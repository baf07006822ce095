"""Deletes AddressReservations whose pod or StatefulSet is gone for good, where their pool says so.

A reservation names its owner, and may be older than that. So the controller writes the uid of the
owner that it has seen into the status, and a reservation without one stays. It is deleted when for
`spec.sticky.ownerGoneAfter` no such owner was there and no node had one of the addresses. What
mirrors show begins that wait and ends it; the deletion rests on reads of the pool, the owner and
the blocks that come right before it, and names the version of the reservation. All times are of
this process. How long it has counted it writes into the status now and then, from where a new
leader counts on: no clock of another machine counts, and no time in which none led.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime

import msgspec
from msgspec.structs import replace

from ipam.cluster.api import ClusterApi, Conflict, NotFound, Refused
from ipam.cluster.controller.steps import Steps
from ipam.cluster.durations import seconds
from ipam.cluster.objects import AddressBlock, AddressPool, AddressReservation, Resource
from ipam.cluster.sticky import is_let_go, name_of

LOOK_EVERY = 60.0  # seconds between two looks for one owner
MOST_LOOKS = 40  # of a round: two seconds of a client's requests
TELL_EVERY = 3600.0  # seconds at most between two writes of how long an owner is gone
_PARTS = 20  # of the wait, after each of which it is written: a new leader repeats one

_log = logging.getLogger(__name__)


class PodObject(Resource, frozen=True, kw_only=True):
    """A Pod, of which the metadata alone is read."""

    API = "v1"
    KIND = "Pod"
    PLURAL = "pods"


class StatefulSetObject(Resource, frozen=True, kw_only=True):
    """A StatefulSet, of which the metadata alone is read."""

    API = "apps/v1"
    KIND = "StatefulSet"
    PLURAL = "statefulsets"


_KINDS: Mapping[str, type[Resource]] = {"Pod": PodObject, "StatefulSet": StatefulSetObject}


class _OwnerLook(msgspec.Struct, frozen=True):
    """When the owner was looked for, and its uid; "" if there was none."""

    time: float
    uid: str


class OwnerEnds:
    """What one leader remembers of it. `clock` is monotonic, `wall` gives times for people."""

    def __init__(
        self, api: ClusterApi, clock: Callable[[], float], wall: Callable[[], float]
    ) -> None:
        self._api = api
        self._clock = clock
        self._wall = wall
        self._looks: dict[str, _OwnerLook] = {}  # by the reservation's uid
        self._gone_since: dict[str, float | None] = {}  # the same; None if the wait has ended

    def step(
        self,
        reservations: Iterable[AddressReservation],
        blocks: Iterable[AddressBlock],
        pools: Mapping[str, AddressPool],
        steps: Steps,
    ) -> None:
        """Look for the owners that are due, write what became of them, and delete what has waited.

        What fails is left for the next round.
        """
        asked: list[AddressReservation] = []
        others: list[AddressReservation] = []
        for each in reservations:
            (asked if _wait(each, pools.get(each.spec.pool)) else others).append(each)
        uids = {each.metadata.uid for each in asked}
        self._looks = {uid: each for uid, each in self._looks.items() if uid in uids}
        self._gone_since = {uid: at for uid, at in self._gone_since.items() if uid in uids}
        due = [(name_of(each), each) for each in self._due(asked)]
        steps.each("owners of reservations", due, self._look)
        used = {block.spec.sticky.reservation for block in blocks if not is_let_go(block)}
        ended = []
        changed = [
            (name_of(each), _with(each, each.status.owner_uid))
            for each in others
            if each.status.owner_gone_since  # the pool asked for it before
        ]
        for each in asked:
            wanted = self._seen(each, pools[each.spec.pool], is_used=name_of(each) in used)
            if wanted != each:
                changed.append((name_of(each), wanted))
            elif self._has_waited(each, pools.get(each.spec.pool)):
                ended.append((name_of(each), each))
        steps.each("owners in the status of reservations", changed, self._tell)
        steps.each("reservations of owners that are gone", ended[:MOST_LOOKS], self._end)

    def _due(self, asked: Iterable[AddressReservation]) -> list[AddressReservation]:
        """Those whose owner was not looked for lately, the longest wait first."""
        now = self._clock()
        at = {uid: look.time for uid, look in self._looks.items()}
        never = now - LOOK_EVERY
        due = [each for each in asked if now - at.get(each.metadata.uid, never) >= LOOK_EVERY]
        return sorted(due, key=lambda each: at.get(each.metadata.uid, never))[:MOST_LOOKS]

    def _look(self, reservation: AddressReservation) -> None:
        now = self._clock()
        self._looks[reservation.metadata.uid] = _OwnerLook(now, self._owner(reservation))

    def _owner(self, reservation: AddressReservation) -> str:
        """The uid of the owner as it is now, "" if there is none. ApiError."""
        owner = reservation.spec.owner
        try:
            found = self._api.get(_KINDS[owner.kind], owner.name, reservation.metadata.namespace)
        except NotFound:
            return ""
        return found.metadata.uid

    def _seen(
        self, reservation: AddressReservation, pool: AddressPool, *, is_used: bool
    ) -> AddressReservation:
        """The reservation with the status that the last look, and the blocks, ask for."""
        uid, status = reservation.metadata.uid, reservation.status
        look = self._looks.get(uid)
        if look is None:  # it could not be looked for
            return reservation
        if look.uid or is_used or not status.owner_uid:
            self._gone_since[uid] = None
            return _with(reservation, look.uid or status.owner_uid)
        now = self._clock()
        # What a former leader has counted counts when this one sees the reservation first.
        since = self._gone_since.get(uid, now - status.owner_gone_seconds)
        self._gone_since[uid] = since = now if since is None else since
        counted, wait = round(now - since), _wait(reservation, pool) or 0.0
        news = counted - status.owner_gone_seconds
        if counted >= wait or news < min(TELL_EVERY, max(LOOK_EVERY, wait / _PARTS)):
            counted = min(counted, status.owner_gone_seconds)
        return _with(reservation, status.owner_uid, status.owner_gone_since or self._now(), counted)

    def _has_waited(self, reservation: AddressReservation, pool: AddressPool | None) -> bool:
        since, wait = self._gone_since.get(reservation.metadata.uid), _wait(reservation, pool)
        return since is not None and wait is not None and self._clock() - since >= wait

    def _tell(self, changed: AddressReservation) -> None:
        try:
            self._api.update_status(changed)
        except (Conflict, NotFound, Refused) as error:
            _log.info("reservation %s: status left: %s", name_of(changed), error)

    def _end(self, reservation: AddressReservation) -> None:
        """Delete the reservation if all that it rests on is so now. ApiError."""
        name, uid = name_of(reservation), reservation.metadata.uid
        try:
            pool = self._api.get(AddressPool, reservation.spec.pool)
            if not self._has_waited(reservation, pool):
                return
            listed = self._api.list(AddressBlock, {"spec.sticky.reservation": name}).items
            if not all(map(is_let_go, listed)) or self._owner(reservation):
                self._gone_since[uid] = None
                self._looks.pop(uid, None)
                return
            self._api.delete(reservation)
        except (Conflict, NotFound, Refused) as error:
            _log.info("reservation %s: left: %s", name, error)
        else:
            self._gone_since[uid] = None  # one with a finalizer waits again
            owner = reservation.spec.owner
            _log.warning(
                "reservation %s: deleted: its %s %s is gone since %s, and no pod has its addresses",
                *(name, owner.kind, owner.name, reservation.status.owner_gone_since),
            )

    def _now(self) -> str:
        return datetime.fromtimestamp(self._wall(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _with(
    reservation: AddressReservation, uid: str, gone_since: str = "", gone_seconds: int = 0
) -> AddressReservation:
    status = replace(
        reservation.status,
        owner_uid=uid,
        owner_gone_since=gone_since,
        owner_gone_seconds=gone_seconds,
    )
    return replace(reservation, status=status)


def _wait(reservation: AddressReservation, pool: AddressPool | None) -> float | None:
    """For how many seconds the owner must be gone; None if that ends nothing."""
    if pool is None or reservation.spec.owner.kind not in _KINDS:
        return None
    try:
        return seconds(pool.spec.sticky.owner_gone_after) or None
    except ValueError:
        return None
