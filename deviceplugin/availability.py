"""Decides which device ids of a pool may be allocated now.

An id is available if its HCA works, and no other id holds the HCA exclusively.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping

from deviceplugin import current
from deviceplugin.allocate.device_files import gives_uverbs
from deviceplugin.checkpoint import Allocation, AllocationKey
from deviceplugin.health import GONE
from deviceplugin.pools.pool import Pool
from host.sysfs.discovery import HCA

GRACE = 60.0  # seconds from the plugin's start
_NOWHERE: Mapping[str, str] = {}


def unavailable(
    pool: Pool,
    reports: Mapping[str, str | None] | None,
    held: Mapping[str, Allocation],
    elsewhere: Mapping[str, str] = _NOWHERE,
) -> dict[str, str]:
    """The ids that may not be allocated, each with the reason.

    `reports` come from `Health`. If `reports` is `None`, the state of HCAs does not count. `held`
    has the pool's allocations by id. An id of several HCAs is available if one of them is healthy.
    """
    taken = {**elsewhere, **dict(_of_earlier_configuration(pool, held))}
    faults: dict[str, str | None] = {}
    away: dict[str, str] = {}
    if reports is not None:
        faults = {hca.id: fault(pool, hca, reports) for hca in pool.hcas}
        # In the RDMA subsystem's exclusive mode, an RDMA device moves with the pod's interface.
        away = {
            hca.id: f"the RDMA device of {hca.id} is in another network namespace: it is back when "
            "that namespace is gone"
            for hca in pool.hcas
            if hca.rdma_names and not hca.rdma and gives_uverbs(pool, hca)
        }
    result: dict[str, str] = {}
    for slot in pool.slots:
        not_its_own = away if slot.id not in held else {}
        reasons = [
            taken.get(hca_id) or faults.get(hca_id) or not_its_own.get(hca_id)
            for hca_id in slot.hcas
        ]
        stale = _stale(pool, held[slot.id]) if slot.id in held else None
        if stale is not None or all(reasons):
            result[slot.id] = stale or next(iter(reasons), None) or "it has no HCA"
    return result


def held_elsewhere(pool: Pool, allocations: Iterable[Allocation]) -> dict[str, str]:
    """The HCAs that another resource has allocated and this pool must not share, with reasons."""
    reasons: dict[str, str] = {}
    for allocation in allocations:
        if allocation.resource == pool.config.resource:
            continue
        if allocation.exclusive or pool.config.mode == "exclusive":
            for device in allocation.devices:
                holder = f"id {allocation.id} of {allocation.resource}"
                reasons.setdefault(device.id, _is_held_by(device.id, holder))
    return reasons


def fault(pool: Pool, hca: HCA, reports: Mapping[str, str | None]) -> str | None:
    """The reason why an HCA does not work for the pool's containers; `None` if it works."""
    report = reports.get(hca.id)
    if report == GONE:
        return report
    if not gives_uverbs(pool, hca):
        return None
    if not hca.rdma_names:
        return f"{hca.id} has no RDMA device now: is the RDMA module of its driver loaded?"
    if hca.rdma and not any(rdma.uverbs for rdma in hca.rdma):
        return f"{hca.rdma[0].name} has no uverbs device: is the module ib_uverbs loaded?"
    if own_ports_count(pool, hca, reports):
        return report
    of_pf = reports[hca.pf]
    return None if of_pf is None else f"its PF {hca.pf} is unhealthy: {of_pf}"


def own_ports_count(pool: Pool, hca: HCA, reports: Mapping[str, str | None]) -> bool:
    """Whether the health of an HCA depends on its own ports, and not on the ports of its PF.

    In mode "exclusive", the CNI plugin sets up a VF or SF for each pod. A port that is not set up
    is DOWN: a RoCE port follows its interface, and an InfiniBand port has no GUID yet. A VF without
    a PF, as in a virtual machine, has only its own port.
    """
    if not gives_uverbs(pool, hca):
        return False
    set_up_later = pool.config.mode == "exclusive" and reports.get(hca.pf, GONE) != GONE
    return not set_up_later


def changes(
    pool: Pool, before: Mapping[str, str], now: Mapping[str, str]
) -> Iterator[tuple[str, str | None]]:
    """The ids whose reason has changed from `before` to `now`, with the new reason or `None`."""
    ids_by_reason: dict[tuple[tuple[str, ...], str | None], list[str]] = {}
    for slot in pool.slots:
        why = now.get(slot.id)
        if why != before.get(slot.id):
            ids_by_reason.setdefault((slot.hcas, why), []).append(slot.id)
    for (_, why), ids in ids_by_reason.items():
        yield ids[0] if len(ids) == 1 else f"{ids[0]} and {len(ids) - 1} more", why


def _of_earlier_configuration(
    pool: Pool, held: Mapping[str, Allocation]
) -> Iterator[tuple[str, str]]:
    """The HCAs that a former id of the pool holds exclusively, each with the reason."""
    for device_id, allocation in held.items():
        if pool.slot(device_id) is not None:
            continue
        if pool.config.mode == "exclusive" or allocation.exclusive:
            for device in allocation.devices:
                holder = f"id {device_id} of an earlier configuration"
                yield device.id, _is_held_by(device.id, holder)


def _is_held_by(hca_id: str, holder: str) -> str:
    return f"{hca_id} is held by {holder}: it is free after the holder's pod is gone"


def _stale(pool: Pool, allocation: Allocation) -> str | None:
    """The reason why a container's device nodes are outdated; `None` if they belong to the HCA.

    Without CDI, a restarted container gets the device nodes of its first start.
    """
    if pool.config.cdi:
        return None
    for device in allocation.devices:
        hca = pool.hca(device.id)
        outdated = current.outdated(device, current.uverbs_now(hca)) if hca is not None else None
        if outdated is not None and outdated.uverbs is not None:
            node = outdated.uverbs
            return (
                f"its holder got {node.path} ({node.major}:{node.minor}) for {device.id}, but the "
                "device has another number since a reload of its driver: delete the holder's pod"
            )
    return None


class StartupGrace:
    """While the node's hardware starts up, lists held ids as healthy.

    After a boot, the kubelet restarts pods before drivers are loaded and ports are ACTIVE. The
    kubelet rejects a pod with an unhealthy id permanently (kubernetes issues 109595 and 125579).
    The grace of an id ends when the id is available, at the latest after a minute. Allocate still
    checks the real state.

    `held` are the allocations at the time `began` (time.monotonic()). Not thread-safe.
    """

    def __init__(self, held: Collection[AllocationKey], began: float) -> None:
        self._waiting = set(held)  # ids that were never available since `began`
        self._end = began + GRACE

    @property
    def pending(self) -> bool:
        """Whether the end of the grace may still change a list."""
        return bool(self._waiting)

    def expected_at_start(
        self,
        pool: Pool,
        now_unavailable: Mapping[str, str],
        held: Mapping[str, Allocation],
        elsewhere: Mapping[str, str],
        now: float,
    ) -> frozenset[str]:
        """The ids in `now_unavailable` that are listed as healthy for now."""
        if now >= self._end:
            self._waiting.clear()
        if not self._waiting:
            return frozenset()
        resource = pool.config.resource
        self._waiting -= {
            (resource, slot.id) for slot in pool.slots if slot.id not in now_unavailable
        }
        waiting = {
            device_id
            for device_id in held
            if device_id in now_unavailable and (resource, device_id) in self._waiting
        }
        return frozenset(waiting.difference(unavailable(pool, None, held, elsewhere)))
