"""Range sets of a pod's request to nv-ipam, out of what this node may use of its pools."""

from collections.abc import Sequence
from typing import NamedTuple

from cni.spec.errors import CNIError, Code, invalid_config
from cni.spec.result import Route
from ipam.addresses import Interval, Network, family, parse, parse_interval, text
from ipam.confirmed import spoken
from ipam.nv_ipam.options import NvIpamOptions
from ipam.nv_ipam.pools import ROUTED, NodePool, NodePools
from ipam.ranges import Range, RangeSet
from ipam.store import Reservation

END_OVERLAP = (
    "give one of the pools another range, or, if their networks are apart, the annotation "
    "ipam.podfabric.io/private: true"
)


class ResolvedRequest(NamedTuple):
    """One set for each pool, in their order, and the routes of the result."""

    sets: tuple[RangeSet, ...]
    routes: tuple[Route, ...]


class NotHere(CNIError):
    """A requested address is of a pool, and not of this node's part of it: it can be asked for."""

    def __init__(self, pool: NodePool, address: int) -> None:
        super().__init__(
            Code.TRY_AGAIN,
            f"{text(address)} of {pool.key} is not among the addresses of this node, and only "
            "podfabric's agent can ask for it: see that the agent of this node runs",
        )
        self.pool = pool.key
        self.address = address


class HeldByPod(NamedTuple):
    """What a pod holds, or held in another sandbox; only what is of this `boot` counts."""

    boot: str
    reservations: Sequence[Reservation] = ()


def resolved(options: NvIpamOptions, known: NodePools | None) -> ResolvedRequest:
    """The sets of a request. CNIError 7 for what the pools cannot give, 11 for what they cannot
    give now; NotHere."""
    pools = [_pool(key, known) for key in options.pools]
    sets, routes = [], list[Route]()
    wanted = [address for _, address in options.requested]
    for pool in pools:
        range_set = _set(pool, options, wanted)
        sets.append(range_set)
        hop = range_set.ranges[0].gateway
        if hop is not None:
            routes += [Route(dst=dst, gw=text(hop)) for dst in pool.routes]
    _require_all_used(options, sets)
    return ResolvedRequest(tuple(sets), tuple(routes))


def kept(pool: NodePool, wanted: RangeSet, held: HeldByPod, now: float, why: str) -> RangeSet:
    """What a pod may have of a pool that was not confirmed lately: the address that it holds.

    `now` is of CLOCK_BOOTTIME, `why` says what went wrong. CNIError 11 without one.
    """
    own = [
        Interval(parse(each.address), parse(each.address))
        for each in held.reservations
        if each.boot == held.boot and each.domain == pool.domain
    ]
    ranges = tuple(each.restricted(own) for each in wanted.ranges)
    if any(each.parts for each in ranges):
        return RangeSet(ranges, wanted.fixed)
    since = "since it booted"
    if pool.boot == held.boot and now >= pool.confirmed:
        since = (
            f"for {spoken(now - pool.confirmed)}, longer than maxOffline "
            f"({spoken(pool.max_offline)})"
        )
    raise CNIError(
        Code.TRY_AGAIN,
        f"this node has not confirmed its share of {pool.key} at the API server {since} "
        f"({why}): another node may get its addresses, so no new pod gets one here: nothing was "
        "reserved; see that the API server answers, and that the Node object of this node exists; "
        "the runtime tries again",
    )


def _pool(key: str, known: NodePools | None) -> NodePool:
    if known is None:
        raise CNIError(
            Code.TRY_AGAIN,
            "this node has not read nv-ipam's pools yet: nothing was reserved; see that the agent "
            'runs with "ipam.nv_ipam": follow or own in config.yaml, and what its log says',
        )
    pool = known.pools.get(key)
    if pool is None:
        raise CNIError(
            Code.TRY_AGAIN,
            f"nv-ipam has no pool {key}: nothing was reserved; make the pool, or correct "
            '"ipam.poolName" and "ipam.poolType"',
        )
    return pool


def _set(pool: NodePool, options: NvIpamOptions, wanted: Sequence[int]) -> RangeSet:
    network = pool.subnet
    if pool.entry is None and pool.key.startswith(ROUTED):
        raise no_entry(pool)  # a node without a prefix gets no address of one
    if options.gateway:
        return RangeSet((_gateway(pool),), fixed=True)
    if options.index is not None:
        return RangeSet((_indexed(pool, options.index),), fixed=True)
    for address in wanted:
        if address in network:
            return RangeSet((_requested(pool, address),), fixed=True)
    if pool.entry is None:
        raise no_entry(pool)
    return RangeSet((pool.range(),))


