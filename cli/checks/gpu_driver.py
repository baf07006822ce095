"""Checks of GPUs: device nodes and limits, the driver, other device plugins."""

from collections.abc import Iterator

from cli.checks import Outcome, failed, not_applicable, ok, warning
from deviceplugin.kubelet import records
from deviceplugin.kubelet.records import KubeletUnreadable
from gpu.driver import nvml
from gpu.driver.nvml import NvmlError
from host.sysfs.gpus import address_of
from node import node_gpus
from node.node_gpus import ListedGPU
from node.state import ThisNode, gpu_label

_NO_POOL = "no pool of GPUs is configured"


def gpu_nodes(node: ThisNode) -> Iterator[Outcome]:
    """Check device nodes.

    The check fails only for a GPU that a pool offers or a container holds.
    """
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
            yield failed(f"{labels}: {fault}", "while this lasts, no container gets the GPU")
    by_reason: dict[str, list[str]] = {}
    for gpu in found:
        if gpu.not_offered not in ("", node_gpus.NOT_SELECTED) and gpu.present:
            by_reason.setdefault(gpu.not_offered, []).append(gpu.label)
    for why, of in by_reason.items():
        yield failed(f"{', '.join(of)} not offered: {why}", "see docs/use/gpus.md")
    if well := [gpu for gpu in found if gpu.offered and not gpu.fault]:
        yield ok(f"{len(well)} of {len(found)} GPUs are offered, and have their nodes")


def driver(node: ThisNode) -> Iterator[Outcome]:
    """Check NVIDIA's kernel driver and the library NVML, which must have the same version."""
    if not node.gpus or not node.config.gpus:
        yield not_applicable(_NO_POOL if node.gpus else "the node has no GPU")
        return
    try:
        with nvml.open_driver(node.driver_root) as nvml_driver:
            version, known = nvml_driver.driver_version(), set(nvml_driver.uuids())
    except NvmlError as error:
        yield warning(
            f"NVML cannot be used: {error}",
            "without it the memory of GPUs is not known (except `memory` of a pool), and the use "
            "by processes is not compared with limits; after an update of the driver, reload it",
        )
        return
    if silent := [gpu.address for gpu in node.gpus if gpu.uuid not in known]:
        yield failed(
            f"driver {version} does not answer for {', '.join(silent)}",
            "see `nvidia-smi` and `dmesg` (Xid): the GPU may have fallen off the bus",
        )
    else:
        yield ok(f"driver {version} answers for {len(node.gpus)} GPUs")


def other_plugins(node: ThisNode) -> Iterator[Outcome]:
    """Two device plugins that offer the same GPU would both allocate the GPU."""
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
            f"{resource} of another device plugin offers {labels}, as our pools do{of_it}: the "
            "kubelet treats them as different devices",
            "remove that plugin from this node, or keep its GPUs out of our pools (`devices`)",
        )
    if not twice:
        yield ok("no other device plugin of this node offers a GPU of our pools")
