"""Requests for addresses of leased blocks, and the interface of the process that leases them."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from cni.spec.errors import CNIError, Code
from ipam.addresses import Network
from ipam.leases.block_layout import pool_name
from ipam.ranges import Range
from ipam.store.reservations import Owner

PATIENCE = 10.0
"""Seconds that an ADD waits for a block: on a slow node, a claim takes some seconds."""

POOL_PATIENCE = 15.0
"""Seconds that an ADD first waits for a pool, whose definition may be as new as the pod. Both waits
fit into a call: an agent ends it after 100 s, a kubelet after 120 s or more."""

PoolRange = tuple[str, Network]
"""Domain and network of a range, which name its AddressPool."""


class PodInterface(NamedTuple):
    """An interface of a pod by name, the same on every node."""

    namespace: str
    pod: str
    ifname: str


class Want(NamedTuple):
    """A range of which a node needs an address; `fixed`: exactly the range's one address.

    With `sticky`, only the address that is reserved for that pod interface will do. `pool` is the
    pool's range. It differs from the range itself for a fixed address only.
    """

    range: Range
    pool: PoolRange
    fixed: bool = False
    sticky: PodInterface | None = None

    @property
    def pool_name(self) -> str:
        """The name of the AddressPool with these addresses."""
        domain, network = self.pool
        name, private, _ = domain.partition(" ")
        return pool_name(name, str(network), shared=not private)


class PoolPending(CNIError):
    """A range has no pool yet, or its pool is not ready."""

    def __init__(self, message: str) -> None:
        super().__init__(Code.TRY_AGAIN, message)


class LeasesNothing(CNIError):
    """This process cannot lease blocks. Waiting does not help."""

    def __init__(self, message: str) -> None:
        super().__init__(Code.TRY_AGAIN, message)


class NotReserved(CNIError):
    """No AddressReservation is for the pod of a want. The pod gets any address of the pool."""

    def __init__(self, want: Want) -> None:
        super().__init__(Code.TRY_AGAIN, f"no address of {want.range} is reserved for the pod")
        self.want = want


class Claims(Protocol):
    """Leases blocks for this node."""

    def claim(self, wants: Sequence[Want], deadline: float) -> None:
        """Wait until one of the wants may have an address, at most until `deadline`
        (`time.monotonic`).

        Raises CNIError 11 if a later try may succeed (PoolPending: soon; LeasesNothing: not in this
        process), 110 if the pool has no address left, AddressTaken if the fixed address is taken,
        NotReserved if no address is reserved for the pod's name.
        """

    def low(self, wants: Sequence[Want]) -> None:
        """Report that an address of each was handed out, and few are left in this node's blocks."""

    def failed(self, owner: Owner, error: CNIError) -> None:
        """Report that a pod got no address, or an address without a probe."""

    def unable(self, wants: Sequence[Want]) -> str | None:
        """Why `claim` would probably fail, without a request."""


def of_agent(claims: Claims | None) -> Claims:
    """The claims of this process. Raises LeasesNothing if this process is not the agent."""
    if claims is None:
        raise LeasesNothing(
            "only podfabric's agent hands out addresses of the cluster: nothing was reserved; have "
            "the runtime start the launcher (`podfabric install`), and see that the agent of this "
            'node runs; for addresses of this node alone set "ipam.scope" to node'
        )
    return claims
