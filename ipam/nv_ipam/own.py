"""The verbs of a network whose IPAM plugin is nv-ipam, where podfabric leases the addresses of its
pools (`ipam.nv_ipam: own`): nv-ipam's controller is gone.

What a request may have is worked out as in mode follow, but an entry is the whole pool: which of it
this node hands out is for the blocks that it leases.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cni.spec.errors import CNIError, Code, invalid_config
from cni.spec.request import Request
from cni.spec.result import Result
from ipam.nv_ipam import importing
from ipam.nv_ipam.options import NvIpamOptions
from ipam.nv_ipam.plugin import NvIpam, ip_of
from ipam.nv_ipam.pools import OWN_FILE, NodePools, PoolsFile
from ipam.nv_ipam.requests import ResolvedRequest, resolved
from ipam.ranges import RangeSet
from ipam.sqlite_store import SqliteStore
from ipam.store import Grant, Owner

if TYPE_CHECKING:
    from ipam.cluster.store import ClusterStore
    from ipam.cluster.wants import Claims


class OwnNvIpam(NvIpam):
    """As NvIpam. `claims` leases blocks for this node; None in a process that is not the agent.
    `timing` is ClusterStore's."""

    def __init__(
        self,
        directory: Path,
        conf: Path,
        claims: "Claims | None" = None,
        **timing: Any,  # noqa: ANN401 - a clock, and seconds
    ) -> None:
        super().__init__(directory, conf)
        self._file = PoolsFile(directory, OWN_FILE)
        self._claims = claims
        self._timing = timing

    def reserve(
        self,
        store: SqliteStore,
        owner: Owner,
        request: Request,
        segment: str,
        answerable: Callable[[Sequence[RangeSet]], None],
    ) -> tuple[Result, Grant, tuple[RangeSet, ...]]:
        """See NvIpam.reserve."""
        options = self._options(request)
        known = self._file.read()
        found = self._resolved(options, known)
        answerable(found.sets)
        # Of a pod whose address the daemon gave: first its network is put right.
        store.revise(lambda tables: importing.imported(tables, owner))
        try:
            grant = self._leasing(store, found.sets).reserve(owner, found.sets, segment=segment)
        except CNIError as error:
            if error.code != Code.NO_FREE_ADDRESS:
                raise
            node = known.node if known else ""
            raise CNIError(
                error.code, f"{', '.join(options.pools)} on node {node}: {error.message}"
            ) from None
        ips = tuple(map(ip_of, grant.granted))
        return Result(ips=ips, routes=found.routes), grant, found.sets

    def status(self, store: SqliteStore, request: Request) -> str | None:
        """See NvIpam.status."""
        plain = NvIpamOptions(pools=self._options(request).pools)
        sets = self._resolved(plain, self._file.read()).sets
        return self._leasing(store, sets).exhausted(sets)

    def _leasing(self, store: SqliteStore, sets: Sequence[RangeSet]) -> "ClusterStore":
        from ipam.cluster.store import ClusterStore  # most nodes never need it
        from ipam.cluster.wants import NoClaims

        leased = {(each.domain, each.network) for set_ in sets for each in set_.ranges}
        return ClusterStore(store, self._claims or NoClaims(), leased, **self._timing)

    def _resolved(self, options: NvIpamOptions, known: NodePools | None) -> ResolvedRequest:
        """The sets of a request. CNIError 7 for what no pool can give, 11 for what cannot be given
        now."""
        if options.index is not None:
            raise invalid_config(
                '"args.cni.allocateIPWithIndex" needs a node with one block, and podfabric leases '
                'several to a node: ask for an address by "args.cni.ips" instead'
            )
        for key in options.pools:
            if not key.startswith("ippool/"):
                raise invalid_config(
                    f'{key}: with "ipam.nv_ipam": own podfabric has no CIDRPools: use an IPPool, '
                    "or set ipam.nv_ipam to follow on all nodes"
                )
            pool = known.pools.get(key) if known is not None else None
            if pool is not None and pool.entry is None:
                raise CNIError(
                    Code.TRY_AGAIN,
                    f"{key} ({pool.network}) has no addresses for this node: nothing was reserved; "
                    "see that the pool's nodeSelector selects the node, and that its spec is valid "
                    "(the log of the node's agent says what is not)",
                )
        return resolved(options, known)
