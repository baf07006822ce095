"""Frees the blocks of dead holders: fence, wait, release.

A proof must hold for a while, because someone may delete a Node object by mistake. Then the
controller fences the block. The state becomes `Reclaiming`, and the holder can no longer confirm
the block. Unless the machine was off, the controller waits for maxOffline and a margin. After this
wait, no node reserves addresses of the block. But the holder's pods may still run. So the
controller drains the block with `probe`, and the next holder probes the addresses. A sticky block
is always drained. If the machine was off, other blocks are deleted.

A living holder answers the fence by writing `Active`, which changes the resource version. A release
names the fence's version, so a release after this answer fails. This process measures all times, so
a new leader waits again.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from ipam.controller.death_proofs import POWERED_OFF, PROOFS, Machines, Standing
from ipam.controller.steps import Steps, unless_changed
from ipam.leases.block_layout import why_wrong
from ipam.leases.objects import AddressBlock, AddressPool, Holder, ReclaimSpec
from ipam.leases.pool_cache import seconds
from ipam.leases.sticky import drain, is_let_go
from kube.client import ClusterApi
from kube.informer import Polled
from kube.resources import Conflict, NotFound

TAINTED_FOR = 60.0  # seconds
REBOOTED_FOR = 600.0  # seconds: the agent on the machine may adopt the blocks meanwhile
MARGIN = 300.0  # seconds after maxOffline, for clocks that differ by 1 % and a request under way
FRESH = 10.0  # most seconds since the last poll of the Nodes when a step begins
MOST_STEPS = 200  # fences and deletions of a round, so that a round ends soon


_log = logging.getLogger(__name__)


class ReclaimCounts(msgspec.Struct):
    """Counts of steps since the process started, for metrics."""

    fenced: int = 0
    freed: int = 0
    answered: int = 0


class _Since(NamedTuple):
    """The time when a standing began, on this process' clock."""

    standing: Standing
    time: float


class _Fence(NamedTuple):
    """`version` is the resource version of the fenced block. `time` is when this process first read
    the fence. `before` is the version before the fence, or "" if another process made the fence."""

    version: str
    time: float
    before: str = ""


