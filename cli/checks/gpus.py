"""Checks of GPUs: nodes, driver, libraries of containers, tiers, other plugins, and limits."""

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from cli import gpu_parts, node_gpus
from cli.checks import Outcome, failed, not_applicable, ok, warning
from cli.gpu_parts import GpuPart
from cli.node_gpus import ListedGPU
from cli.this_node import ThisNode, gpu_label
from deviceplugin.gpus.tiers import NO_CDI
from deviceplugin.kubelet import records
from deviceplugin.kubelet.records import KubeletUnreadable
from gpu import kernel_tier, nvml, processes, tiers
from gpu.groups import Groups
from gpu.mps_tier import MpsTier
from gpu.nvml import Nvml, NvmlError
from gpu.tiers import Obstacle, Tier
from host.gpus import GPU, address_of

LIBRARIES = ("libpfcuda.so", "libpfnvml.so")
HOOK = "gpu-limit"  # of the tier kernel
_MACHINES: Mapping[str, int] = {"x86_64": 62, "aarch64": 183}  # elf.h: EM_X86_64, EM_AARCH64
_NO_POOL = "no pool of GPUs is configured"
_NONE = "limits are counted, and no container is held to them"
_SHOWN = 4


def gpu_nodes(node: ThisNode) -> Iterator[Outcome]:
    """The driver's GPUs and their /dev/nvidia*: a failure where a pool offers the GPU."""
    if not node.config.gpus:
        yield not_applicable(_NO_POOL)
        return
    found = node_gpus.listed(node).gpus
    if not found:
        yield failed(
            f"pools of GPUs are configured, and {node.paths.proc}/driver/nvidia/gpus has none",
            "load NVIDIA's driver (`modprobe nvidia`, `dmesg`), or remove `gpus` from config.yaml",
        )
    by_fault: dict[str, list[ListedGPU]] = {}
    for gpu in found:
        by_fault.setdefault(gpu.fault, []).append(gpu)
    for fault, gpus in by_fault.items():
        if fault and any(gpu.offered or gpu.held for gpu in gpus):
            labels = ", ".join(gpu.label for gpu in gpus)
            yield failed(f"{labels}: {fault}", "until then no container gets it")
    by_reason: dict[str, list[str]] = {}
    for gpu in found:
        if gpu.not_offered not in ("", node_gpus.NOT_SELECTED) and gpu.present:
            by_reason.setdefault(gpu.not_offered, []).append(gpu.label)
    for why, of in by_reason.items():
        yield failed(f"{', '.join(of)} not offered: {why}", "see docs/gpus.md")
    if well := [gpu for gpu in found if gpu.offered and not gpu.fault]:
        yield ok(f"{len(well)} of {len(found)} GPUs are offered, and have their nodes")


def driver(node: ThisNode) -> Iterator[Outcome]:
    """NVIDIA's kernel driver and its NVML, which must be of one version."""
    if not node.gpus or not node.config.gpus:
        yield not_applicable(_NO_POOL if node.gpus else "the node has no GPU")
        return
    try:
        with _opened(node) as nvml_driver:
            version, told = nvml_driver.driver_version(), set(nvml_driver.uuids())
    except NvmlError as error:
        yield warning(
            f"NVML cannot be used: {error}",
            "without it the memory of GPUs is not known (but for `memory` of a pool), and what "
            "processes use is not compared with limits; after an update of the driver, reload it",
        )
        return
    if silent := [gpu.address for gpu in node.gpus if gpu.uuid not in told]:
        yield failed(
            f"driver {version} does not answer for {', '.join(silent)}",
            "has the GPU fallen off the bus? See `nvidia-smi` and `dmesg` (Xid)",
        )
    else:
        yield ok(f"driver {version} answers for {len(node.gpus)} GPUs")


def libraries(node: ThisNode) -> Iterator[Outcome]:
    """The libraries that containers with limits load in place of the driver's."""
    if not _limiting(node):
        yield not_applicable("no pool limits GPUs (modes slices and units do)")
        return
    directory = _directory(node)
    wrong = _wrong_libraries(node)
    if not directory.is_dir():
        yield warning(
            f"{directory} does not exist: no container can have the tier shim",
            "`podfabric install --gpu`",
        )
    elif wrong:
        yield failed(f"{directory}: {'; '.join(wrong)}", "`podfabric install --gpu`")
    else:
        yield ok(f"{directory} has {' and '.join(_files(node))}")


