"""Checks of addresses: what is not as nv-ipam's pools say, where this node follows or owns them."""

from collections.abc import Iterator

from cli import executables
from cli.checks import Outcome, failed, not_applicable, ok, warning
from cli.this_node import ThisNode
from ipam import scope
from ipam.addresses import Interval, parse, parse_interval
from ipam.confirmed import boottime
from ipam.nv_ipam import importing
from ipam.nv_ipam.pools import OWN_FILE, ROUTED, NodePool, NodePools, PoolsFile, domain_of
from ipam.sqlite_store import SqliteStore
from ipam.store import Reservation

EXECUTABLE = "nv-ipam"


def nv_ipam(node: ThisNode) -> Iterator[Outcome]:
    """The pools of nv-ipam, as the agent saw them last, against what pods hold."""
    known = PoolsFile(node.paths.ipam).read()
    if known is None:
        yield not_applicable('nv-ipam\'s pools are not served ("ipam.nv_ipam")')
        return
    path = node.paths.cni_bin / EXECUTABLE
    is_theirs = path.exists() and not executables.is_ours(path)
    if (closed := importing.why_closed(node.paths.ipam)) is not None:
        if is_theirs:
            yield ok("nv-ipam's own daemon serves this node (`podfabric ipam export`)")
        else:
            yield warning("pods get no addresses of nv-ipam's pools here", closed)
        return
    boot = node.paths.boot_id()
    held = SqliteStore(node.paths.ipam, boot).reservations()
    is_own = scope.settings(node.paths.config).nv_ipam == "own"
    if is_own:
        leased = PoolsFile(node.paths.ipam, OWN_FILE).read() or NodePools()
        for _, pool in sorted(leased.pools.items()):
            yield _leased(pool)
    for key in sorted(known.pools.keys() | _keys(held)):
        if key.startswith(ROUTED) or not is_own:
            yield from _pool(key, known.pools.get(key), held, boot)
    if is_theirs:
        yield warning(
            f"{path} is not podfabric's: definitions of type nv-ipam start it",
            "stop nv-ipam's DaemonSet, then restart podfabric's pod of this node; without "
            f"Kubernetes: `podfabric install --plugins {EXECUTABLE}`",
        )


def _leased(pool: NodePool) -> Outcome:
    """Of an IPPool that podfabric owns: its nodes lease blocks of all of it."""
    if pool.entry is not None:
        return ok(f"{pool.key}: this node leases blocks of {pool.network}")
    return not_applicable(
        f"{pool.key}: this node gives no new addresses of it: its nodeSelector leaves this node "
        "out, or its spec is invalid (the agent's log says what is)"
    )


def _keys(held: list[Reservation]) -> set[str]:
    """The pools that addresses are held of, also those that are gone."""
    prefix = domain_of("")
    return {each.domain.removeprefix(prefix) for each in held if each.domain.startswith(prefix)}


def _pool(key: str, pool: NodePool | None, held: list[Reservation], boot: str) -> Iterator[Outcome]:
    entry = pool.entry if pool is not None else None
    beside = set(pool.beside) if pool is not None else set()
    outside = [
        each
        for each in held
        if each.domain == domain_of(key)
        and each.address not in beside
        and not (entry is not None and entry.first <= parse(each.address) <= entry.last)
    ]
    if outside:
        listed = ", ".join(f"{each.address} ({each.holder})" for each in outside[:4])
        more = f" and {len(outside) - 4} more" if len(outside) > 4 else ""
        yield warning(
            f"{key}: pods hold addresses that are not in this node's entry: {listed}{more}",
            "delete these pods; the condition Outside of the node's AddressShare says who has the "
            "addresses now (`kubectl get ashare -o yaml`)",
        )
    if pool is None or entry is None:
        if not outside:  # its nodeSelector may leave this node out
            yield not_applicable(f"{key}: the controller gives this node no addresses")
        return
    free = sum(map(_size, map(parse_interval, pool.usable)))
    if not free:
        yield failed(
            f"{key}: all addresses of this node's entry are in use on other nodes",
            "`kubectl get ashare` shows where; they come when the pods there have gone",
        )
    elif not pool.is_confirmed(boot, boottime()):
        yield failed(
            f"{key}: this node has not confirmed its share at the API server for "
            f"{pool.max_offline / 60:.0f} minutes, or since it booted: no new pod gets an address",
            "see what the agent's log says (`cannot confirm the shares`), and that the Node object "
            "of this node exists",
        )
    elif not outside:
        yield ok(f"{key}: {pool.first} to {pool.last}")


def _size(run: Interval) -> int:
    return run.last - run.first + 1
