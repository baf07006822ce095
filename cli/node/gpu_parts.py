"""Parts of GPUs that containers of this node hold: who, how much, and what they use of it.

The allocation checkpoint says who holds what, the kubelet has the names of pods, and the files of a
group say what it uses. All of it is only read.
"""

import msgspec

from base.types import DeviceId
from cli.node.state import DeviceHolder, ThisNode
from deviceplugin.checkpoint import AllocatedGPU, Allocation
from gpu.limits.group_limits import GroupError
from gpu.limits.groups import GroupFiles, Groups
from gpu.limits.region import RegionInvalid, RegionUse


class GroupUse(msgspec.Struct, frozen=True, kw_only=True):
    """What a group's files say of one GPU now. The tenant writes what its processes use."""

    memory_bytes: int  # what it may use
    compute_share: float  # of the GPU's time, in (0, 1]
    processes: int  # registered ones that have not ended
    used_bytes: int | None = None  # None: the tenant has damaged its file
    peak_bytes: int | None = None
    denied: int | None = None  # refused allocations


class GpuPart(msgspec.Struct, frozen=True, kw_only=True):
    """What one container holds of one GPU."""

    gpu: str  # the GPU's address; "" until the container's start decides
    container: DeviceHolder
    resources: tuple[str, ...]
    ids: tuple[DeviceId, ...]
    memory_bytes: int  # by the allocation; 0: not limited
    compute_share: float  # of the GPU's time, by the allocation; 0: not limited
    group: str = ""  # whose limits they are; "" if nothing is limited
    use: GroupUse | None = None  # None: there is no group, or `problem`
    problem: str = ""  # why its use is not known, or what is wrong with it


def parts(node: ThisNode, notes: list[str]) -> list[GpuPart]:
    """Every part that a container holds, by GPU and holder.

    Raises CheckpointDamaged.
    """
    of_gpus = [entry for entry in node.allocations if entry.gpu is not None]
    if not of_gpus:
        return []
    holders, problems = node.holders
    notes += problems
    together: dict[tuple[str, ...], list[tuple[Allocation, AllocatedGPU]]] = {}
    for entry in of_gpus:
        assert entry.gpu is not None
        holder = holders.get(entry.key, DeviceHolder())
        own = entry.gpu.group or entry.resource
        who = (holder.pod, holder.name) if holder.pod else (own,)
        together.setdefault((entry.gpu.bdf, *who), []).append((entry, entry.gpu))
    made = [
        _part(node, entries, holders.get(entries[0][0].key, DeviceHolder()))
        for entries in together.values()
    ]
    return sorted(made, key=lambda part: (part.gpu, part.container.pod, part.container.name))


def _part(
    node: ThisNode, entries: list[tuple[Allocation, AllocatedGPU]], holder: DeviceHolder
) -> GpuPart:
    gpu = entries[0][1]
    group = next((each.group for _, each in entries if each.group), "")
    use, problem = _use(node, group, gpu.uuid) if group else (None, "")
    return GpuPart(
        gpu=gpu.bdf,
        container=holder,
        resources=tuple(dict.fromkeys(entry.resource for entry, _ in entries)),
        ids=tuple(entry.id for entry, _ in entries),
        memory_bytes=sum(each.memory_bytes for _, each in entries),
        compute_share=round(sum(each.compute_share for _, each in entries), 4),
        group=group,
        use=use,
        problem=problem,
    )


def _use(node: ThisNode, group: str, uuid: str) -> tuple[GroupUse | None, str]:
    """What the group's files say of that GPU; and why not, or what is wrong with them."""
    opened = Groups(node.paths.run / "gpu")
    try:
        files = opened.read(group)
    except (GroupError, OSError) as error:
        return None, str(error)
    if files.limit.uuid != uuid:
        return None, f"group {group}: its limits are not of {uuid}"
    said, problem = _said(opened, group, files)
    return GroupUse(
        memory_bytes=files.in_force.memory_bytes,
        compute_share=files.limit.compute_share,
        processes=len({each.host_pid for each in files.processes.values() if each.alive}),
        used_bytes=said.used_bytes if said else None,
        peak_bytes=said.peak_bytes if said else None,
        denied=said.denied if said else None,
    ), problem


def _said(opened: Groups, group: str, files: GroupFiles) -> tuple[RegionUse | None, str]:
    """What the tenant's file says."""
    try:
        with opened.region(group, files) as region:
            return region.use(), ""
    except (RegionInvalid, OSError) as error:
        return None, str(error)


def bytes_text(size: int | None) -> str:
    """Bytes of a GPU for a table; "" if they are not known."""
    if size is None:
        return ""
    return f"{size / 2**30:.4g} GiB"