class Reclaim:
    """The proofs and fences of one leader. `clock` is monotonic."""

    def __init__(
        self,
        api: ClusterApi,
        clock: Callable[[], float],
        counts: ReclaimCounts,
        margin: float = MARGIN,
    ) -> None:
        self._api = api
        self._clock = clock
        self._counts = counts
        self._margin = margin
        self._since: dict[Holder, _Since] = {}
        self._fences: dict[str, _Fence] = {}  # by the block's uid

    def step(
        self,
        blocks: Iterable[AddressBlock],
        pools: Mapping[str, AddressPool],
        machines: Machines,
        polled: Polled,
        steps: Steps,
    ) -> dict[str, Standing]:
        """Do what the proofs allow now.

        Returns the standing of each block's holder, by block name. `machines` has the Nodes that
        the poll `polled` read. If the poll is older than FRESH, no step is done. A release needs a
        proof that was read after the fence."""
        blocks = tuple(blocks)
        standings = {block.holder: machines.standing(block.holder) for block in blocks}
        self._note(standings)
        uids = {block.metadata.uid for block in blocks}
        self._fences = {uid: fenced for uid, fenced in self._fences.items() if uid in uids}
        ripe = []
        for block in blocks:
            if is_let_go(block):
                continue
            standing = standings[block.holder]
            fenced = self._fences.get(block.metadata.uid)
            # A watch may show the block as it was before the fence.
            is_old = fenced is not None and fenced.before == block.metadata.resource_version
            if fenced is not None and block.spec.state != "Reclaiming" and not is_old:
                del self._fences[block.metadata.uid]
                self._counts.answered += 1
                _log.info("%s: the holder answered the fence and keeps it", block.metadata.name)
            if standing not in PROOFS:
                self._fences.pop(block.metadata.uid, None)  # a later proof waits again
                continue
            if not is_old and self._is_ripe(block, standing, pools):
                ripe.append((block.metadata.name, block))
        left = MOST_STEPS

        def free(block: AddressBlock) -> None:
            nonlocal left
            if left > 0 and self._clock() - polled.ended < FRESH:
                left -= self._free(block, standings[block.holder], pools, machines, polled.began)

        steps.each("reclaim", ripe, free)
        return {block.metadata.name: standings[block.holder] for block in blocks}

    def _note(self, standings: Mapping[Holder, Standing]) -> None:
        """Record when the standing of each holder began."""
        now = self._clock()
        former, self._since = self._since, {}
        for holder, standing in standings.items():
            last = former.get(holder)
            unchanged = last is not None and last.standing is standing
            self._since[holder] = last if last and unchanged else _Since(standing, now)
            if not unchanged and standing in PROOFS:
                _log.info(
                    "%s (store %s): its node %s", holder.node, holder.instance, standing.value
                )

    def _is_ripe(
        self, block: AddressBlock, standing: Standing, pools: Mapping[str, AddressPool]
    ) -> bool:
        patience = {Standing.OUT_OF_SERVICE: TAINTED_FOR, Standing.REBOOTED: REBOOTED_FOR}
        needed = patience.get(standing)
        if needed is None:
            pool = pools.get(block.spec.pool)
            needed = _gone_after(pool.spec.reclaim if pool is not None else ReclaimSpec())
        return self._clock() - self._since[block.holder].time >= needed

    def _free(
        self,
        block: AddressBlock,
        standing: Standing,
        pools: Mapping[str, AddressPool],
        machines: Machines,
        read_at: float,
    ) -> int:
        """Fence the block, or free the block after the wait. Returns the number of requests."""
        meta = block.metadata
        with unless_changed(_log, meta.name):
            if block.spec.state != "Reclaiming":
                if self._has_pods(block, machines):
                    return 1
                block = fence(self._api, block)
                self._counts.fenced += 1
                _log.warning(
                    "%s: fenced: the node %s %s", meta.name, block.holder.node, standing.value
                )
                version = block.metadata.resource_version
                self._fences[meta.uid] = _Fence(version, self._clock(), meta.resource_version)
                return 1
            fenced = self._fences.get(meta.uid)
            if fenced is None or fenced.version != meta.resource_version:
                # Fenced by an earlier leader, or changed since: the wait begins now.
                self._fences[meta.uid] = _Fence(meta.resource_version, self._clock())
                return 0
            wait = block.spec.max_offline_seconds + self._margin
            is_over = standing in POWERED_OFF or self._clock() - fenced.time >= wait
            if not is_over or read_at < fenced.time:
                return 0
            if self._has_pods(block, machines):
                return 1
            pool = pools.get(block.spec.pool)
            is_wrong = pool is not None and bool(
                why_wrong(block, pool)
            )  # no node uses such a block
            give_to_others(self._api, block, probe=standing not in POWERED_OFF and not is_wrong)
            self._counts.freed += 1
            _log.warning("%s: freed: the node %s %s", meta.name, block.holder.node, standing.value)
        return 1

    def _has_pods(self, block: AddressBlock, machines: Machines) -> bool:
        """Whether pods are bound to the name of a missing Node. If so, the wait starts again. Asks
        the API server only before a fence or a release, because many Nodes may be gone."""
        holder = block.holder
        if self._since[holder].standing is not Standing.GONE or machines.has(holder.node):
            return False
        if not self._api.has_pods(holder.node):
            return False
        self._since[holder] = _Since(Standing.GONE, self._clock())
        self._fences.pop(block.metadata.uid, None)
        return True


def fence(api: ClusterApi, block: AddressBlock) -> AddressBlock:
    """Set the state Reclaiming. Raises Conflict, NotFound, Unavailable."""
    return api.update(replace(block, spec=replace(block.spec, state="Reclaiming")))


def give_to_others(api: ClusterApi, block: AddressBlock, *, probe: bool = False) -> None:
    """Release a fenced block. With `probe`, the next holder probes, because the machine may still
    run. Raises Conflict, NotFound, Refused, Unavailable."""
    if block.spec.sticky.reservation or probe or block.spec.probe:
        drain(api, block, probe=probe or block.spec.probe)
    else:
        api.delete(block)


def free_powered_off(api: ClusterApi, block: AddressBlock) -> bool:
    """Free a block, because an administrator says that the holder's machine is off. Fences first,
    so that a living holder can answer before the release. Returns False if the block changed."""
    try:
        if is_let_go(block):
            return True
        fenced = block if block.spec.state == "Reclaiming" else fence(api, block)
        give_to_others(api, fenced)
    except NotFound:
        return True
    except Conflict:
        return False
    return True


def _gone_after(reclaim: ReclaimSpec) -> float:
    try:
        return seconds(reclaim.node_gone_after)
    except ValueError:  # a CRD without rules accepts it
        return seconds(ReclaimSpec().node_gone_after)