def host_pids(node: ThisNode) -> Iterator[Outcome]:
    """Whether processes of containers are seen: else none can register, and none is attributed."""
    if not _limiting(node):
        yield not_applicable("no pool limits GPUs (modes slices and units do)")
    elif processes.sees_the_host():
        yield ok("the host's processes are seen here")
    else:
        yield failed(
            "the host's processes are not seen here: an agent in this place registers no process, "
            "and CUDA does not start where limits are enforced",
            "run the agent in the host's pid namespace (hostPID: true)",
        )


def enforcing(node: ThisNode) -> Iterator[Outcome]:
    """The tier of each GPU, as the device plugin chose it; the strongest possible before that."""
    if not node.gpus or not _limiting(node):
        yield not_applicable("no pool limits GPUs (modes slices and units do)")
        return
    if node.gpu_tiers:
        yield from _chosen(node)
    else:
        yield from _possible(node)
    yield from _without_dmem(node)


def _chosen(node: ThisNode) -> Iterator[Outcome]:
    found: dict[tuple[Tier, str, str], list[str]] = {}
    for address, of in sorted(node.gpu_tiers.items()):
        refused = of.choice.refused.items()
        why = "; ".join(f"not {tier}: {text}" for tier, text in refused)
        key = of.choice.tier, of.choice.unhealthy or "", why
        found.setdefault(key, []).append(gpu_label(node.gpus, address))
    for (tier, unhealthy, why), labels in found.items():
        names = ", ".join(labels)
        if unhealthy:
            yield failed(f"{names}: not given: {unhealthy}", "see docs/gpu-watch.md, what it needs")
        elif tier == "none":
            yield warning(f"{names}: nothing keeps limits: {why or 'none is allowed'}", _NONE)
        else:
            yield ok(f"{names}: {tier} keeps limits{f' ({why})' if why else ''}")


def _possible(node: ThisNode) -> Iterator[Outcome]:
    chosen: dict[tuple[Tier, str], list[str]] = {}
    try:
        with _opened(node) as nvml_driver:
            for gpu in node.gpus:
                obstacles = _obstacles(node, nvml_driver, gpu)
                choice = tiers.choose(obstacles, node.config.gpu_limits.enforce)
                why = "; ".join(f"not {tier}: {text}" for tier, text in choice.refused.items())
                label = gpu_label(node.gpus, gpu.address)
                chosen.setdefault((choice.tier, why), []).append(label)
    except NvmlError as error:
        yield warning(f"what the driver can enforce is not known: {error}", "see `GPU driver`")
        return
    for (tier, why), labels in chosen.items():
        seen = f"{', '.join(labels)}: {tier} is the strongest that can be had"
        if tier == "none":
            yield warning(f"{seen}: {why}", _NONE)
        else:
            yield ok(f"{seen}{f' ({why})' if why else ''}")


def other_plugins(node: ThisNode) -> Iterator[Outcome]:
    """Whether another device plugin offers a GPU that one of our pools has: both give it away."""
    if not node.config.gpus:
        yield not_applicable(_NO_POOL)
        return
    ours = {name for config in node.config.gpus for name in config.resources}
    offered = {gpu.address for gpu in node_gpus.listed(node).gpus if gpu.offered}
    try:
        ids = records.registered(node.paths)
        held = records.from_checkpoint(node.paths)
    except KubeletUnreadable as error:
        yield warning(str(error), "what other device plugins offer is not known")
        return
    twice = False
    for resource, of in sorted(ids.items()):
        same = sorted({address_of(node.gpus, name) for name in of} & offered)
        if resource in ours or not same:
            continue
        twice = True
        labels = ", ".join(gpu_label(node.gpus, address) for address in same)
        names = {name for row in held if row.resource == resource for name in row.ids}
        now = {address_of(node.gpus, name) for name in names} & offered
        of_it = f"; containers hold {len(now)} of them by it now" if now else ""
        yield failed(
            f"{resource} of another device plugin offers {labels}, as our pools do{of_it}: no "
            "kubelet knows that they are the same",
            "remove that plugin from this node, or keep its GPUs out of our pools (`devices`)",
        )
    if not twice:
        yield ok("no other device plugin of this node offers a GPU of our pools")


def limits(node: ThisNode) -> Iterator[Outcome]:
    """The files of groups against the allocations: each must have the other, and say the same."""
    notes: list[str] = []
    found = [part for part in gpu_parts.parts(node, notes) if part.tier != "none"]
    present = set(Groups(node.paths.run / "gpu").names())
    expected: dict[str, list[GpuPart]] = {}  # of one container, or of several of a pod
    for part in found:
        if part.group:
            expected.setdefault(part.group, []).append(part)
    if not present and not expected:
        yield not_applicable("no container has limits that are enforced")
        return
    bad = False
    for seen, remedy, is_failure in _unlike(node, present, expected):
        bad = True
        yield (failed if is_failure else warning)(seen, remedy)
    if not bad:
        count = sum(map(len, expected.values()))
        yield ok(f"{count} containers have limits, and each its files")


