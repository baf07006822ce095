"""What a node needs an address of, and who leases blocks for it."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from cni.spec.errors import CNIError, Code
from ipam.addresses import Interval, Network
from ipam.ranges import Range
from ipam.store.reservations import Owner

PATIENCE = 10.0
"""Seconds that an ADD waits for a block. A node with little CPU takes some seconds for the requests
of a claim, and a new sandbox costs it far more than the wait."""

POOL_PATIENCE = 15.0
"""Seconds that it waits for a pool before: its definition may be as new as the pod. Both fit well
into the time of a call, which an agent ends after 100 s and a kubelet after 120 s or more."""

PoolRange = tuple[str, Network]
"""Domain and network of a range: what names its AddressPool."""


class PodInterface(NamedTuple):
    """An interface of a pod by its name, which the pod has on every node."""

    namespace: str
    pod: str
    ifname: str


class Want(NamedTuple):
    """A range of which a node needs an address, the very one if it is `fixed`.

    It is the one that is reserved for the name of the pod in `sticky`, if that is given.
    `pool` is the pool's range; it is another than the range itself for a fixed address only.
    """

    range: Range
    pool: PoolRange
    fixed: bool = False
    sticky: PodInterface | None = None

    @property
    def parts(self) -> tuple[Interval, ...]:
        """The addresses that would do."""
        return self.range.parts


class PoolPending(CNIError):
    """There is no pool for a range yet, or it is not ready."""

    def __init__(self, message: str) -> None:
        super().__init__(Code.TRY_AGAIN, message)


class LeasesNothing(CNIError):
    """This process leases nothing, or nothing any more: to wait is of no use."""

    def __init__(self, message: str) -> None:
        super().__init__(Code.TRY_AGAIN, message)


class NotReserved(CNIError):
    """No AddressReservation is for the pod of a want: it gets any address of that pool."""

    def __init__(self, want: Want) -> None:
        super().__init__(Code.TRY_AGAIN, f"no address of {want.range} is reserved for the pod")
        self.want = want


class Claims(Protocol):
    """Who leases blocks for this node."""

    def claim(self, wants: Sequence[Want], deadline: float) -> None:
        """Wait until there may be an address of some, at most until then (`time.monotonic`).

        If there is of none: CNIError 11 if that may succeed later (PoolPending: soon;
        LeasesNothing: not in this process), 110 if the pool has no address left, AddressTaken if
        the one that is wanted cannot be had, NotReserved if none is reserved for a pod's name.
        """

    def low(self, wants: Sequence[Want]) -> None:
        """An address of each was handed out, and this node's blocks have few more."""

    def failed(self, owner: Owner, error: CNIError) -> None:
        """A pod got no address, or one that was not probed."""

    def unable(self, wants: Sequence[Want]) -> str | None:
        """Why `claim` would fail, as far as that is known without asking anybody."""


def of_agent(claims: Claims | None) -> Claims:
    """Those of this process. LeasesNothing if it has none, as it is another than the agent."""
    if claims is None:
        raise LeasesNothing(
            "only podfabric's agent hands out addresses of the cluster: nothing was reserved; have "
            "the runtime start the launcher (`podfabric install`), and see that the agent of this "
            'node runs; for addresses of this node alone set "ipam.scope" to node'
        )
    return claims
