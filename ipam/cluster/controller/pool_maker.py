"""Makes the pools that definitions ask for, and says which it does not make."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from ipam.cluster.api import AlreadyExists, ClusterApi, Conflict, NotFound, Refused
from ipam.cluster.controller.definitions import (
    DemandedPool,
    ReadDefinition,
    UnusableDefinition,
    demand,
    not_of,
)
from ipam.cluster.controller.pool_conditions import NAMESPACE, is_made
from ipam.cluster.controller.reports import Reports
from ipam.cluster.controller.steps import Steps
from ipam.cluster.objects import AddressBlock, AddressPool, Meta

REFUSED_AGAIN = 60.0  # seconds until a pool that was refused is made again
POOLS_PER_NAMESPACE = 100
UNUSED_FOR = 600.0  # seconds until a pool that no definition names is deleted

_log = logging.getLogger(__name__)


class PoolMaker:
    """The memory of one leader. `most` pools are made for the definitions of one namespace: tenants
    write definitions. A pool that none names any more is deleted once no block of it is leased.
    """

    def __init__(
        self,
        api: ClusterApi,
        clock: Callable[[], float],
        reports: Reports,
        most: int,
    ) -> None:
        self._api = api
        self._clock = clock
        self._reports = reports
        self._most = most
        self._refused: dict[str, float] = {}  # when, by the pool's name
        self._unused_since: dict[str, float] = {}  # by the pool's uid

    def make(
        self,
        definitions: Iterable[ReadDefinition],
        pools: dict[str, AddressPool],
        blocks: Iterable[AddressBlock],
        steps: Steps,
    ) -> int:
        """Add the pools that are missing to `pools`, and take those away that nothing uses; how
        many definitions get none."""
        demanded = demand(definitions)
        mistakes = list(demanded.unusable)
        missing: list[tuple[str, DemandedPool]] = []
        for name, asked in demanded.pools.items():
            if name not in pools:
                missing.append((name, asked))
            elif pools[name].spec.range != asked.spec.range:
                why = not_of(name, pools[name].spec, asked.spec)
                mistakes.append(UnusableDefinition(asked.definition, why))
        names = {name for name, _ in missing}
        self._refused = {name: at for name, at in self._refused.items() if name in names}
        made = Counter(pool.metadata.labels.get(NAMESPACE) for pool in pools.values())

        def create(item: tuple[str, DemandedPool]) -> None:
            name, asked = item
            namespace = asked.definition.namespace
            if made[namespace] >= self._most:
                mistakes.append(UnusableDefinition(asked.definition, self._too_many(namespace)))
                return
            pool = self._create(name, asked)
            if pool is not None:
                pools[name] = pool
                made[namespace] += 1

        steps.each("create", [(name, (name, asked)) for name, asked in missing], create)
        used = {*demanded.pools, *(block.spec.pool for block in blocks)}
        unused = {each.metadata.uid: each for name, each in pools.items() if name not in used}
        self._remove(unused, pools, steps)
        for mistake in mistakes:
            self._reports.definition(mistake)
        return len(mistakes) + len(self._refused)

    def _remove(
        self, unused: Mapping[str, AddressPool], pools: dict[str, AddressPool], steps: Steps
    ) -> None:
        """Delete what was made, and was of no use for a while. What a watch has shown does not do:
        each is looked at."""
        now = self._clock()
        idle = {uid: pool for uid, pool in unused.items() if is_made(pool) and pool.metadata.uid}
        self._unused_since = {uid: self._unused_since.get(uid, now) for uid in idle}

        def remove(pool: AddressPool) -> None:
            name = pool.metadata.name
            if self._api.list(AddressBlock, {"spec.pool": name}, most=1).items:
                return
            try:
                self._api.delete(pool)
            except (Conflict, NotFound):
                return  # the next round sees it
            pools.pop(name, None)
            _log.info("pool %s: deleted: no definition names it, and no node leases of it", name)

        due = [
            (pool.metadata.name, pool)
            for uid, pool in idle.items()
            if now - self._unused_since[uid] >= UNUSED_FOR
        ]
        steps.each("unused pools", due, remove)

    def _too_many(self, namespace: str) -> str:
        return (
            f"podfabric's controller has made {self._most} AddressPools for definitions of "
            f"namespace {namespace}, and makes no more: delete definitions that no pod needs, and "
            "pools that no definition names "
            f"(kubectl get apool -l {NAMESPACE}={namespace}), or raise the chart's "
            "controller.poolsPerNamespace"
        )

    def _create(self, name: str, asked: DemandedPool) -> AddressPool | None:
        now = self._clock()
        if name in self._refused and now - self._refused[name] < REFUSED_AGAIN:
            return None
        labels = {NAMESPACE: asked.definition.namespace} if asked.definition.namespace else {}
        new = AddressPool(metadata=Meta(name=name, labels=labels), spec=asked.spec)
        try:
            pool = self._api.create(new)
        except AlreadyExists:
            return None  # the next round sees it
        except Refused as error:
            self._refused[name] = now
            self._reports.definition(UnusableDefinition(asked.definition, str(error)))
            return None
        self._refused.pop(name, None)
        _log.info("pool %s: made, a definition names it", name)
        return pool
