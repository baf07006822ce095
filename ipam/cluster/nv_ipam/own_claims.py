"""Claims of blocks of nv-ipam's pools: not before it is sure what other nodes' pods may hold."""

from collections.abc import Callable, Collection, Mapping, Sequence

from cni.spec.errors import CNIError
from ipam.cluster.wants import Claims, Occupancy, PoolPending, PoolRange, Want
from ipam.store import Grant, Owner


class OwnClaims:
    """Implements `Claims` over others. `why_not` says why nothing of a domain may be leased now;
    None if it may."""

    def __init__(self, claims: Claims, why_not: Callable[[str], str | None]) -> None:
        self._claims = claims
        self._why_not = why_not

    def claim(self, wants: Sequence[Want], deadline: float) -> None:
        """See Claims.claim."""
        why = self._why(wants)
        if why is not None:
            raise PoolPending(why)
        self._claims.claim(wants, deadline)

    def kept(self, owner: Owner, ranges: Collection[PoolRange]) -> Mapping[PoolRange, int]:
        """See Claims.kept: whereabouts knows nothing of these pools."""
        return {}

    def announce(self, owner: Owner, grant: Grant) -> bool:
        """See Claims.announce: there is nothing to tell whereabouts."""
        return True

    def used(self, want: Want, occupancy: Occupancy) -> None:
        """See Claims.used: it may lease more."""
        if self._why((want,)) is None:
            self._claims.used(want, occupancy)

    def failed(self, owner: Owner, error: CNIError) -> None:
        """See Claims.failed."""
        self._claims.failed(owner, error)

    def unable(self, wants: Sequence[Want]) -> str | None:
        """See Claims.unable."""
        return self._why(wants) or self._claims.unable(wants)

    def _why(self, wants: Sequence[Want]) -> str | None:
        reasons = (self._why_not(want.range.domain) for want in wants)
        return next((why for why in reasons if why is not None), None)
