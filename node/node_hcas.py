"""Lists the HCAs of a node, with their pools, faults and holders."""

from collections import Counter
from collections.abc import Mapping

import msgspec

from deviceplugin import availability
from deviceplugin.pools.pool import Pool
from host.sysfs.discovery import HCA
from node.state import DeviceHolder, ThisNode


class Offered(msgspec.Struct, frozen=True):
    resource: str
    ids: int  # device ids that give a container this HCA
    held: int  # ids that containers hold, according to the checkpoint
    unfit: dict[str, int]  # the number of ids that cannot be allocated, by reason


class NotOffered(msgspec.Struct, frozen=True):
    resource: str
    why: str


class HcaHolder(msgspec.Struct, frozen=True):
    """A container that holds device ids of an HCA. `ids` is the number of these device ids."""

    container: DeviceHolder
    resource: str
    ids: int


class ListedHCA(msgspec.Struct, frozen=True, kw_only=True):
    hca: HCA
    present: bool  # False if the HCA is gone and a container holds it
    fault: str  # the HCA's fault for the pools that offer it, or ""
    offered: tuple[Offered, ...]
    not_offered: tuple[NotOffered, ...]
    held: tuple[HcaHolder, ...]  # sorted by pod and container


def listed(node: ThisNode) -> list[ListedHCA]:
    """HCAs that are present or that containers hold. Raises ConfigError or CheckpointDamaged."""
    held = Counter((one.resource, device.id) for one in node.allocations for device in one.devices)
    offered: dict[str, list[Offered]] = {}
    faults = dict(node.reports)
    for pool in node.pools:
        resource = pool.config.resource
        ids = Counter(hca_id for slot in pool.slots for hca_id in slot.hcas)
        of_pool = {hca.id: availability.fault(pool, hca, node.reports) for hca in pool.hcas}
        unfit = _reasons(pool, of_pool, node.unfit[resource])
        for hca in pool.hcas:
            hca_id = hca.id
            has = Offered(resource, ids[hca_id], held[resource, hca_id], unfit.get(hca_id, {}))
            faults[hca_id] = of_pool[hca_id] or (faults[hca_id] if hca_id in offered else None)
            offered.setdefault(hca_id, []).append(has)
    left: dict[str, list[NotOffered]] = {}
    for pool in node.pools:
        for hca_id, why in pool.left.items():
            left.setdefault(hca_id, []).append(NotOffered(pool.config.resource, why))
    gone = {hca.id for hca in node.gone}
    holders = _holders(node) if held else {}
    return [
        ListedHCA(
            hca=hca,
            present=hca.id not in gone,
            fault=faults[hca.id] or "",
            offered=tuple(offered.get(hca.id, ())),
            not_offered=tuple(left.get(hca.id, ())),
            held=tuple(holders.get(hca.id, ())),
        )
        for hca in sorted([*node.hcas, *node.gone], key=lambda hca: hca.id)
    ]


def _holders(node: ThisNode) -> dict[str, list[HcaHolder]]:
    counts = Counter(
        (device.id, holder.pod, holder.name, holder.uid, allocation.resource)
        for allocation in node.allocations
        for holder in (node.holders.by_key.get(allocation.key, DeviceHolder()),)
        for device in allocation.devices
    )
    found: dict[str, list[HcaHolder]] = {}
    for (hca_id, pod, name, uid, resource), ids in sorted(counts.items()):
        found.setdefault(hca_id, []).append(HcaHolder(DeviceHolder(pod, name, uid), resource, ids))
    return found


def _reasons(
    pool: Pool, faults: Mapping[str, str | None], unfit: Mapping[str, str]
) -> dict[str, dict[str, int]]:
    by_hca: dict[str, dict[str, int]] = {}
    for slot in pool.slots:
        for hca_id in slot.hcas:
            if why := faults[hca_id] or unfit.get(slot.id, ""):
                reasons = by_hca.setdefault(hca_id, {})
                reasons[why] = reasons.get(why, 0) + 1
    return by_hca
