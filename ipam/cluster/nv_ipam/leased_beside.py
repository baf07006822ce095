"""What nodes in mode `own` lease of IPPools that overlap a CIDRPool, or did.

A node uses an address of its prefix only after it has written that into its share, and then seen
that the AddressPool of each such IPPool excludes it, and that no block has it. A claim of a block
reads the AddressPool after its block is there. So of the two at least one sees the other. The
controller ends an exclusion only after it has read the pools and then the shares: what it lets go
is in no share, or the pools that a node reads after its share was written do not give it the
address: unless the pool is edited between the controller's look and its change (see "Pools of
nv-ipam that overlap" in docs/cluster-protocol.md). So pools are read here, too, and not taken from
a watch.
"""

from collections.abc import Callable, Iterator, Sequence

from ipam.addresses import Interval, parse_interval
from ipam.cluster import geometry
from ipam.cluster.api import ClusterApi
from ipam.cluster.nv_ipam.objects import NvCIDRPool, NvIPPool
from ipam.cluster.nv_ipam.overlaps import Overlaps
from ipam.cluster.nv_ipam.own_overlaps import pools_of
from ipam.cluster.nv_ipam.own_pools import key_of, name_of, whole_of
from ipam.cluster.nv_ipam.shares import OtherShare, common, intervals, without
from ipam.cluster.objects import AddressBlock, AddressPool, AddressShare
from ipam.nv_ipam.pools import ROUTED

LOOK_EVERY = 30.0  # seconds between two looks at what is leased of a prefix


class LeasedBeside:
    """Implements `LeasedElsewhere` for one agent. `clock` is CLOCK_BOOTTIME.

    `follows`: this node follows IPPools too, and others may lease of them already.
    """

    def __init__(
        self,
        api: ClusterApi,
        namespace: str,
        clock: Callable[[], float],
        *,
        follows: bool = False,
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._clock = clock
        self._follows = follows
        self._look_at: dict[str, float] = {}

    def is_due(self, key: str) -> bool:
        """Whether something was leased of the pool some time ago; it is read again then."""
        at = self._look_at.get(key)
        if at is None or self._clock() < at:
            return False
        del self._look_at[key]
        return True

    def read(self, key: str, runs: Sequence[Interval]) -> Sequence[OtherShare]:
        """What of these runs of the pool is not this node's, whatever its share says. ApiError."""
        found = tuple(each for each in self._now(key, runs) if common(each.intervals, runs))
        if any(each.pool != key for each in found):
            self._look_at[key] = self._clock() + LOOK_EVERY
        return found

    def _now(self, key: str, runs: Sequence[Interval]) -> Iterator[OtherShare]:
        if not key.startswith(ROUTED):
            return
        made = [each for each in self._api.list(AddressPool).items if _meets(each, runs)]
        if self._follows and not made:
            return  # IPPools are followed, too: all is in shares
        ippools = pools_of(self._api, NvIPPool, self._namespace)
        if not made and not any(Overlaps((each,)).meets(each.key, runs) for each in ippools):
            return  # CIDRPools have an entry for each node: they are not read for nothing
        cidrpools = pools_of(self._api, NvCIDRPool, self._namespace)
        pools = {each.key: each for each in (*ippools, *cidrpools)}
        overlaps = Overlaps(pools.values())
        if overlaps.is_private(key):
            return
        # What a watch has shown may be over: then the controller lets go of it, too.
        part = common(runs, overlaps.now(key))
        yield OtherShare(key, "pools that are older", without(runs, part))
        there = {each.metadata.name: each for each in made}
        for other in overlaps.of(key, ()):
            ippool = pools[other]
            if isinstance(ippool, NvIPPool):
                whole = ippool.network
                shared = common(part, (Interval(whole.address, whole.last),))
                present = there.pop(name_of(ippool), None)
                if present is not None or not self._follows:
                    yield from self._of(ippool, shared, present)
        for former in there.values():
            if not overlaps.is_private(key_of(former)):
                yield from self._of_former(former, part)

    def _of(
        self, ippool: NvIPPool, shared: Sequence[Interval], there: AddressPool | None
    ) -> Iterator[OtherShare]:
        """What of `shared` the nodes of that IPPool have, or may lease."""
        key = ippool.key
        if not shared:
            return
        try:
            excluded = there.spec.exclude if there is not None else ()
            open_ = without(shared, map(parse_interval, excluded))
            why = f"nodes by {key} (until podfabric's controller has excluded them there)"
            yield OtherShare(key, why, open_)
            for entry in ippool.entries():
                yield OtherShare(key, f"node {entry.node} by {key}", (entry.interval,))
            # A share takes an entry's place, and a block a share's: so they are read in this order.
            for share in self._api.list(AddressShare, {"spec.pool": key}).items:
                yield OtherShare(key, f"node {share.spec.node} by {key}", intervals(share))
            if there is not None:
                yield from self._leased(key, there)
        except ValueError as error:  # written by hand: it is not known what to leave alone
            yield OtherShare(key, f"nodes by {key} ({error})", tuple(shared))

    def _of_former(self, there: AddressPool, runs: Sequence[Interval]) -> Iterator[OtherShare]:
        """The same of an IPPool that is gone, or has another range now. Its shares stay, too."""
        key = key_of(there)
        try:
            shared = common(runs, (whole_of(there),))
            open_ = without(shared, map(parse_interval, there.spec.exclude))
            why = f"nodes by {key} (until podfabric's controller has shut its former AddressPool)"
            yield OtherShare(key, why, open_)
            for share in self._api.list(AddressShare, {"spec.pool": key}).items:
                yield OtherShare(key, f"node {share.spec.node} by {key}", intervals(share))
            yield from self._leased(key, there)
        except ValueError as error:
            yield OtherShare(key, f"nodes by {key} ({error})", tuple(runs))

    def _leased(self, key: str, there: AddressPool) -> Iterator[OtherShare]:
        for block in self._api.list(AddressBlock, {"spec.pool": there.metadata.name}).items:
            whose = f"node {block.spec.holder.node} by {key}"
            yield OtherShare(key, whose, (geometry.interval(block),))


def _meets(there: AddressPool, runs: Sequence[Interval]) -> bool:
    """Whether it is the AddressPool of an IPPool, and has an address of the runs."""
    try:
        return bool(key_of(there) and common(runs, (whole_of(there),)))
    except ValueError:  # written by hand: `_of` tells of it
        return True
