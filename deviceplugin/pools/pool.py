"""Assigns HCAs to pools and makes the device ids of each pool.

docs/use/devices.md describes the rules. Only `used_netdevs` reads system files.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property

import msgspec

from base.paths import Paths
from base.types import DeviceId
from deviceplugin.kubelet.extended_resources import MOST_IDS
from deviceplugin.pools.pool_config import DevicePluginConfig, PoolConfig
from host.sysfs import attribute_files, selectors
from host.sysfs.discovery import HCA
from host.sysfs.selectors import Selector

_UP, _REJECT = 0x1, 0x200  # RTF_UP, RTF_REJECT (include/uapi/linux/route.h)


class Slot(msgspec.Struct, frozen=True):
    id: DeviceId
    hcas: tuple[str, ...]  # the ids of the HCAs that the slot's holder gets
    numa: tuple[int, ...]  # sorted; () if unknown or switched off


class Pool(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The HCAs and ids that a resource offers now, in the order of the HCAs' ids."""

    config: PoolConfig
    hcas: tuple[HCA, ...]
    slots: tuple[Slot, ...]
    left: dict[str, str] = {}  # by HCA id, why it is not offered: "driver is igb, not …"
    problem: str | None = None  # why there are fewer ids than configured, for the log

    def slot(self, id: str) -> Slot | None:
        return self._slots.get(id)

    def hca(self, id: str) -> HCA | None:
        return next((hca for hca in self.hcas if hca.id == id), None)

    @cached_property
    def _slots(self) -> dict[str, Slot]:
        return {slot.id: slot for slot in self.slots}


def pools(
    config: DevicePluginConfig,
    hcas: Sequence[HCA],
    kept: Mapping[str, Collection[str]] | None = None,
    used: Collection[str] = (),
    *,
    worked: Collection[str] = (),
) -> list[Pool]:
    """The pools with their share of `hcas`, in the configuration's order.

    `kept` has the ids of HCAs that containers hold, by resource. A held HCA stays in its pool.
    `used` comes from `used_netdevs`. `worked` has the ids of HCAs that had a working port once.
    """
    made = []
    for pool, taken, left in _shared_out(config, hcas, kept or {}, worked, used):
        slots, problem = _slots(pool, taken)
        made.append(
            Pool(config=pool, hcas=tuple(taken), slots=tuple(slots), left=left, problem=problem)
        )
    return made


def used_netdevs(paths: Paths) -> frozenset[str]:
    """The interfaces with an IPv4 default route, and their lower interfaces (lower_* in sysfs)."""
    try:
        lines = (paths.proc / "net/route").read_text().splitlines()[1:]
    except (OSError, UnicodeDecodeError):
        return frozenset()
    used: set[str] = set()
    todo = [name for line in lines if (name := _default(line.split())) is not None]
    while todo:
        name = todo.pop()
        if name not in used:
            used.add(name)
            entries = attribute_files.names(f"{paths.sys}/class/net/{name}")
            todo += [name[len("lower_") :] for name in entries if name.startswith("lower_")]
    return frozenset(used)


_Taken = tuple[PoolConfig, list[HCA], dict[str, str]]


def _shared_out(
    config: DevicePluginConfig,
    hcas: Sequence[HCA],
    kept: Mapping[str, Collection[str]],
    worked: Collection[str],
    used: Collection[str],
) -> list[_Taken]:
    order = [pool.resource for pool in config.pools]
    owner: dict[str, str] = {}
    shares = {pool.resource for pool in config.pools if pool.overlap}
    for resource in [*order, *kept]:  # also pools that no longer exist
        for hca_id in kept.get(resource, ()) if resource not in shares else ():
            owner.setdefault(hca_id, resource)
    result: list[_Taken] = []
    for pool in config.pools:
        taken: list[HCA] = []
        left: dict[str, str] = {}
        with_vfs = _pfs_of_taken(pool, hcas, worked) if pool.used != "offered" else ()
        mine = kept.get(pool.resource, ())
        for hca in sorted(hcas, key=lambda hca: hca.id):
            why = None if hca.id in mine else _why_not(pool, hca, worked, used, with_vfs)
            holder = owner.get(hca.id, pool.resource)
            of_other = holder != pool.resource and hca.id not in mine and not pool.overlap
            if why is None and of_other:
                why = f"pool {holder} has it"
            if why is not None:
                left[hca.id] = why
            else:
                taken.append(hca)
                owner.setdefault(hca.id, pool.resource)
        result.append((pool, taken, left))
    return result