def no_entry(pool: NodePool) -> CNIError:
    """The pool has no addresses for this node."""
    return CNIError(
        Code.TRY_AGAIN,
        f"the controller gives this node no addresses of {pool.key} ({pool.network}): nothing was "
        "reserved; see that it runs, that the pool's nodeSelector selects the node, that it has "
        "room for one more node, and that its spec is valid",
    )


def _gateway(pool: NodePool) -> Range:
    """The gateway, which one pod at a time may have as its address."""
    if not pool.gateway:
        raise invalid_config(
            f'"args.cni.allocateDefaultGateway": {pool.key} has no gateway: set one in the pool'
        )
    address = parse(pool.gateway)
    if not _is_usable(pool, address) and pool.gateway not in pool.beside:
        raise NotHere(pool, address)
    return pool.only(address, gateway=False)


def _indexed(pool: NodePool, index: int) -> Range:
    entry = pool.entry
    if entry is None:
        raise no_entry(pool)
    address = entry.first + index
    if pool.gateway and address == parse(pool.gateway):
        raise invalid_config(
            f'"args.cni.allocateIPWithIndex": {index} is the gateway of {pool.key}: use '
            "allocateDefaultGateway"
        )
    if address > entry.last:
        raise invalid_config(
            f'"args.cni.allocateIPWithIndex": this node has {entry.last - entry.first + 1} '
            f"addresses of {pool.key}, so the highest index is {entry.last - entry.first}"
        )
    if not _is_usable(pool, address):
        raise taken(pool, address)
    return pool.only(address)


def _requested(pool: NodePool, address: int) -> Range:
    if pool.gateway and address == parse(pool.gateway):
        raise invalid_config(f"{text(address)} is the gateway of {pool.key}, which no pod gets")
    if not _is_of_a_host(address, pool.subnet):
        raise invalid_config(
            f"{text(address)} of {pool.key} is not an address of a host in {pool.network}: ask for "
            "another"
        )
    entry = pool.entry
    if entry is not None and entry.first <= address <= entry.last:
        if not _is_usable(pool, address):
            raise taken(pool, address)
    elif text(address) not in pool.beside:
        raise NotHere(pool, address)
    return pool.only(address)


def _is_of_a_host(address: int, network: Network) -> bool:
    """Whether it is neither the network's own address nor IPv4's broadcast."""
    if network.prefix >= 127:
        return True
    is_broadcast = address == network.last and family(address) == 4
    return address != network.address and not is_broadcast


def _is_usable(pool: NodePool, address: int) -> bool:
    return any(run.first <= address <= run.last for run in map(parse_interval, pool.usable))


def left_to_older(pool: NodePool) -> str:
    """That older pools have addresses of it; "" if none has."""
    if not pool.older:
        return ""
    return (
        f"addresses of {pool.key} are also of {', '.join(pool.older)}, which is older and has "
        f"them: {END_OVERLAP}"
    )


def taken(pool: NodePool, address: int, node: str = "another node") -> CNIError:
    """The address is of this pool, and another node uses it."""
    if node == "another node" and pool.older:
        return of_older(pool, address, pool.older, f"in use on {node}, or ")
    return CNIError(
        Code.ADDRESS_TAKEN,
        f"{text(address)} of {pool.key} is in use on {node}: nothing was reserved; ask for another "
        "address",
    )


def of_older(pool: NodePool, address: int, older: Sequence[str], or_else: str = "") -> CNIError:
    """The address is of this pool, and older ones have it, too."""
    return CNIError(
        Code.ADDRESS_TAKEN,
        f"{text(address)} of {pool.key} is {or_else}also of {', '.join(older)}, which is older: "
        f"nothing was reserved; {END_OVERLAP}, or ask for another address",
    )


def _require_all_used(options: NvIpamOptions, sets: Sequence[RangeSet]) -> None:
    given = {each.ranges[0].first for each in sets if each.fixed}
    for where, address in options.requested:
        if address not in given:
            raise invalid_config(
                f'"{where}": {text(address)} is in no pool of the network, or a second address of '
                "one: each pool gives one"
            )
