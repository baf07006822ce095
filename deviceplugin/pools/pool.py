"""Which HCAs are in which pool, and the device ids that the kubelet gets of each.

docs/pools.md has the rules in words. All but `used_netdevs` is computed from what it is given.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property

import msgspec

from base.paths import Paths
from deviceplugin.pools import selectors
from deviceplugin.pools.config import MOST_IDS, DevicePluginConfig, PoolConfig, Selector
from host import sysfs
from host.discovery import HCA

_UP, _REJECT = 0x1, 0x200  # RTF_UP, RTF_REJECT (include/uapi/linux/route.h)


class Slot(msgspec.Struct, frozen=True):
    """A device id of the kubelet's."""

    id: str
    hcas: tuple[str, ...]  # ids of the HCAs that its holder gets
    numa: tuple[int, ...]  # sorted; () if unknown or not wanted


class Left(msgspec.Struct, frozen=True):
    """An HCA that a pool does not offer, and why: "driver is igb, not one of mlx5_core"."""

    resource: str
    hca: str
    why: str


class Pool(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A resource with what it offers now: HCAs by id, device ids in the same order."""

    config: PoolConfig
    hcas: tuple[HCA, ...]
    slots: tuple[Slot, ...]
    problem: str | None = None  # why there are fewer ids than configured, for the log

    def slot(self, id: str) -> Slot | None:
        """The slot with that device id, None if there is none."""
        return self._slots.get(id)

    def hca(self, id: str) -> HCA | None:
        """The HCA with that id, None if the pool does not offer it."""
        return self._hcas.get(id)

    @cached_property
    def _slots(self) -> dict[str, Slot]:
        return {slot.id: slot for slot in self.slots}

    @cached_property
    def _hcas(self) -> dict[str, HCA]:
        return {hca.id: hca for hca in self.hcas}


def pools(
    config: DevicePluginConfig,
    found: Sequence[HCA],
    kept: Mapping[str, Collection[str]] | None = None,
    used: Collection[str] = (),
    *,
    worked: Collection[str] = (),
) -> list[Pool]:
    """The pools in the configuration's order.

    `kept` has, by resource, ids of HCAs that stay listed whatever the selectors say now,
    for a container holds them; no other pool gets them without `overlap`. `used` are the
    interfaces of the host's default route (`used_netdevs`), `worked` the ids of HCAs that
    had a working port some time, which a pool with `only_working` goes on offering.
    """
    return [
        _pool(pool, taken)
        for pool, taken, _ in _shared_out(config, found, kept or {}, worked, used)
    ]


def left_out(
    config: DevicePluginConfig,
    found: Sequence[HCA],
    kept: Mapping[str, Collection[str]] | None = None,
    used: Collection[str] = (),
    *,
    worked: Collection[str] = (),
) -> list[Left]:
    """Every HCA that some pool does not offer, and why, by the same rules as `pools`."""
    return [
        Left(pool.resource, hca, why)
        for pool, _, left in _shared_out(config, found, kept or {}, worked, used)
        for hca, why in left.items()
    ]


def used_netdevs(paths: Paths) -> frozenset[str]:
    """Interfaces of the IPv4 default routes of this network namespace, and those below them.

    Below a bond, bridge or VLAN are its members and its parent (lower_* in sysfs).
    """
    try:
        lines = (paths.proc / "net/route").read_text().splitlines()[1:]
    except (OSError, UnicodeDecodeError):
        return frozenset()
    found: set[str] = set()
    todo = [name for line in lines if (name := _default(line.split()))]
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += _below(paths, name)
    return frozenset(found)


_Taken = tuple[PoolConfig, list[HCA], dict[str, str]]


def _shared_out(
    config: DevicePluginConfig,
    found: Sequence[HCA],
    kept: Mapping[str, Collection[str]],
    worked: Collection[str],
    used: Collection[str],
) -> list[_Taken]:
    """Of each pool what it takes, and of the rest why not."""
    order = [pool.resource for pool in config.pools]
    owner: dict[str, str] = {}
    shares = {pool.resource for pool in config.pools if pool.overlap}
    for resource in [*order, *kept]:  # also what a pool handed out that is no longer there
        for hca_id in kept.get(resource, ()) if resource not in shares else ():
            owner.setdefault(hca_id, resource)
    result: list[_Taken] = []
    for pool in config.pools:
        taken: list[HCA] = []
        left: dict[str, str] = {}
        with_vfs = _pfs_of_taken(pool, found, worked) if pool.used != "offered" else ()
        mine = kept.get(pool.resource, ())
        for hca in sorted(found, key=lambda one: one.id):
            why = "" if hca.id in mine else _why_not(pool, hca, worked, used, with_vfs)
            holder = owner.get(hca.id, pool.resource)
            if not why and holder != pool.resource and hca.id not in mine and not pool.overlap:
                why = f"pool {holder} has it"
            if why:
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
) -> str:
    selector = selectors.match(pool.selectors, hca)
    if selector is None:
        return selectors.why_not(pool.selectors, hca)
    return _unfit(pool, selector, hca, worked) or _in_use(pool, selector, hca, used, with_vfs)


def _unfit(pool: PoolConfig, selector: Selector, hca: HCA, worked: Collection[str]) -> str:
    if pool.functions == "pci" and (hca.software or hca.aux_type):
        return "it is no PCI function"
    if pool.functions == "auxiliary" and not hca.aux_type:
        return "it is no auxiliary device"
    if hca.software and not _takes_software(pool, selector):
        return "it is a software device, which rdmaDevices, ifNames or drivers must name"
    if _needs_rdma(pool, selector) and not selectors.rdma_names(hca):
        return "it has no RDMA device"
    if not hca.driver and not selectors.rdma_names(hca):
        return "no driver is bound to it"
    if pool.only_working and not hca.working and hca.id not in worked:
        return "no port of it works or has worked"
    return ""


def _in_use(
    pool: PoolConfig,
    selector: Selector,
    hca: HCA,
    used: Collection[str],
    with_vfs: Collection[str],
) -> str:
    if pool.used == "offered" or (pool.used == "named" and selectors.names(selector)):
        return ""
    if pool.used == "left" and hca.num_vfs:
        return "it is a PF that has VFs"
    if hca.id in with_vfs:
        return "it is a PF whose VFs are offered"
    routed = set(hca.netdevs).intersection(used)
    return f"the host's default route is over {min(routed)}" if routed else ""


def _needs_rdma(pool: PoolConfig, selector: Selector) -> bool:
    """Where some selectors of a pool say isRdma, the others take what has no RDMA device, too."""
    return pool.rdma and (selector.isRdma or not any(one.isRdma for one in pool.selectors))


def _takes_software(pool: PoolConfig, selector: Selector) -> bool:
    if not pool.selectors:
        return pool.only_working
    return bool(selector.rdmaDevices or selector.ifNames or selector.drivers)


def _pfs_of_taken(
    pool: PoolConfig, found: Iterable[HCA], worked: Collection[str]
) -> frozenset[str]:
    """The PFs of those VFs that the pool takes, or would if no other had them."""
    return frozenset(
        hca.pf
        for hca in found
        if hca.pf
        and not hca.aux_type
        and (selector := selectors.match(pool.selectors, hca))
        and not _unfit(pool, selector, hca, worked)
    )


def _pool(config: PoolConfig, hcas: list[HCA]) -> Pool:
    slots, problem = _slots(config, hcas)
    return Pool(config=config, hcas=tuple(hcas), slots=tuple(slots), problem=problem)


def _slots(config: PoolConfig, hcas: list[HCA]) -> tuple[list[Slot], str | None]:
    if not hcas:
        return [], None
    if config.mode == "all":
        ids = tuple(hca.id for hca in hcas)
        numa = _numa(config, hcas)
        return [Slot(str(number), ids, numa) for number in range(config.amount)], None
    if config.mode == "exclusive":
        return [Slot(hca.id, (hca.id,), _numa(config, [hca])) for hca in hcas], None
    each = min(config.slots, MOST_IDS // len(hcas))
    problem = None
    if each != config.slots:
        problem = (
            f"{config.resource}: {config.slots} slots of {len(hcas)} HCAs are more than the "
            f"kubelet accepts ({MOST_IDS}): {each} slots of each are offered: configure fewer"
        )
    slots = []
    for hca in hcas:
        numa = _numa(config, [hca])
        slots += [Slot(f"{hca.id}-{n}", (hca.id,), numa) for n in range(each)]
    return slots, problem


def _numa(config: PoolConfig, hcas: Iterable[HCA]) -> tuple[int, ...]:
    if not config.numa:
        return ()
    nodes = {one.numa for one in hcas if one.numa is not None and one.numa >= 0}
    return tuple(sorted(nodes))


def _default(fields: Sequence[str]) -> str:
    """The interface of a line of /proc/net/route if that is a default route, else ""."""
    try:
        name, destination, _, flags, _, _, _, mask = fields[:8]
        given = int(destination, 16), int(mask, 16), int(flags, 16) & (_UP | _REJECT)
    except ValueError:
        return ""
    return name if given == (0, 0, _UP) else ""


def _below(paths: Paths, netdev: str) -> list[str]:
    entries = sysfs.names(f"{paths.sys}/class/net/{netdev}")
    return [name.removeprefix("lower_") for name in entries if name.startswith("lower_")]
