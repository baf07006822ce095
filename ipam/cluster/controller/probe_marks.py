"""The marks of addresses that a lost machine may still use, in the status of pools.

`ipam.cluster.probing` says what they are for. A mark is written before the block is freed. It goes
when the holder of a later block says that it has proved the address free: what a watch has shown
does not do for that. A pool that is new has the marks of those that it overlaps.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable, MutableMapping
from itertools import pairwise

from msgspec.structs import replace

from ipam.addresses import Interval, parse_interface, parse_interval
from ipam.cluster import geometry
from ipam.cluster.api import ClusterApi, NotFound
from ipam.cluster.objects import AddressBlock, AddressPool
from ipam.cluster.probing import marks_of, written
from ipam.ranges import common, merged, outside

MOST = 64  # runs of addresses in a status

_log = logging.getLogger(__name__)


def mark(api: ClusterApi, block: AddressBlock, pools: MutableMapping[str, AddressPool]) -> None:
    """Have each address of a block probed by who leases it next. `pools` gets what was written.

    ApiError: then the block must not be freed yet.
    """
    own = pools.get(block.spec.pool)
    if own is not None and geometry.why_wrong(block, own):
        return  # no node leases addresses by it
    try:
        covered = [geometry.interval(block)]
    except ValueError:  # it covers nothing that a node could lease
        covered = []
    is_marked = False
    for name, known in tuple(pools.items()):
        part = tuple(common(_range(known), covered))
        if known.status.space != block.spec.space or not part:
            continue
        try:
            pool = api.get(AddressPool, name)
        except NotFound:
            continue
        wanted = written(narrowed(merged((*marks_of(pool), *part))))
        if wanted != pool.status.probe:
            pool = api.update_status(replace(pool, status=replace(pool.status, probe=wanted)))
        pools[name] = pool
        is_marked = True
    if not is_marked:
        _log.warning(
            "%s: its pool is gone, so no node will probe its addresses: see that the machine of "
            "node %s is off",
            block.metadata.name,
            block.spec.holder.node,
        )


class ProbeMarks:
    """The marks that pools should have, by what `blocks` say was proved."""

    def __init__(self, pools: Iterable[AddressPool], blocks: Iterable[AddressBlock]) -> None:
        self._marked: defaultdict[str, list[Interval]] = defaultdict(list)
        for pool in pools:
            if pool.status.probe:
                self._marked[pool.status.space] += marks_of(pool)
        self._proven: defaultdict[str, list[Interval]] = defaultdict(list)
        for block in blocks if self._marked else ():
            if _is_proof(block):
                self._proven[block.spec.space] += _probed(block)

    def of(self, pool: AddressPool, space: str) -> tuple[str, ...]:
        """Those of a pool whose addresses are unique in `space`."""
        if not (pool.status.probe or space in self._marked):
            return ()
        marked = merged((*marks_of(pool), *self._marked.get(space, ())))
        proven = merged(self._proven.get(space, ()))
        left = [part for run in common(_range(pool), marked) for part in outside(run, proven)]
        return written(narrowed(left))


def narrowed(runs: Iterable[Interval]) -> tuple[Interval, ...]:
    """At most MOST runs that cover these: to probe more does no harm."""
    joined = list(runs)
    while len(joined) > MOST:
        gaps = [after.first - before.last for before, after in pairwise(joined)]
        at = gaps.index(min(gaps))
        joined[at : at + 2] = [Interval(joined[at].first, joined[at + 1].last)]
    return tuple(joined)


def _is_proof(block: AddressBlock) -> bool:
    """Whether its status says what its holder has proved, and not an earlier one, as that of a
    sticky block may."""
    spec = block.spec
    return spec.probe and spec.state == "Active" and not spec.sticky.reservation


def _probed(block: AddressBlock) -> tuple[Interval, ...]:
    try:
        covered = geometry.interval(block)
        return tuple(common([covered], map(parse_interval, block.status.probed)))
    except ValueError:  # a CRD without its rules lets it pass
        return ()


def _range(pool: AddressPool) -> tuple[Interval, ...]:
    """The addresses of a pool; none if its range is unreadable, as nothing is leased of it then."""
    try:
        network = parse_interface(pool.spec.range)[1]
    except ValueError:
        return ()
    return (Interval(network.address, network.last),)
