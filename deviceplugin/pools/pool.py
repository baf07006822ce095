"""Which adapters are in which pool, and the device ids that the kubelet gets of each.

docs/pools.md has the rules in words. All but `used_netdevs` is computed from what it is given.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property

import msgspec

from deviceplugin.pools import selectors
from deviceplugin.pools.config import MOST_IDS, Config, PoolConfig, Selector
from host import sysfs
from host.adapters import Adapter
from host.paths import Paths

_UP, _REJECT = 0x1, 0x200  # RTF_UP, RTF_REJECT (include/uapi/linux/route.h)


class Slot(msgspec.Struct, frozen=True):
    """A device id of the kubelet's."""

    id: str
    adapters: tuple[str, ...]  # ids of the adapters that its holder gets
    numa: tuple[int, ...]  # sorted; () if unknown or not wanted


class Left(msgspec.Struct, frozen=True):
    """An adapter that a pool does not offer, and why: "driver is igb, not one of mlx5_core"."""

    resource: str
    adapter: str
    why: str


class Pool(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A resource with what it offers now: adapters by id, device ids in the same order."""

    config: PoolConfig
    adapters: tuple[Adapter, ...]
    slots: tuple[Slot, ...]
    problem: str = ""  # why there are fewer ids than configured, for the log

    def slot(self, id: str) -> Slot | None:
        """The slot with that device id, None if there is none."""
        return self._slots.get(id)

    def adapter(self, id: str) -> Adapter | None:
        """The adapter with that id, None if the pool does not offer it."""
        return self._adapters.get(id)

    @cached_property
    def _slots(self) -> dict[str, Slot]:
        return {slot.id: slot for slot in self.slots}

    @cached_property
    def _adapters(self) -> dict[str, Adapter]:
        return {adapter.id: adapter for adapter in self.adapters}


def pools(
    config: Config,
    found: Sequence[Adapter],
    kept: Mapping[str, Collection[str]] | None = None,
    used: Collection[str] = (),
    *,
    worked: Collection[str] = (),
) -> list[Pool]:
    """The pools in the configuration's order.

    `kept` has, by resource, ids of adapters that stay listed whatever the selectors say now,
    for a container holds them; no other pool gets them without `overlap`. `used` are the
    interfaces of the host's default route (`used_netdevs`), `worked` the ids of adapters that
    had a working port some time, which a pool with `only_working` goes on offering.
    """
    return [
        _pool(pool, taken)
        for pool, taken, _ in _shared_out(config, found, kept or {}, worked, used)
    ]


def left_out(
    config: Config,
    found: Sequence[Adapter],
    kept: Mapping[str, Collection[str]] | None = None,
    used: Collection[str] = (),
    *,
    worked: Collection[str] = (),
) -> list[Left]:
    """Every adapter that some pool does not offer, and why, by the same rules as `pools`."""
    return [
        Left(pool.resource, adapter, why)
        for pool, _, left in _shared_out(config, found, kept or {}, worked, used)
        for adapter, why in left.items()
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


_Taken = tuple[PoolConfig, list[Adapter], dict[str, str]]


def _shared_out(
    config: Config,
    found: Sequence[Adapter],
    kept: Mapping[str, Collection[str]],
    worked: Collection[str],
    used: Collection[str],
) -> list[_Taken]:
    """Of each pool what it takes, and of the rest why not."""
    order = [pool.resource for pool in config.pools]
    owner: dict[str, str] = {}
    shares = {pool.resource for pool in config.pools if pool.overlap}
    for resource in [*order, *kept]:  # also what a pool handed out that is no longer there
        for adapter_id in kept.get(resource, ()) if resource not in shares else ():
            owner.setdefault(adapter_id, resource)
    result: list[_Taken] = []
    for pool in config.pools:
        taken: list[Adapter] = []
        left: dict[str, str] = {}
        with_vfs = _pfs_of_taken(pool, found, worked) if pool.used != "offered" else ()
        mine = kept.get(pool.resource, ())
        for adapter in sorted(found, key=lambda one: one.id):
            why = "" if adapter.id in mine else _why_not(pool, adapter, worked, used, with_vfs)
            holder = owner.get(adapter.id, pool.resource)
            if not why and holder != pool.resource and adapter.id not in mine and not pool.overlap:
                why = f"pool {holder} has it"
            if why:
                left[adapter.id] = why
            else:
                taken.append(adapter)
                owner.setdefault(adapter.id, pool.resource)
        result.append((pool, taken, left))
    return result


def _why_not(
    pool: PoolConfig,
    adapter: Adapter,
    worked: Collection[str],
    used: Collection[str],
    with_vfs: Collection[str],
) -> str:
    selector = selectors.match(pool.selectors, adapter)
    if selector is None:
        return selectors.why_not(pool.selectors, adapter)
    return _unfit(pool, selector, adapter, worked) or _in_use(
        pool, selector, adapter, used, with_vfs
    )


def _unfit(pool: PoolConfig, selector: Selector, adapter: Adapter, worked: Collection[str]) -> str:
    if pool.functions == "pci" and (adapter.software or adapter.aux_type):
        return "it is no PCI function"
    if pool.functions == "auxiliary" and not adapter.aux_type:
        return "it is no auxiliary device"
    if adapter.software and not _takes_software(pool, selector):
        return "it is a software device, which rdmaDevices, ifNames or drivers must name"
    if _needs_rdma(pool, selector) and not selectors.rdma_names(adapter):
        return "it has no RDMA device"
    if not adapter.driver and not selectors.rdma_names(adapter):
        return "no driver is bound to it"
    if pool.only_working and not adapter.working and adapter.id not in worked:
        return "no port of it works or has worked"
    return ""


def _in_use(
    pool: PoolConfig,
    selector: Selector,
    adapter: Adapter,
    used: Collection[str],
    with_vfs: Collection[str],
) -> str:
    if pool.used == "offered" or (pool.used == "named" and selectors.names(selector)):
        return ""
    if pool.used == "left" and adapter.num_vfs:
        return "it is a PF that has VFs"
    if adapter.id in with_vfs:
        return "it is a PF whose VFs are offered"
    routed = set(adapter.netdevs).intersection(used)
    return f"the host's default route is over {min(routed)}" if routed else ""


def _needs_rdma(pool: PoolConfig, selector: Selector) -> bool:
    """Where some selectors of a pool say isRdma, the others take what has no RDMA device, too."""
    return pool.rdma and (selector.isRdma or not any(one.isRdma for one in pool.selectors))


def _takes_software(pool: PoolConfig, selector: Selector) -> bool:
    if not pool.selectors:
        return pool.only_working
    return bool(selector.rdmaDevices or selector.ifNames or selector.drivers)


def _pfs_of_taken(
    pool: PoolConfig, found: Iterable[Adapter], worked: Collection[str]
) -> frozenset[str]:
    """The PFs of those VFs that the pool takes, or would if no other had them."""
    return frozenset(
        adapter.pf
        for adapter in found
        if adapter.pf
        and not adapter.aux_type
        and (selector := selectors.match(pool.selectors, adapter))
        and not _unfit(pool, selector, adapter, worked)
    )


def _pool(config: PoolConfig, adapters: list[Adapter]) -> Pool:
    slots, problem = _slots(config, adapters)
    return Pool(config=config, adapters=tuple(adapters), slots=tuple(slots), problem=problem)


def _slots(config: PoolConfig, adapters: list[Adapter]) -> tuple[list[Slot], str]:
    if not adapters:
        return [], ""
    if config.mode == "all":
        ids = tuple(adapter.id for adapter in adapters)
        numa = _numa(config, adapters)
        return [Slot(str(number), ids, numa) for number in range(config.amount)], ""
    if config.mode == "exclusive":
        return [Slot(one.id, (one.id,), _numa(config, [one])) for one in adapters], ""
    each = min(config.slots, MOST_IDS // len(adapters))
    problem = (
        ""
        if each == config.slots
        else (
            f"{config.resource}: {config.slots} slots of {len(adapters)} adapters are more than "
            f"the kubelet takes ({MOST_IDS}): {each} of each are offered: configure fewer"
        )
    )
    slots = []
    for adapter in adapters:
        numa = _numa(config, [adapter])
        slots += [Slot(f"{adapter.id}-{n}", (adapter.id,), numa) for n in range(each)]
    return slots, problem


def _numa(config: PoolConfig, adapters: Iterable[Adapter]) -> tuple[int, ...]:
    if not config.numa:
        return ()
    nodes = {one.numa for one in adapters if one.numa is not None and one.numa >= 0}
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
