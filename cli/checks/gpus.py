"""Checks of GPUs: nodes, driver, libraries of containers, other plugins, and limits."""

import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from cli import gpu_parts, node_gpus
from cli.checks import Outcome, failed, not_applicable, ok, some, warning
from cli.gpu_parts import GpuPart
from cli.node_gpus import ListedGPU
from cli.shims import FILES
from cli.this_node import ThisNode, gpu_label
from deviceplugin.kubelet import records
from deviceplugin.kubelet.records import KubeletUnreadable
from gpu import nvml, processes
from gpu.groups import Groups
from gpu.nvml import NvmlError
from host.gpus import address_of

_MACHINES: Mapping[str, int] = {"x86_64": 62, "aarch64": 183}  # elf.h: EM_X86_64, EM_AARCH64
_NO_POOL = "no pool of GPUs is configured"


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
        with nvml.open_driver(node.driver_root) as nvml_driver:
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
    directory = node.paths.shims
    wrong = _wrong_libraries(node)
    if not directory.is_dir():
        yield warning(
            f"{directory} does not exist: no container can have a part of a GPU",
            "`podfabric install --gpu`",
        )
    elif wrong:
        yield failed(f"{directory}: {'; '.join(wrong)}", "`podfabric install --gpu`")
    else:
        yield ok(f"{directory} has {' and '.join(FILES)}")


def host_pids(node: ThisNode) -> Iterator[Outcome]:
    """Whether processes of containers are seen: else none can register, and none is attributed."""
    if not _limiting(node):
        yield not_applicable("no pool limits GPUs (modes slices and units do)")
    elif processes.sees_the_host():
        yield ok("the host's processes are seen here")
    else:
        yield failed(
            "the host's processes are not seen here: an agent in this place registers no process, "
            "and CUDA does not start in containers with limits",
            "run the agent in the host's pid namespace (hostPID: true)",
        )


def other_plugins(node: ThisNode) -> Iterator[Outcome]:
    """Whether another device plugin offers a GPU that one of our pools has: both give it away."""
    if not node.config.gpus:
        yield not_applicable(_NO_POOL)
        return
    ours = {name for config in node.config.gpus for name in config.resources}
    offered = {gpu.address for gpu in node_gpus.listed(node).gpus if gpu.offered}
    try:
        ids = records.registered(node.paths) or {}
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
    present = set(Groups(node.paths.run / "gpu").names())
    expected = {part.group: part for part in gpu_parts.parts(node, notes) if part.group}
    if not present and not expected:
        yield not_applicable("no container has limits")
        return
    bad = False
    for seen, remedy, is_failure in _unlike(node, present, expected):
        bad = True
        yield (failed if is_failure else warning)(seen, remedy)
    if not bad:
        yield ok(f"{len(expected)} containers have limits, and each its files")


def _unlike(
    node: ThisNode, present: set[str], expected: Mapping[str, GpuPart]
) -> Iterator[tuple[str, str, bool]]:
    """What is wrong, what to do, and whether that is a failure."""
    root = node.paths.run / "gpu"
    if stray := sorted(present - expected.keys()):
        yield (
            f"{root} has limits of no allocation: {some(stray)}",
            "a running agent removes them within a minute: look at its log",
            False,
        )
    for group, part in sorted(expected.items()):
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
            allocated = part.memory_bytes, part.compute_share or 1.0
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


def _wrong_libraries(node: ThisNode) -> list[str]:
    of = ((name, _wrong(node.paths.shims / name)) for name in FILES)
    return [f"{name}: {why}" for name, why in of if why]


def _wrong(library: Path) -> str:
    """What is wrong with a library that tenants load; "" if nothing is."""
    try:
        status = library.stat(follow_symlinks=False)
        with library.open("rb") as file:
            header = file.read(20)
    except OSError as error:
        return error.strerror or "cannot be read"
    machine = os.uname().machine
    if header[:4] != b"\x7fELF" or len(header) < 20:
        return "is not a library"
    if int.from_bytes(header[18:20], "little") != _MACHINES.get(machine):
        return f"is not for {machine}"
    if not stat.S_ISREG(status.st_mode) or status.st_uid != 0 or status.st_mode & 0o022:
        return "can be changed by others than root"
    return "" if status.st_mode & 0o004 else "cannot be read by users of containers"
