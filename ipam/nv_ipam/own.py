"""The verbs of a network whose IPAM plugin is nv-ipam, where podfabric leases the addresses of its
pools (`ipam.nv_ipam: own`): nv-ipam's controller is gone.

What a request may have is worked out as in mode follow, but the entry of an IPPool is the whole
pool: which of it this node hands out is for the blocks that it leases. Of a CIDRPool each node has
one prefix, which podfabric's controller gives it: there all is as in mode follow.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from cni.spec.errors import CNIError, Code, invalid_config
from cni.spec.request import Request
from cni.spec.result import Result
from ipam.addresses import Network
from ipam.confirmed import boottime
from ipam.nv_ipam import importing
from ipam.nv_ipam.options import NvIpamOptions
from ipam.nv_ipam.plugin import NvIpam, PoolSource, ip_of
from ipam.nv_ipam.pools import OWN_FILE, ROUTED, NodePools, PoolsFile
from ipam.nv_ipam.requests import ResolvedRequest, left_to_older, resolved
from ipam.ranges import RangeSet
from ipam.sqlite_store import SqliteStore
from ipam.store import Grant, Owner, Quota

if TYPE_CHECKING:
    from ipam.cluster.store import ClusterStore
    from ipam.cluster.wants import Claims


class OwnNvIpam(NvIpam):
    """As NvIpam. `claims` leases blocks for this node; None in a process that is not the agent.
    `follower` is for CIDRPools. `timing` is ClusterStore's."""

    def __init__(
        self,
        directory: Path,
        conf: Path,
        claims: "Claims | None" = None,
        follower: PoolSource | None = None,
        **timing: Any,  # noqa: ANN401 - a clock, and seconds
    ) -> None:
        super().__init__(directory, conf)
        self._file = PoolsFile(directory, OWN_FILE)
        self._claims = claims
        self._timing = timing
        self._routed = NvIpam(directory, conf, follower, timing.get("clock", boottime))

    def reserve(
        self,
        store: SqliteStore,
        owner: Owner,
        request: Request,
        segment: str,
        answerable: Callable[[Sequence[RangeSet]], Quota | None],
    ) -> tuple[Result, Grant, tuple[RangeSet, ...]]:
        """See NvIpam.reserve."""
        options = self._options(request)
        if _is_routed(options):
            return self._routed.reserve(store, owner, request, segment, answerable)
        importing.require_open(self._directory)
        known = self._file.read()
        found = self._resolved(options, known)
        owner = replace(owner, quota=answerable(found.sets))
        # Of a pod whose address the daemon gave: first its network is put right.
        store.revise(lambda tables: importing.imported(tables, owner))
        try:
            grant = self._leasing(store, found.sets).reserve(owner, found.sets, segment=segment)
        except CNIError as error:
            if error.code != Code.NO_FREE_ADDRESS:
                raise
            raise _explained(error, options, known) from None
        try:
            importing.require_open(self._directory)
        except CNIError:
            store.undo(grant)  # it may have been reserved after the daemon's store was written
            raise
        ips = tuple(map(ip_of, grant.granted))
        return Result(ips=ips, routes=found.routes), grant, found.sets

    def status(self, store: SqliteStore, request: Request) -> str | None:
        """See NvIpam.status."""
        plain = NvIpamOptions(pools=self._options(request).pools)
        if _is_routed(plain):
            return self._routed.status(store, request)
        importing.require_open(self._directory)
        sets = self._resolved(plain, self._file.read()).sets
        return self._leasing(store, sets).exhausted(sets)

    def homes(self, request: Request) -> Callable[[int, Network], tuple[str, Network]]:
        """See NvIpam.homes."""
        if _is_routed(self._options(request)):
            return self._routed.homes(request)
        return super().homes(request)

    def _leasing(self, store: SqliteStore, sets: Sequence[RangeSet]) -> "ClusterStore":
        from ipam.cluster.store import ClusterStore  # most nodes never need it
        from ipam.cluster.wants import of_agent

        leased = {(each.domain, each.network) for set_ in sets for each in set_.ranges}
        return ClusterStore(store, of_agent(self._claims), leased, **self._timing)

    def _resolved(self, options: NvIpamOptions, known: NodePools | None) -> ResolvedRequest:
        """The sets of a request. CNIError 7 for what no pool can give, 11 for what cannot be given
        now."""
        if options.index is not None:
            raise invalid_config(
                '"args.cni.allocateIPWithIndex" needs a node with one block, and podfabric leases '
                'several to a node: ask for an address by "args.cni.ips" instead'
            )
        for key in options.pools:
            pool = known.pools.get(key) if known is not None else None
            if pool is not None and pool.entry is None:
                raise CNIError(
                    Code.TRY_AGAIN,
                    f"{key} ({pool.network}) has no addresses for this node: nothing was reserved; "
                    "see that the pool's nodeSelector selects the node, and that its spec is valid "
                    "(the log of the node's agent says what is not)",
                )
            if pool is not None and pool.is_left_to_older:
                raise CNIError(Code.NO_FREE_ADDRESS, f"{left_to_older(pool)}: nothing was reserved")
        return resolved(options, known)


def _explained(error: CNIError, options: NvIpamOptions, known: NodePools | None) -> CNIError:
    """The error of a full pool, with the pools and what older ones have of them."""
    node, found = (known.node, known.pools) if known is not None else ("", {})
    pools = [found[key] for key in options.pools if key in found]
    lines = [f"{', '.join(options.pools)} on node {node}", *map(left_to_older, pools)]
    return CNIError(error.code, f"{'; '.join(filter(None, lines))}: {error.message}")


def _is_routed(options: NvIpamOptions) -> bool:
    """Whether the pools are CIDRPools. CNIError 7 for pools of both kinds, which nv-ipam's own
    definitions cannot name: blocks and prefixes are not reserved in one transaction."""
    routed = {key.startswith(ROUTED) for key in options.pools}
    if len(routed) > 1:
        raise invalid_config(
            f'{", ".join(options.pools)}: with "ipam.nv_ipam": own a network has either IPPools or '
            "CIDRPools: make a network of each"
        )
    return True in routed
