"""The verbs of a network whose IPAM plugin is nv-ipam, over the store of this node.

DEL and GC go by the attachment alone, as for every network.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from base.paths import Paths
from cni.policy.allowance import Allowance
from cni.spec.attachment import Attachment
from cni.spec.errors import CNIError, Code, invalid_config
from cni.spec.request import Request
from cni.spec.result import IPConfig, Result
from ipam import scope
from ipam.addresses import Network, parse_interface, text
from ipam.confirmed import boottime
from ipam.nv_ipam import importing
from ipam.nv_ipam import options as nv_options
from ipam.nv_ipam.options import NvIpamOptions
from ipam.nv_ipam.pools import NodePools, PoolsFile, domain_of
from ipam.nv_ipam.requests import (
    HeldByPod,
    NotHere,
    ResolvedRequest,
    kept,
    left_to_older,
    resolved,
)
from ipam.permitted import of_address
from ipam.ranges import RangeSet
from ipam.sqlite_store import SqliteStore
from ipam.store import Grant, Owner, Quota, Reservation, ReservedAddress
from ipam.tables import Tables


class PoolSource(Protocol):
    """The agent's view of nv-ipam's pools."""

    def ask(self, key: str, address: int) -> None:
        """Get that address of the pool for this node, and write it to the node's file. CNIError 111
        if another node has it, 11 if that cannot be told now."""

    def elsewhere(self, key: str) -> str:
        """What of the pool other nodes have, for an error."""

    def failed(self, owner: Owner, error: CNIError) -> None:
        """A pod got no address."""

    def silence(self, key: str) -> str:
        """Why this node's share of the pool could not be confirmed when that was tried last; "" if
        it was."""


def permitted(options: NvIpamOptions, allowed: Allowance) -> Allowance:
    """The allowance with these pools and requested addresses. CNIError 121."""
    for key in options.pools:
        allowed = allowed.using("networkNames", key, "ipam.poolName", key)
    for where, address in options.requested:
        allowed = of_address(allowed, address, where)
    return allowed


class NvIpam:
    """nv-ipam on one node. `directory` is the store's, `conf` is nv-ipam.conf.

    `follower` is None in a process that is not the agent. `clock` is CLOCK_BOOTTIME.
    """

    def __init__(
        self,
        directory: Path,
        conf: Path,
        follower: PoolSource | None = None,
        clock: Callable[[], float] = boottime,
    ) -> None:
        self._directory = directory
        self._file = PoolsFile(directory)
        self._conf = conf
        self._follower = follower
        self._clock = clock

    def reserve(
        self,
        store: SqliteStore,
        owner: Owner,
        request: Request,
        segment: str,
        answerable: Callable[[Sequence[RangeSet]], Quota | None],
    ) -> tuple[Result, Grant, tuple[RangeSet, ...]]:
        """Reserve an address of each pool; the result, what `undo` needs, and the sets.

        `answerable` raises CNIError for sets that no result could hold, or that the rules do not
        allow; it answers the quota that the pod has with these sets.
        """
        options = self._options(request)
        quota: Quota | None = None

        def sets_now(tables: Tables) -> tuple[ResolvedRequest, tuple[RangeSet, ...]]:
            importing.require_open(self._directory)  # it is closed in a transaction, too
            known = self._file.read()
            found = resolved(options, known)
            nonlocal quota
            quota = answerable(found.sets)
            if importing.imported(tables, owner):
                return found, ()

            def held() -> HeldByPod:
                former = (*tables.of_attachment(owner.attachment), *tables.of_pod(owner))
                return HeldByPod(store.boot, former)

            return found, self._confirmed(known, options, found.sets, store.boot, held)

        try:
            found, grant = self._attempts(store, owner, sets_now, segment, lambda: quota)
        except CNIError as error:
            told = self._explained(error, options)
            if self._follower is not None:
                self._follower.failed(owner, told)
            raise told from None
        ips = tuple(map(ip_of, grant.granted))
        return Result(ips=ips, routes=found.routes), grant, found.sets

    def permitted(self, request: Request, allowed: Allowance) -> Allowance:
        """The allowance with the pools and addresses that a request asks for. CNIError 121.

        The rest of what `ranges` of rules say of it is known with the sets: see `reserve`.
        """
        return permitted(self._options(request), allowed)

    def check(self, request: Request, held: Sequence[Reservation]) -> None:
        """CNIError 104 if prevResult has an address of a pool that is not among those held."""
        previous = request.previous_result
        if previous is None:
            raise invalid_config("prevResult missing: CHECK compares it with the reservations")
        own = {reservation.address for reservation in held}
        networks = [parse_interface(reservation.range)[1] for reservation in held]
        for ip in previous.ips:
            address, _ = parse_interface(ip.address)
            if text(address) not in own and any(address in network for network in networks):
                raise CNIError(
                    Code.CHECK_FAILED,
                    f"{text(address)} is not reserved for this attachment: recreate the pod before "
                    "another one gets the address",
                )

    def status(self, store: SqliteStore, request: Request) -> str | None:
        """Why an ADD would get no address now; None if it would. CNIError as of an ADD."""
        plain = NvIpamOptions(pools=self._options(request).pools)
        importing.require_open(self._directory)
        known, boot = self._file.read(), store.boot
        sets = resolved(plain, known).sets
        return store.exhausted(self._confirmed(known, plain, sets, boot, lambda: HeldByPod(boot)))

    def homes(self, request: Request) -> Callable[[int, Network], tuple[str, Network]]:
        """What answers domain and range of an address that an ADD of this request gave, or would
        have; its second argument is the address's own network. CNIError as of an ADD."""
        keys = self._options(request).pools
        known = (self._file.read() or NodePools()).pools

        def home(address: int, own: Network) -> tuple[str, Network]:
            pools = [known[key] for key in keys if key in known]
            for pool in pools:
                if address in pool.subnet:
                    return pool.domain, pool.subnet
            return domain_of(keys[0]), own

        return home

    def _options(self, request: Request) -> NvIpamOptions:
        defaults = nv_options.node_defaults(self._conf)
        return nv_options.read(request.config, request.arguments, defaults)

    def _attempts(
        self,
        store: SqliteStore,
        owner: Owner,
        sets_now: Callable[[Tables], tuple[ResolvedRequest, tuple[RangeSet, ...]]],
        segment: str,
        limit: Callable[[], Quota | None],
    ) -> tuple[ResolvedRequest, Grant]:
        """A grant. What this node does not have yet it asks for: each address once."""
        asked: set[tuple[str, int]] = set()
        while True:
            found: list[ResolvedRequest] = []

            def seen(tables: Tables, found: list[ResolvedRequest] = found) -> tuple[RangeSet, ...]:
                request, sets = sets_now(tables)
                found.append(request)
                return sets

            try:
                grant = store.reserve_seen(owner, seen, segment=segment, limit=limit)
                if grant.granted:
                    return found[0], grant
                # The daemon gave the pod its address: first its network is put right.
                store.revise(lambda tables: importing.imported(tables, owner))
            except NotHere as absent:
                wanted = (absent.pool, absent.address)
                if self._follower is None or wanted in asked:
                    raise
                asked.add(wanted)
                self._follower.ask(*wanted)

    def _confirmed(
        self,
        known: NodePools | None,
        options: NvIpamOptions,
        sets: Sequence[RangeSet],
        boot: str,
        held: Callable[[], HeldByPod],
    ) -> tuple[RangeSet, ...]:
        """The sets; of a pool that was not confirmed lately only what the pod holds of it already.

        The clock is read here, within the transaction that reserves. CNIError 11.
        """
        assert known is not None
        pools = [known.pools[key] for key in options.pools]
        now = self._clock()
        return tuple(
            each
            if pool.is_confirmed(boot, now) or pool.is_left_to_older
            else kept(pool, each, held(), now, self._silence(pool.key))
            for pool, each in zip(pools, sets, strict=True)
        )

    def _silence(self, key: str) -> str:
        if self._follower is None:
            return "only podfabric's agent confirms it, and this is another process"
        return self._follower.silence(key) or "it was not tried yet"

    def _explained(self, error: CNIError, options: NvIpamOptions) -> CNIError:
        if error.code != Code.NO_FREE_ADDRESS:
            return error
        known = self._file.read() or NodePools()
        lines = []
        for key in options.pools:
            pool = known.pools.get(key)
            if pool is not None and pool.entry is not None:
                for_pods = sum(part.last - part.first + 1 for part in pool.range().parts)
                others = (
                    self._follower.elsewhere(key) if self._follower else "other nodes have more"
                )
                lines.append(
                    f"{key}: node {known.node} has {pool.first} to {pool.last}, {for_pods} for "
                    f"pods; {others}, which are not lent"
                )
                lines += filter(None, (left_to_older(pool),))
        return CNIError(error.code, f"{'; '.join(lines)}: {error.message}")


def as_imported(attachment: Attachment) -> Attachment:
    """The attachment as a reservation out of nv-ipam's store has it, which knows no network."""
    return Attachment(importing.IMPORTED, attachment.container_id, attachment.ifname)


def on_node(paths: Paths) -> Callable[[], NvIpam | None]:
    """What serves nv-ipam's definitions in a process that is not the agent, by config.yaml."""

    def served() -> NvIpam | None:
        mode = scope.settings(paths.config).nv_ipam
        conf = nv_options.conf_of(paths.cni_conf)
        if mode == "own":
            from ipam.nv_ipam.own import OwnNvIpam

            return OwnNvIpam(paths.ipam, conf)
        return NvIpam(paths.ipam, conf) if mode == "follow" else None

    return served


def ip_of(granted: ReservedAddress) -> IPConfig:
    """The address as results have it."""
    gateway = granted.range.gateway
    return IPConfig(
        f"{granted.reservation.address}/{granted.range.network.family_prefix}",
        None if gateway is None else text(gateway),
    )
