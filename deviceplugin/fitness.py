"""Which device ids of a pool may be handed out now, beyond the health of the adapters."""

from collections.abc import Iterator, Mapping

from deviceplugin.checkpoint import Allocation
from deviceplugin.grants.nodes import gives_verbs
from deviceplugin.pools.pool import Pool, Slot
from host.adapters import Adapter


def unfit(pool: Pool, faults: Mapping[str, str], held: Mapping[str, Allocation]) -> dict[str, str]:
    """Why an id may not be handed out, by id; the fit ones are left out.

    `faults` are the adapters' own, by adapter; `held` the pool's allocations by id. One adapter of
    several is enough: the holder of all gets those that are well.
    """
    contested = dict(_contested(pool, held))
    found = {}
    for slot in pool.slots:
        reasons = [
            contested.get(known) or faults.get(known) or _away(pool, slot, known, held)
            for known in slot.adapters
        ]
        stale = "" if slot.id not in held else _stale(pool, held[slot.id])
        if stale or all(reasons):
            found[slot.id] = stale or next(iter(reasons), "it has no adapter")
    return found


def _contested(pool: Pool, held: Mapping[str, Allocation]) -> Iterator[tuple[str, str]]:
    """Adapters that are held by an id of an earlier configuration, and cannot be shared with it."""
    for known, allocation in held.items():
        if pool.slot(known) is not None:
            continue
        for device in allocation.devices:
            if pool.config.mode == "exclusive" or known == device.id:
                yield device.id, f"{device.id} is held by id {known} of an earlier configuration"


def _away(pool: Pool, slot: Slot, known: str, held: Mapping[str, Allocation]) -> str:
    """What is wrong with an adapter whose RDMA device is not in sight."""
    adapter = pool.adapter(known)
    if adapter is None or adapter.rdma or not gives_verbs(pool, adapter):
        return ""
    if not adapter.verbs:
        return f"{known} has no RDMA device now: is the RDMA module of its driver loaded?"
    # In the subsystem's exclusive mode it went with its holder's interface.
    return "" if slot.id in held else f"the RDMA device of {known} is in another network namespace"


def _stale(pool: Pool, allocation: Allocation) -> str:
    """That the HCA has other device numbers than the container was given, or "".

    A container that starts again is given the nodes of before by the kubelet, which may be another
    HCA's by now. A CDI name means those of now.
    """
    if pool.config.cdi:
        return ""
    for device in allocation.devices:
        adapter = pool.adapter(device.id)
        now = _numbers(adapter) if adapter is not None else frozenset()
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


def _numbers(adapter: Adapter) -> frozenset[tuple[str, int, int]]:
    nodes = (rdma.uverbs for rdma in adapter.rdma)
    return frozenset((node.name, node.major, node.minor) for node in nodes if node is not None)
