"""Makes AddressPools from nv-ipam's IPPools and CIDRPools, and computes a node's part of a pool.

All pools share one space of addresses. So two pods never get one address, even if pools overlap. An
entry of `status.allocations` reserves addresses for one node, because pods of that node may have
got these addresses from nv-ipam's daemon.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

import msgspec
from msgspec.structs import replace

from cni.spec.errors import CNIError, invalid_config
from ipam.addresses import Interval, Network, family, parse, parse_interface, parse_interval, text
from ipam.leases.block_layout import pool_name
from ipam.leases.objects import GROUP, AddressPool, PoolSpec
from ipam.nv_ipam.translate import DOMAIN, LARGEST_BLOCK, NodePool, hosts_of, prefixes_of, range_of
from ipam.ranges import merged, written
from kube.client import ClusterApi
from kube.informer import Mirror, same
from kube.resources import AlreadyExists, Conflict, Meta, NodeSelector, NotFound, Resource, selects

if TYPE_CHECKING:
    from ipam.controller.steps import Steps
    from ipam.controller.warnings import Reports

T = TypeVar("T")

LABEL = f"{GROUP}/nv-ipam"
"""The label of an AddressPool that was made from nv-ipam's pool: "ippool" or "cidrpool"."""

MOST_RUNS = 16_384  # most runs of addresses that a pool excludes by index

_log = logging.getLogger(__name__)


