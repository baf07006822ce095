"""Deletes the AddressReservations of IPAMClaims that are gone.

Kubernetes' garbage collector does that too, by the same link, where it runs and knows the kind. The
proof here: no claim of a consistent list, made after the reservation was seen, has the uid that the
link names, and a uid never comes again.
"""

import logging
from collections.abc import Callable, Iterable

from ipam.cluster.api import ApiError, ClusterApi, Conflict, NotFound, Refused
from ipam.cluster.controller.steps import Steps
from ipam.cluster.ipam_claims import IPAMClaim
from ipam.cluster.objects import AddressReservation
from ipam.cluster.sticky import claim_uid, name_of

LOOK_EVERY = 60.0  # seconds between two lists of all claims

_log = logging.getLogger(__name__)


class ClaimEnds:
    """What one leader remembers of it. `clock` is monotonic."""

    def __init__(self, api: ClusterApi, clock: Callable[[], float]) -> None:
        self._api = api
        self._clock = clock
        self._look_at = clock()

    def step(self, reservations: Iterable[AddressReservation], steps: Steps) -> None:
        """Delete those whose claim is gone, if it is time to look. Without an answer, none is."""
        linked = [(claim_uid(each), each) for each in reservations]
        linked = [(uid, each) for uid, each in linked if uid]
        if not linked or self._clock() < self._look_at:
            return
        self._look_at = self._clock() + LOOK_EVERY
        try:
            claims = self._api.list(IPAMClaim)
        except ApiError as error:
            steps.failed(error)
            return
        uids = {claim.metadata.uid for claim in claims.items}
        uids |= {claim.metadata.uid for claim in claims.unreadable}

        def end(reservation: AddressReservation) -> None:
            try:
                self._api.delete(reservation)
            except (Conflict, NotFound, Refused) as error:
                _log.info("reservation %s: left: %s", name_of(reservation), error)
            else:
                _log.info("reservation %s: its IPAMClaim is gone", name_of(reservation))

        gone = [(name_of(each), each) for uid, each in linked if uid not in uids]
        steps.each("reservations of claims", gone, end)