def _why_not(
    pool: PoolConfig,
    hca: HCA,
    worked: Collection[str],
    used: Collection[str],
    with_vfs: Collection[str],
) -> str | None:
    selector = selectors.match(pool.selectors, hca)
    if selector is None:
        return selectors.why_not(pool.selectors, hca)
    why = _unsuitable(pool, selector, hca, worked)
    return _in_use(pool, selector, hca, used, with_vfs) if why is None else why


def _unsuitable(
    pool: PoolConfig, selector: Selector, hca: HCA, worked: Collection[str]
) -> str | None:
    if pool.functions == "pci" and (hca.software or hca.aux_type):
        return "it is not a PCI function"
    if pool.functions == "auxiliary" and not hca.aux_type:
        return "it is not an auxiliary device"
    named = selector.rdmaDevices or selector.ifNames or selector.drivers
    if hca.software and not (named if pool.selectors else pool.only_working):
        return "it is a software device: rdmaDevices, ifNames or drivers must name it"
    # If a selector has isRdma, selectors without isRdma also match HCAs without an RDMA device.
    needs_rdma = selector.isRdma or not any(other.isRdma for other in pool.selectors)
    if pool.rdma and needs_rdma and not hca.rdma_names:
        return "it has no RDMA device"
    if not hca.driver and not hca.rdma_names:
        return "no driver is bound to it"
    if pool.only_working and not hca.working and hca.id not in worked:
        return "none of its ports works or has worked"
    return None


def _in_use(
    pool: PoolConfig, selector: Selector, hca: HCA, used: Collection[str], with_vfs: Collection[str]
) -> str | None:
    if pool.used == "offered" or (pool.used == "named" and selectors.names(selector)):
        return None
    if pool.used == "left" and hca.num_vfs:
        return "it is a PF that has VFs"
    if hca.id in with_vfs:
        return "it is a PF whose VFs are offered"
    routed = set(hca.netdevs).intersection(used)
    return f"the host's default route uses {min(routed)}" if routed else None


def _pfs_of_taken(pool: PoolConfig, hcas: Iterable[HCA], worked: Collection[str]) -> frozenset[str]:
    """The PFs of the VFs that the pool's selectors match, even if another pool has the VFs."""
    return frozenset(
        hca.pf
        for hca in hcas
        if hca.pf
        and not hca.aux_type
        and (selector := selectors.match(pool.selectors, hca))
        and _unsuitable(pool, selector, hca, worked) is None
    )


def _slots(config: PoolConfig, hcas: list[HCA]) -> tuple[list[Slot], str | None]:
    if not hcas:
        return [], None
    if config.mode == "all":
        ids = tuple(hca.id for hca in hcas)
        numa = _numa(config, hcas)
        return [Slot(DeviceId(str(number)), ids, numa) for number in range(config.amount)], None
    if config.mode == "exclusive":
        return [Slot(DeviceId(hca.id), (hca.id,), _numa(config, [hca])) for hca in hcas], None
    per_hca = min(config.slots, MOST_IDS // len(hcas))
    problem = None
    if per_hca != config.slots:
        problem = (
            f"{config.resource}: {config.slots} slots of {len(hcas)} HCAs are more ids than the "
            f"kubelet accepts ({MOST_IDS}): offers {per_hca} slots of each HCA: set slots to "
            f"{per_hca} or less"
        )
    slots = []
    for hca in hcas:
        numa = _numa(config, [hca])
        slots += [Slot(DeviceId(f"{hca.id}-{n}"), (hca.id,), numa) for n in range(per_hca)]
    return slots, problem


def _numa(config: PoolConfig, hcas: Iterable[HCA]) -> tuple[int, ...]:
    if not config.numa:
        return ()
    nodes = {hca.numa for hca in hcas if hca.numa is not None and hca.numa >= 0}
    return tuple(sorted(nodes))


def _default(fields: Sequence[str]) -> str | None:
    """The interface of a line of /proc/net/route; `None` if the line is not a default route."""
    try:
        name, destination, _, flags, _, _, _, mask = fields[:8]
        route = int(destination, 16), int(mask, 16), int(flags, 16) & (_UP | _REJECT)
    except ValueError:
        return None
    return name if route == (0, 0, _UP) else None