class ExcludedIndexes(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Indexes that no pod gets, in each block of an IPPool or each prefix of a CIDRPool."""

    start_index: int
    end_index: int


class PoolRoute(msgspec.Struct, frozen=True):
    dst: str


class NodePart(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={"node": "nodeName", "start": "startIP", "end": "endIP"},
):
    """A run of addresses in an IPPool, or a prefix in a CIDRPool."""

    node: str = ""  # "": no node
    start: str = ""
    end: str = ""
    prefix: str = ""
    gateway: str = ""  # "": at the pool's gateway index


class NvPoolSpec(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The spec of an IPPool, which has a `subnet`, or of a CIDRPool, which has a `cidr`."""

    subnet: str = ""
    per_node_block_size: int = 0  # addresses of `subnet` for each node
    gateway: str = ""
    cidr: str = ""
    per_node_network_prefix: int = 0  # the length of each node's prefix in `cidr`
    gateway_index: int | None = None
    static_allocations: tuple[NodePart, ...] | None = None
    node_selector: NodeSelector | None = None
    exclusions: tuple[NodePart, ...] | None = None
    per_node_exclusions: tuple[ExcludedIndexes, ...] | None = None
    default_gateway: bool = False
    routes: tuple[PoolRoute, ...] | None = None


class NvPoolStatus(msgspec.Struct, frozen=True):
    allocations: tuple[NodePart, ...] | None = None


class NvPool(Resource, frozen=True, kw_only=True):
    API = "nv-ipam.nvidia.com/v1alpha1"

    spec: NvPoolSpec
    status: NvPoolStatus = NvPoolStatus()

    @property
    def key(self) -> str:
        return f"{self.KIND.lower()}/{self.metadata.name}"


class NvIPPool(NvPool, frozen=True, kw_only=True):
    """One subnet for all nodes."""

    KIND = "IPPool"
    PLURAL = "ippools"


class NvCIDRPool(NvPool, frozen=True, kw_only=True):
    """A routed prefix for each node."""

    KIND = "CIDRPool"
    PLURAL = "cidrpools"


def node_pool(pool: NvPool, node: str = "", labels: Mapping[str, str] | None = None) -> NodePool:
    """The part of a pool that `node` may use.

    Without `node`, the parts of all nodes. Raises CNIError 7.
    """
    spec = pool.spec
    form = _of_ippool if isinstance(pool, NvIPPool) else _of_cidrpool
    found, origins, size, others = form(spec, pool.status.allocations or (), node)
    network = found.subnet
    whole = hosts_of(network)
    runs = (f"{each.start}-{each.end}" for each in spec.exclusions or ())
    excluded = list(_read("spec.exclusions", parse_interval, runs))
    indexes = merged(Interval(e.start_index, e.end_index) for e in spec.per_node_exclusions or ())
    if any(not 0 <= each.first <= each.last < size for each in indexes):
        raise invalid_config(f'"spec.perNodeExclusions": use only indexes from 0 to {size - 1}')
    if len(indexes) * len(origins) > MOST_RUNS:
        raise invalid_config(
            f'"spec.perNodeExclusions" makes more than {MOST_RUNS} exclusions: write '
            "spec.exclusions instead"
        )
    for first in origins if indexes else ():
        excluded += (Interval(first + one, first + other) for one, other in indexes)
    routes = set(_read("spec.routes", _network, (each.dst for each in spec.routes or ())))
    if spec.default_gateway:
        routes.add(parse_interface("0.0.0.0/0" if family(network.address) == 4 else "::/0")[1])
    return replace(
        found,
        key=pool.key,
        usable=not node or selects(spec.node_selector, node, labels or {}),
        excluded=_clamped(excluded, whole),
        others=_clamped(others, Interval(network.address, network.last)),
        routes=tuple(map(str, sorted(routes))),  # each once, as nv-ipam answers them
    )


Form = tuple[NodePool, Sequence[int], int, Iterable[Interval]]
"""A pool, the first address of each block, the size of a block, and other nodes' addresses."""


def _of_ippool(spec: NvPoolSpec, entries: Sequence[NodePart], node: str) -> Form:
    ((_, network),) = _read("spec.subnet", parse_interface, (spec.subnet,))
    size, hosts = spec.per_node_block_size, hosts_of(network)
    if size < 1:
        raise invalid_config('"spec.perNodeBlockSize" must be 1 or more')
    others = (f"{each.start}-{each.end}" for each in entries if node not in ("", each.node))
    return (
        NodePool(network=str(network), gateway=_inside(network, "spec.gateway", spec.gateway)),
        range(hosts.first, hosts.last + 1, size),
        size,
        _read("status.allocations", parse_interval, others),
    )


def _of_cidrpool(spec: NvPoolSpec, entries: Sequence[NodePart], node: str) -> Form:
    (whole,) = _read("spec.cidr", _network, (spec.cidr,))
    length, index = spec.per_node_network_prefix, spec.gateway_index
    prefix = length + (whole.prefix - whole.family_prefix)
    if not length > 0 or not whole.prefix <= prefix <= 128:
        raise invalid_config(f'"spec.perNodeNetworkPrefix": a /{length} does not fit into {whole}')
    hosts = hosts_of(Network(whole.address, prefix))
    if index is not None and not hosts.first <= whole.address + index <= hosts.last:
        raise invalid_config(f'"spec.gatewayIndex": a /{length} has no host with index {index}')
    static = spec.static_allocations or ()
    key = "spec.staticAllocations"
    given = dict(zip(_read(key, _network, (each.prefix for each in static)), static, strict=True))
    for network, each in given.items():
        _inside(network, key, each.gateway)
        if network.prefix != prefix or network.address not in whole:
            raise invalid_config(f'"{key}": {each.prefix} is not a /{length} network in {whole}')
    key = "status.allocations"
    former = zip(_read(key, _network, (each.prefix for each in entries)), entries, strict=True)
    taken = [*given.items(), *((network, each) for network, each in former if network not in given)]
    # An entry of an earlier spec has no effect on `own`.
    mine = (one for one in taken if one[0].prefix == prefix and node and one[1].node == node)
    own = next((one for one in mine if one[0].address in whole), None)
    others = [Interval(n.address, n.last) for n, _ in taken if own is None or n != own[0]]
    pool = NodePool(network=str(whole), prefix=prefix, index=index, others=written(merged(others)))
    if own is not None:
        gateway = _inside(own[0], key, own[1].gateway) if own[0] in given else ""
        pool = replace(pool, own=str(own[0]), gateway=gateway)
    return pool, [each.address for each in prefixes_of(pool)], 1 << (128 - prefix), others


def _read(key: str, read: Callable[[str], T], written: Iterable[str]) -> Iterator[T]:
    try:
        yield from map(read, written)
    except ValueError as error:
        raise invalid_config(f'"{key}": {error}') from None


def _network(written: str) -> Network:
    address, network = parse_interface(written)
    if address != network.address:
        raise ValueError(f"{written} has host bits set: write {network}")
    return network


def _inside(network: Network, key: str, gateway: str) -> str:
    """The gateway in canonical form; "" without a gateway."""
    try:
        if gateway and parse(gateway) not in network:
            raise ValueError(f"the gateway {gateway} is outside of {network}")
        return text(parse(gateway)) if gateway else ""
    except ValueError as error:
        raise invalid_config(f'"{key}": {error}') from None


def _clamped(runs: Iterable[Interval], whole: Interval) -> tuple[str, ...]:
    inside = (Interval(max(run.first, whole.first), min(run.last, whole.last)) for run in runs)
    return written(merged(run for run in inside if run.first <= run.last))


def address_pool(pool: NvPool) -> AddressPool:
    """The AddressPool for nv-ipam's `pool`.

    Raises CNIError 7. A block has nv-ipam's size for a node, at most LARGEST_BLOCK, rounded down to
    a power of two."""
    found = node_pool(pool)
    network = parse_interface(found.network)[1]
    is_prefix = isinstance(pool, NvCIDRPool)
    wanted = 1 << (128 - found.prefix) if is_prefix else pool.spec.per_node_block_size
    size = min(wanted, LARGEST_BLOCK, network.last - network.address + 1)
    return AddressPool(
        metadata=Meta(
            name=pool_name(DOMAIN, found.network), labels={LABEL: found.key.partition("/")[0]}
        ),
        spec=PoolSpec(
            range=found.network,
            network_name=DOMAIN,
            block_size=1 << (size.bit_length() - 1),
            max_blocks_per_node=1 if is_prefix else 0,
        ),
    )


class NvPools:
    """Makes and updates an AddressPool for each pool of nv-ipam."""

    def __init__(
        self,
        api: ClusterApi,
        items: Callable[[], Iterable[NvPool]],
        close: Callable[[], object] = lambda: None,
    ) -> None:
        self._api = api
        self._items = items
        self.close = close
        # Addresses that pods do not get, by AddressPool. Empty if pools share the AddressPool.
        self.kept_out: dict[str, Sequence[Interval]] = {}

    def keep(self, pools: dict[str, AddressPool], reports: "Reports", steps: "Steps") -> int:
        """Update the AddressPools on the API server and in `pools`. Returns the number of invalid
        pools. Of several pools with the same range, the oldest decides."""
        wanted: dict[str, tuple[NvPool, AddressPool]] = {}
        self.kept_out = {}
        unusable = 0
        for pool in sorted(
            self._items(), key=lambda each: (each.metadata.creation_timestamp, each.key)
        ):
            try:
                made = address_pool(pool)
                name = made.metadata.name
                older = wanted.setdefault(name, (pool, made))
                if older[1].spec != made.spec:
                    raise invalid_config(
                        f"{older[0].key} has the same range, but another block size: write "
                        "the same block size in both pools"
                    )
                self.kept_out[name] = _excluded(node_pool(pool)) if older[0] is pool else ()
            except CNIError as error:
                unusable += 1
                reports.resource("InvalidPool", f"this pool gets no AddressPool: {error}", pool)

        def write(made: AddressPool) -> None:
            name = made.metadata.name
            with suppress(AlreadyExists, Conflict, NotFound):  # the next round reads it
                if name in pools:
                    pools[name] = self._api.update(_changed(pools[name], made))
                else:
                    pools[name] = self._api.create(made)
                    _log.info("pool %s: made from nv-ipam's %s", name, wanted[name][0].key)

        due = (
            (name, made)
            for name, (_, made) in wanted.items()
            if name not in pools or _changed(pools[name], made) != pools[name]
        )
        steps.each("pools of nv-ipam", due, write)
        return unusable


def following(namespace: str, api: ClusterApi, changed: Callable[[], None]) -> NvPools:
    """NvPools for a namespace. `changed` is called after each change of a pool."""
    mirrors = [
        Mirror(api, kind, same, changed, namespace=namespace) for kind in (NvIPPool, NvCIDRPool)
    ]

    def close() -> None:
        for mirror in mirrors:
            mirror.close()

    return NvPools(api, lambda: (pool for each in mirrors for pool in each.items() or ()), close)


def _changed(there: AddressPool, wanted: AddressPool) -> AddressPool:
    """The AddressPool `there`, with the block size and the limit of blocks from `wanted`."""
    most = wanted.spec.max_blocks_per_node or there.spec.max_blocks_per_node
    spec = replace(there.spec, block_size=wanted.spec.block_size, max_blocks_per_node=most)
    return replace(there, spec=spec)


@lru_cache(256)
def _excluded(pool: NodePool) -> tuple[Interval, ...]:
    """The pool's addresses that pods get only on request."""
    if not pool.prefix:
        return tuple(map(parse_interval, pool.excluded))
    return range_of(pool).excluded