def _unlike(
    node: ThisNode, present: set[str], expected: Mapping[str, Sequence[GpuPart]]
) -> Iterator[tuple[str, str, bool]]:
    """What is wrong, what to do, and whether that is a failure."""
    root = node.paths.run / "gpu"
    if stray := sorted(present - expected.keys()):
        yield (
            f"{root} has limits of no allocation: {_some(stray)}",
            "a running agent removes them within a minute: look at its log",
            False,
        )
    for group, (part, *others) in sorted(expected.items()):
        who = f"{part.container.pod or 'a pod'} ({group})"
        if group not in present:
            yield (
                f"{who} has no limits in {root}: CUDA does not start there",
                "the next start of the container makes them: delete the pod if it runs",
                True,
            )
        elif part.use is None:
            yield part.problem, "delete the pod, so that it gets new files", True
        else:
            share = (
                1.0 if part.tier == "mps" else sum(each.compute_share for each in (part, *others))
            )
            allocated = (
                sum(each.memory_bytes for each in (part, *others)),
                round(share, 4) or 1.0,
            )
            limited = part.use.memory_bytes, round(part.use.compute_share, 4)
            if limited != allocated:
                yield (
                    f"{who} is limited to {limited[0]} bytes and {limited[1]:.0%} of the time, "
                    f"and allocated {allocated[0]} bytes and {allocated[1]:.0%}",
                    "start the container again: its start writes what is allocated",
                    True,
                )
            if part.problem:
                yield part.problem, "the tenant damaged its own count: delete the pod", False


def _limiting(node: ThisNode) -> bool:
    return any(config.mode != "replicas" for config in node.config.gpus)


@contextmanager
def _opened(node: ThisNode) -> Iterator[Nvml]:
    """NVML while a block runs. Raises NvmlError."""
    opened = nvml.open_driver(node.driver_root)
    try:
        yield opened
    finally:
        opened.close()


def _obstacles(node: ThisNode, driver: Nvml, gpu: GPU) -> Mapping[Tier, Obstacle]:
    cgroups = node.paths.sys / "fs/cgroup"

    def files() -> str | None:
        return "; ".join(_wrong_libraries(node)) or None

    without_cdi = None if node.config.gpu_binding == "start" else NO_CDI

    def kernel() -> str | None:
        unsupported = kernel_tier.unsupported(driver, gpu.uuid, cgroups)
        return unsupported or kernel_tier.dmem_obstacle(cgroups) or files() or without_cdi

    def mps() -> str | None:
        tier = MpsTier(node.paths, node.config.gpu_limits.mps)
        tier.learn(driver, gpu.uuid)
        return tier.obstacle(gpu.uuid) or files() or without_cdi

    return {"kernel": kernel, "mps": mps, "shim": files}


def _without_dmem(node: ThisNode) -> Iterator[Outcome]:
    """Where the driver counts with dmem, every cgroup above a container's must enable it."""
    lacking = kernel_tier.above_pods_without_dmem(node.paths.sys / "fs/cgroup")
    if lacking is not None and "kernel" in node.config.gpu_limits.enforce:
        yield warning(
            f"{lacking}/cgroup.subtree_control lacks dmem: the tier kernel fails below it",
            f"`echo +dmem > {lacking}/cgroup.subtree_control`, also after a boot",
        )


def _directory(node: ThisNode) -> Path:
    return node.paths.shims


def _wrong_libraries(node: ThisNode) -> list[str]:
    of = ((name, _wrong(_directory(node) / name)) for name in _files(node))
    return [f"{name}: {why}" for name, why in of if why]


def _files(node: ThisNode) -> tuple[str, ...]:
    """What containers need of the directory, by what the configuration allows."""
    return (*LIBRARIES, HOOK) if "kernel" in node.config.gpu_limits.enforce else LIBRARIES


def _wrong(library: Path) -> str:
    """What is wrong with a library that tenants load, or with the hook; "" if nothing is."""
    try:
        status = library.stat(follow_symlinks=False)
        with library.open("rb") as file:
            header = file.read(20)
    except OSError as error:
        return error.strerror or "cannot be read"
    machine = os.uname().machine
    if header[:4] != b"\x7fELF" or len(header) < 20:
        return "is not a library or program"
    if int.from_bytes(header[18:20], "little") != _MACHINES.get(machine):
        return f"is not for {machine}"
    if not stat.S_ISREG(status.st_mode) or status.st_uid != 0 or status.st_mode & 0o022:
        return "can be changed by others than root"
    return "" if status.st_mode & 0o004 else "cannot be read by users of containers"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"
