"""Which device ids of a pool may be handed out now, and why others may not.

An id is fit while its HCA is well, as far as the pool's holders need that, and nobody holds
the HCA who cannot share it. What is wrong with ports comes from `health`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

from deviceplugin.allocate.nodes import gives_uverbs
from deviceplugin.checkpoint import Allocation
from deviceplugin.health import GONE
from deviceplugin.pools.pool import Pool, Slot
from host.discovery import HCA

_NOBODY: Mapping[str, str] = {}


def unfit(
    pool: Pool,
    reports: Mapping[str, str],
    held: Mapping[str, Allocation],
    elsewhere: Mapping[str, str] = _NOBODY,
) -> dict[str, str]:
    """Why an id may not be handed out, by id; the fit ones are left out.

    `reports` are of `Health`, over all HCAs; `held` the pool's allocations by id; `elsewhere`
    of the function below. One HCA of several is enough: the holder of all gets those that are
    well.
    """
    taken = _taken(pool, held, elsewhere)
    faults = {one.id: fault(pool, one, reports) for one in pool.hcas}
    # In the subsystem's exclusive mode an RDMA device goes with its holder's interface.
    away = {one.id for one in pool.hcas if _is_away(pool, one)}

    def why(slot: Slot, known: str) -> str:
        where = _away(known) if known in away and slot.id not in held else ""
        return taken.get(known) or faults[known] or where

    return _of_slots(pool, pool.slots, held, why)


def barred(
    pool: Pool,
    slots: Iterable[Slot],
    held: Mapping[str, Allocation],
    elsewhere: Mapping[str, str],
) -> dict[str, str]:
    """Those of `unfit` whatever the hardware does: for somebody holds what they stand for."""
    taken = _taken(pool, held, elsewhere)
    return _of_slots(pool, slots, held, lambda _, known: taken.get(known, ""))


def elsewhere(pool: Pool, allocations: Iterable[Allocation]) -> dict[str, str]:
    """Adapters that another resource has handed out and this pool must not, with the reason.

    Those are all for a pool of mode "exclusive"; for any other, what somebody has alone.
    """
    found: dict[str, str] = {}
    own = pool.config.resource
    for one in allocations:
        if one.resource == own:
            continue
        for device in one.devices if one.exclusive or pool.config.mode == "exclusive" else ():
            why = f"{device.id} is held by id {one.id} of {one.resource}"
            found.setdefault(device.id, f"{why}: it is free when that pod is gone")
    return found


def fault(pool: Pool, hca: HCA, reports: Mapping[str, str]) -> str:
    """What is wrong with an HCA for a holder of the pool's; "" if nothing is."""
    own = reports.get(hca.id, "")
    if own == GONE:
        return own
    if not gives_uverbs(pool, hca):
        return ""
    if not hca.rdma and not hca.rdma_names:
        return f"{hca.id} has no RDMA device now: is the RDMA module of its driver loaded?"
    if hca.rdma and not any(rdma.uverbs for rdma in hca.rdma):
        return f"{hca.rdma[0].name} has no uverbs device: is the module ib_uverbs loaded?"
    if own_ports_count(pool, hca, reports):
        return own
    above = reports[hca.pf]
    return above and f"its PF {hca.pf} is not well: {above}"


def own_ports_count(pool: Pool, hca: HCA, reports: Mapping[str, str]) -> bool:
    """Whether an HCA's own ports tell how it is, rather than its PF's or nobody's.

    A VF or SF that a pod is to have alone is set up when it is attached. Before, its port is DOWN:
    RoCE's with its interface, InfiniBand's for want of a GUID. The wire is the PF's, if that is on
    this node: a virtual machine has VFs without. One that stays with the host for many holders
    (modes "shared" and "all") is set up by nobody else, so it must be well itself.
    """
    if not gives_uverbs(pool, hca):
        return False
    set_up_later = pool.config.mode == "exclusive" and reports.get(hca.pf, GONE) != GONE
    return not set_up_later


def changes(
    pool: Pool, before: Mapping[str, str], now: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """What became of ids between two answers of `unfit`: ids in words, and why or "" if fit.

    Those of one HCA with one reason are told together.
    """
    told: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for slot in pool.slots:
        why = now.get(slot.id, "")
        if why != before.get(slot.id, ""):
            told.setdefault((slot.hcas, why), []).append(slot.id)
    for (_, why), ids in told.items():
        yield ids[0] if len(ids) == 1 else f"{ids[0]} and {len(ids) - 1} more", why


def _of_slots(
    pool: Pool,
    slots: Iterable[Slot],
    held: Mapping[str, Allocation],
    why: Callable[[Slot, str], str],
) -> dict[str, str]:
    found = {}
    for slot in slots:
        reasons = [why(slot, known) for known in slot.hcas]
        stale = "" if slot.id not in held else _stale(pool, held[slot.id])
        if stale or all(reasons):
            found[slot.id] = stale or next(iter(reasons), "it has no HCA")
    return found


def _taken(
    pool: Pool, held: Mapping[str, Allocation], elsewhere: Mapping[str, str]
) -> Mapping[str, str]:
    return {**elsewhere, **dict(_contested(pool, held))}


def _contested(pool: Pool, held: Mapping[str, Allocation]) -> Iterator[tuple[str, str]]:
    """Adapters that are held by an id of an earlier configuration, and cannot be shared with it."""
    for known, allocation in held.items():
        if pool.slot(known) is not None:
            continue
        for device in allocation.devices:
            if pool.config.mode == "exclusive" or known == device.id:
                yield (
                    device.id,
                    f"{device.id} is held by id {known} of an earlier configuration: it is free "
                    "when that pod is gone",
                )


def _is_away(pool: Pool, hca: HCA) -> bool:
    return bool(hca.rdma_names) and not hca.rdma and gives_uverbs(pool, hca)


def _away(known: str) -> str:
    return (
        f"the RDMA device of {known} is in another network namespace: it is back when that is gone"
    )


def _stale(pool: Pool, allocation: Allocation) -> str:
    """That the HCA has other device numbers than the container was given, or "".

    A container that starts again is given the nodes of before by the kubelet, which may be another
    HCA's by now. A CDI name means those of now.
    """
    if pool.config.cdi:
        return ""
    for device in allocation.devices:
        hca = pool.hca(device.id)
        now = _numbers(hca) if hca is not None else frozenset()
        for rdma in device.rdma:
            node = rdma.uverbs
            if node is None or not now:
                continue
            if (node.path.rpartition("/")[2], node.major, node.minor) not in now:
                return (
                    f"its holder was given {node.path} ({node.major}:{node.minor}) for "
                    f"{device.id}, which has another one since its driver was loaded anew: "
                    "delete that pod"
                )
    return ""


def _numbers(hca: HCA) -> frozenset[tuple[str, int, int]]:
    nodes = (rdma.uverbs for rdma in hca.rdma)
    return frozenset((node.name, node.major, node.minor) for node in nodes if node is not None)
