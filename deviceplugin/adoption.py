"""What stands behind an id that only the kubelet knows, and what its holder really has.

The checkpoint was lost, the pool had another mode then, or another device plugin served the
resource. Only the kubelet remembers the nodes that the container was given, and only by name: a
driver that was loaded anew may have given those names to other HCAs since.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from msgspec.structs import replace

from base.paths import Paths
from deviceplugin import pod_devices
from deviceplugin.allocate import cdi
from deviceplugin.allocate.allocation import recorded
from deviceplugin.allocate.nodes import inside
from deviceplugin.checkpoint import AllocatedHCA, AllocatedNode, AllocatedRdmaDevice, Allocation
from deviceplugin.kubelet.records import PodDevices
from deviceplugin.pools.pool import Pool
from host import pci
from host.discovery import HCA

# IB_UVERBS_MAJOR, IB_UVERBS_BASE_MINOR, IB_UVERBS_NUM_FIXED_MINOR (core/uverbs_main.c)
_MAJOR, _FIRST_MINOR, _FIXED = 231, 192, 32


def behind(
    paths: Paths, pool: Pool, found: Sequence[HCA], row: PodDevices
) -> dict[str, tuple[AllocatedHCA, ...]]:
    """What the holder of a row of the pool's resource has, by device id: () if nothing tells.

    `found` are the HCAs of the node.
    """
    verbs = pci.uverbs_numbers(paths)
    own = {one.id: {verbs[name][0] for name in one.rdma_names if name in verbs} for one in found}
    hcas = {known: _hcas(pool, found, known, row, own) for known in row.ids}
    held = {one.id: one for of_id in hcas.values() for one in of_id}
    numbers = {name: (major, minor) for name, major, minor in verbs.values()}
    theirs = {node for known in held for node in own.get(known, ())}
    # Nodes that were these HCAs' once. Which was whose cannot be told; that they are not, can.
    former = [_node(name, numbers) for name in row.nodes if name not in theirs]
    devices = {
        known: _as_given(recorded(pool, one), row.nodes, former) for known, one in held.items()
    }
    return {
        known: _had(tuple(devices[one.id] for one in of_id)) or _named(known)
        for known, of_id in hcas.items()
    }


def agree(entries: Iterable[Allocation], row: PodDevices) -> bool:
    """Whether entries say what the kubelet's row says that the container has, if that tells."""
    devices = [device for one in entries for device in one.devices]
    if row.nodes:
        verbs = (rdma.uverbs for device in devices for rdma in device.rdma)
        return {node.path.rpartition("/")[2] for node in verbs if node} == set(row.nodes)
    names = {cdi.qualified(row.resource, device.id) for device in devices}
    return not row.cdi or names == set(row.cdi)


def is_as_recorded(device: AllocatedHCA, hca: HCA) -> bool:
    """Whether the HCA has the verbs devices that the checkpoint's entry says."""
    now = {
        AllocatedNode(inside(rdma.uverbs.name), rdma.uverbs.major, rdma.uverbs.minor)
        for rdma in hca.rdma
        if rdma.uverbs is not None
    }
    return all(rdma.uverbs is None or rdma.uverbs in now for rdma in device.rdma)


def _hcas(
    pool: Pool,
    found: Sequence[HCA],
    device_id: str,
    row: PodDevices,
    own: Mapping[str, AbstractSet[str]],
) -> Sequence[HCA]:
    """By the pool as it is; else by the id's own words; else by the nodes; else all of mode "all".

    Of those of a pool with CDI the ones that the container has the names of.
    """
    slot = pool.slot(device_id)
    if slot is not None:
        of_slot = [one for one in pool.hcas if one.id in slot.hcas]
        named = [one for one in of_slot if cdi.qualified(row.resource, one.id) in row.cdi]
        return named or of_slot
    meant = pod_devices.hca_of(device_id)
    return (
        [one for one in found if one.id == meant or device_id in one.rdma_names]
        or [one for one in found if not own[one.id].isdisjoint(row.nodes)]
        or (pool.hcas if pool.config.mode == "all" and pci.canonical(meant) is None else ())
    )


def _as_given(
    device: AllocatedHCA, nodes: Collection[str], former: list[AllocatedNode]
) -> AllocatedHCA:
    """The entry with the nodes that the holder has: those of `former` for what it has not."""
    if not nodes:  # not told: by CDI names, or by PodResources alone
        return device
    return replace(device, rdma=tuple(_rdma_as_given(one, nodes, former) for one in device.rdma))


def _rdma_as_given(
    rdma: AllocatedRdmaDevice, nodes: Collection[str], former: list[AllocatedNode]
) -> AllocatedRdmaDevice:
    if rdma.uverbs is None or rdma.uverbs.path.rpartition("/")[2] in nodes:
        return rdma
    return replace(rdma, uverbs=former.pop(0) if former else None)


def _had(devices: tuple[AllocatedHCA, ...]) -> tuple[AllocatedHCA, ...]:
    """Of a token's devices those that its holder can use, if that can be told."""
    usable = tuple(one for one in devices if not one.rdma or any(rdma.uverbs for rdma in one.rdma))
    return usable or devices


def _named(device_id: str) -> tuple[AllocatedHCA, ...]:
    """The function whose address the id has, which may be on its way yet."""
    address = pci.canonical(pod_devices.hca_of(device_id))
    if address is None:
        return ()
    return (AllocatedHCA(id=address, address=address, netdevs=(), rdma=()),)


def _node(name: str, numbers: Mapping[str, tuple[int, int]]) -> AllocatedNode:
    number = int(name.removeprefix("uverbs"))
    fixed = (_MAJOR, _FIRST_MINOR + number) if number < _FIXED else (0, 0)
    return AllocatedNode(inside(name), *numbers.get(name, fixed))
