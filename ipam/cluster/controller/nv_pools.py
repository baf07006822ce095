"""Makes an AddressPool of each IPPool of nv-ipam, and keeps it as the IPPool says."""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from cni.spec.errors import CNIError
from ipam.addresses import Interval
from ipam.cluster.api import AlreadyExists, ClusterApi, Conflict, NotFound, Refused
from ipam.cluster.controller.reports import Reports
from ipam.cluster.controller.steps import Steps
from ipam.cluster.nv_ipam.objects import Invalid, NvIPPool, NvPool
from ipam.cluster.nv_ipam.own_overlaps import OwnPools, beside_now
from ipam.cluster.nv_ipam.own_pools import (
    address_pool,
    changed,
    closed,
    excluded,
    name_of,
    shut,
    waiting,
)
from ipam.cluster.objects import AddressBlock, AddressPool, AddressShare

REFUSED_AGAIN = 60.0  # seconds until a pool that was refused is made again

_log = logging.getLogger(__name__)


class NvPools:
    """The memory of one leader. `namespace` is that of the IPPools, "" where they are not ours."""

    def __init__(
        self, api: ClusterApi, clock: Callable[[], float], reports: Reports, namespace: str
    ) -> None:
        self._api = api
        self._clock = clock
        self._reports = reports
        self._namespace = namespace
        self._refused: dict[str, float] = {}  # when, by the IPPool's name

    def keep(
        self,
        nv_pools: Sequence[NvPool],
        shares: Sequence[AddressShare],
        pools: dict[str, AddressPool],
        blocks: Sequence[AddressBlock],
        steps: Steps,
    ) -> int:
        """Bring the pools up to date, on the API server and in `pools`; how many IPPools get none.
        `nv_pools` are those of both kinds.

        What is excluded must not rest on what a watch has shown: before each change it is read.
        """
        if not self._namespace:
            return 0
        ippools = [pool for pool in nv_pools if isinstance(pool, NvIPPool)]
        names = {pool.metadata.name for pool in ippools}
        self._refused = {name: at for name, at in self._refused.items() if name in names}
        unusable = list[str]()
        due = []
        world = OwnPools.of(nv_pools, shares, pools, blocks)
        for pool in ippools:
            try:
                if self._is_due(pool, world):
                    due.append((pool.metadata.name, pool.metadata.name))
            except (Invalid, CNIError) as error:
                unusable.append(pool.metadata.name)
                self._reports.resource("InvalidPool", f"it gets no AddressPool: {error}", pool)
        steps.each("pools of nv-ipam", due, partial(self._write, pools, world))
        former = [each for each in world.former if shut(each, world.present(each)) != each]
        names_of = [(each.metadata.name, each.metadata.name) for each in former]
        steps.each("former pools of nv-ipam", names_of, partial(self._shut, pools))
        return len(unusable) + len(self._refused)

    def kept_out(self, ippools: Sequence[NvIPPool]) -> dict[str, tuple[Interval, ...]]:
        """What each IPPool excludes, by its AddressPool; nothing of one that cannot be used."""
        found = dict[str, tuple[Interval, ...]]()
        for pool in ippools if self._namespace else ():
            with suppress(Invalid, CNIError):
                found[name_of(pool)] = excluded(pool)
        return found

    def _is_due(self, pool: NvIPPool, world: OwnPools) -> bool:
        refused = self._refused.get(pool.metadata.name)
        if refused is not None and self._clock() - refused < REFUSED_AGAIN:
            return False
        there = world.pools.get(name_of(pool))
        shares = world.shares.get(pool.key, ())
        left = waiting(pool, shares, there)
        wanted = address_pool(left, shares, world.beside(pool))
        if there is None or left != pool:
            return True
        if there.spec.network_name != wanted.spec.network_name:
            raise Invalid(f"AddressPool {there.metadata.name} is another network's")
        return changed(there, wanted) != there

    def _shut(self, pools: dict[str, AddressPool], name: str) -> None:
        """Have nothing more leased of a pool that no IPPool names now, but what that leases by the
        range that it has now: other pools get its addresses when its blocks are gone."""
        ippools = self._api.list(NvIPPool, namespace=self._namespace).items
        there = {each.metadata.name: each for each in self._api.list(AddressPool).items}
        world = OwnPools.of(ippools, (), there, ())
        for each in world.former:
            wanted = shut(each, world.present(each))
            if each.metadata.name != name or wanted == each:
                continue
            try:
                pools[name] = self._api.update(wanted)
            except (Conflict, NotFound):
                return  # the next round sees it
            _log.info("pool %s: shut: no IPPool of nv-ipam is of that range now", name)

    def _write(self, pools: dict[str, AddressPool], seen: OwnPools, name: str) -> None:
        """Make or change the pool of an IPPool, by what is there now.

        It is made with nothing to lease. The shares are read after that, since from then on a node
        that still follows nv-ipam takes nothing more (`takeover`).
        """
        pool = self._read(name)
        if pool is None:
            return
        try:
            there = pools.get(name_of(pool))
            if there is None:
                there = pools[name_of(pool)] = self._api.create(closed(pool))
                _log.info("pool %s: made of nv-ipam's %s", there.metadata.name, pool.key)
                pool = self._read(name) or pool
            shares = self._api.list(AddressShare, {"spec.pool": pool.key}).items
            left = waiting(pool, shares, there)
            if left != pool:
                # Who hands a node back names it in the AddressPool first, then writes its entry.
                there = pools[name_of(pool)] = self._api.get(AddressPool, name_of(pool))
                left = waiting(pool, shares, there)
            if left != pool:
                pool = self._api.update_status(left)
            beside = beside_now(self._api, self._namespace, pool, seen.holding(pool))
            wanted = address_pool(pool, shares, beside)
            if wanted.metadata.name == there.metadata.name and changed(there, wanted) != there:
                pools[there.metadata.name] = self._api.update(changed(there, wanted))
        except (Invalid, CNIError, AlreadyExists, Conflict, NotFound):
            return  # the next round sees it, or reports it
        except Refused as error:
            self._refused[name] = self._clock()
            self._reports.resource("InvalidPool", f"it gets no AddressPool: {error}", pool)
            return
        self._refused.pop(name, None)

    def _read(self, name: str) -> NvIPPool | None:
        """The IPPool as it is now. Raises ApiError."""
        listed = self._api.list(NvIPPool, namespace=self._namespace).items
        return next((each for each in listed if each.metadata.name == name), None)
