"""Makes the AddressPools that definitions need, and reports definitions without a pool."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from cni.spec import config, rail_keys
from cni.spec.config import NetworkConfig
from cni.spec.errors import CNIError
from ipam.config import options
from ipam.controller.block_sizes import NAMESPACE, is_made
from ipam.controller.steps import Steps
from ipam.controller.warnings import Reports
from ipam.leases.block_layout import pool_name
from ipam.leases.objects import AddressBlock, AddressPool, PoolSpec
from kube.client import ClusterApi
from kube.encoding import config_of
from kube.resources import (
    AlreadyExists,
    Conflict,
    Meta,
    NetworkDefinition,
    NotFound,
    Refused,
    ServerMeta,
)

REFUSED_AGAIN = 60.0  # seconds until the next try, after the API server refused a pool
POOLS_PER_NAMESPACE = 100
UNUSED_FOR = 600.0  # seconds until a pool that no definition names is deleted
_log = logging.getLogger(__name__)


class ReadDefinition(msgspec.Struct, frozen=True):
    """The part of a definition that stays in memory. `why` is the definition's mistake, or "". The
    configuration does not stay: tenants choose its size."""

    metadata: ServerMeta
    pools: Mapping[str, PoolSpec] = {}
    why: str = ""


def read(definition: NetworkDefinition) -> ReadDefinition | None:
    """Returns `None` if the definition needs no pool and has no mistake."""
    try:
        pools = _pools(definition)
    except CNIError as error:
        return ReadDefinition(definition.metadata, why=str(error))
    return ReadDefinition(definition.metadata, pools) if pools else None


def _pools(definition: NetworkDefinition) -> dict[str, PoolSpec]:
    pools = {}
    for ipam in _cluster_wide(config_of(definition)):
        read = options.read(NetworkConfig(keys={"ipam": ipam}))
        for range_set in read.sets:
            for range_ in range_set.ranges:
                cidr = str(range_.network)
                spec = PoolSpec(range=cidr, network_name=read.network_name, shared=read.shared)
                pools[pool_name(spec.network_name, cidr, shared=spec.shared)] = spec
    return pools


def _cluster_wide(written: str) -> Iterator[dict[str, Any]]:
    """Our plugin's `ipam` objects in a configuration or a plugin list, except with scope "node"."""
    try:
        keys = config.decode(written.encode(errors="replace")).keys
    except CNIError:
        return  # Multus refuses this text too. No text: a file on the node has the configuration.
    plugins = keys.get("plugins")
    for plugin in plugins if isinstance(plugins, list) else [keys]:
        ipam = plugin.get("ipam") if isinstance(plugin, dict) else None
        if not isinstance(ipam, dict) or ipam.get("type") not in options.TYPES:
            continue
        if ipam.get("scope") != "node":
            for of_rail in rail_keys.addresses(ipam):
                yield {key: value for key, value in of_rail.items() if key != "scope"}


class PoolMaker:
    """Makes and deletes pools. Makes at most `most` pools for one namespace, because tenants write
    definitions."""

    def __init__(
        self, api: ClusterApi, clock: Callable[[], float], reports: Reports, most: int
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
        """Make missing pools and delete unused pools, on the API server and in `pools`. Returns how
        many definitions get no pool."""
        asked: dict[str, tuple[PoolSpec, ServerMeta]] = {}  # with a definition that needs the pool
        mistakes: list[tuple[ServerMeta, str]] = []
        for each in definitions:
            if each.why:
                mistakes.append((each.metadata, each.why))
            for name, spec in each.pools.items():
                first, _ = asked.setdefault(name, (spec, each.metadata))
                if first != spec:
                    mistakes.append((each.metadata, _not_of(name, first, spec)))
        missing = {name: each for name, each in asked.items() if name not in pools}
        for name, (spec, definition) in asked.items():
            if name in pools and pools[name].spec.range != spec.range:
                mistakes.append((definition, _not_of(name, pools[name].spec, spec)))
        self._refused = {name: at for name, at in self._refused.items() if name in missing}
        made = Counter(pool.metadata.labels.get(NAMESPACE) for pool in pools.values())

        def create(name: str) -> None:
            spec, definition = missing[name]
            if made[definition.namespace] >= self._most:
                mistakes.append((definition, self._too_many(definition.namespace)))
                return
            pool = self._create(name, spec, definition)
            if pool is not None:
                pools[name] = pool
                made[definition.namespace] += 1

        steps.each("create", [(name, name) for name in missing], create)
        used = {*asked, *(block.spec.pool for block in blocks)}
        unused = {each.metadata.uid: each for name, each in pools.items() if name not in used}
        self._remove(unused, pools, steps)
        for definition, why in mistakes:
            self._reports.definition(definition, why)
        return len(mistakes) + len(self._refused)

    def _remove(
        self, unused: Mapping[str, AddressPool], pools: dict[str, AddressPool], steps: Steps
    ) -> None:
        """Delete pools that this controller made, after `UNUSED_FOR` seconds without use. Reads the
        blocks again first, because a watch may be late."""
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
                return  # the next round reads the pool again
            pools.pop(name, None)
            _log.info("pool %s: deleted: no definition names it, no node leases its blocks", name)

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

    def _create(self, name: str, spec: PoolSpec, definition: ServerMeta) -> AddressPool | None:
        now = self._clock()
        if name in self._refused and now - self._refused[name] < REFUSED_AGAIN:
            return None
        labels = {NAMESPACE: definition.namespace} if definition.namespace else {}
        try:
            pool = self._api.create(AddressPool(metadata=Meta(name=name, labels=labels), spec=spec))
        except AlreadyExists:
            return None  # the next round reads the pool
        except Refused as error:
            self._refused[name] = now
            self._reports.definition(definition, str(error))
            return None
        self._refused.pop(name, None)
        _log.info("pool %s: made, because a definition names it", name)
        return pool


def _not_of(name: str, there: PoolSpec, asked: PoolSpec) -> str:
    """Two ranges may have the same pool name: "fd00:1::/64", and "1::/64" in the network "fd00"."""
    return (
        f"AddressPool {name} has the range {there.range}, but the network has the range "
        f'{asked.range}: give the network another "network_name"'
    )
