"""Checks of modules, device nodes, the RDMA namespace mode and the limit of locked memory.

A module may be built into the kernel, so the checks look for its entries in sysfs.
"""

from collections.abc import Iterator
from contextlib import suppress

from cli.checks import Outcome, failed, not_applicable, ok, some, warning
from deviceplugin.allocate import memlock
from host.device_nodes import verify
from host.errors import HostError
from host.sysfs import discovery
from node import locked_memory
from node.state import ThisNode

RUNTIMES = ("containerd", "crio", "cri-o", "dockerd")
_SHOWN = 2  # wrong device nodes that are listed


def connection_manager(node: ThisNode) -> Iterator[Outcome]:
    """Programs that connect by IP addresses (rping, UCX's rdmacm, NFS) need this module."""
    if not node.with_rdma:
        yield not_applicable("the node has no RDMA device")
    elif discovery.rdma_cm(node.paths) is None:
        yield warning(
            "rdma_ucm is not loaded: containers get no /dev/infiniband/rdma_cm, and programs "
            "that connect by IP addresses fail",
            _load("rdma_ucm"),
        )
    else:
        yield ok("rdma_ucm is loaded")


def ipoib_module(node: ThisNode) -> Iterator[Outcome]:
    hcas = [
        hca
        for hca in node.hcas
        if any(port.link_layer == "InfiniBand" for rdma in hca.rdma for port in rdma.ports)
    ]
    if not hcas:
        yield not_applicable("the node has no InfiniBand HCA")
        return
    has_parent = any("infiniband" in hca.link_types for hca in hcas)
    if has_parent or (node.paths.sys / "module/ib_ipoib").is_dir():
        yield ok("ib_ipoib is loaded")
    else:
        yield failed("ib_ipoib is not loaded: no HCA has an IPoIB interface", _load("ib_ipoib"))


def mad_module(node: ThisNode) -> Iterator[Outcome]:
    asking = [pool.config.resource for pool in node.pools if pool.config.umad or pool.config.issm]
    if not asking:
        yield not_applicable("no pool gives umad or issm")
    elif (node.paths.sys / "class/infiniband_mad").is_dir():
        yield ok("ib_umad is loaded")
    else:
        yield failed(
            f"ib_umad is not loaded, and pools need it: {', '.join(asking)}", _load("ib_umad")
        )


def device_nodes(node: ThisNode) -> Iterator[Outcome]:
    """Compare /dev/infiniband with sysfs.

    They differ if udev is late, or if this process sees a container's /dev.
    """
    nodes = [rdma.uverbs for hca in node.hcas for rdma in hca.rdma]
    ports = [port for hca in node.hcas for rdma in hca.rdma for port in rdma.ports]
    if any(pool.config.umad for pool in node.pools):
        nodes += [port.umad for port in ports]
    if any(pool.config.issm for pool in node.pools):
        nodes += [port.issm for port in ports]
    devices = [device for device in (*nodes, discovery.rdma_cm(node.paths)) if device is not None]
    wrong = []
    for device in devices:
        try:
            verify(node.paths, device)
        except HostError as error:
            wrong.append(str(error))
    for text in wrong[:_SHOWN]:
        yield failed(text, "`udevadm trigger`; until then containers cannot get the device node")
    if len(wrong) > _SHOWN:
        yield failed(f"{len(wrong) - _SHOWN} more device nodes are wrong", "see the remedy above")
    if not devices:
        yield not_applicable("sysfs has no device with a device node")
    elif not wrong:
        yield ok(f"{len(devices)} nodes in {node.paths.dev / 'infiniband'} agree with sysfs")


def rdma_mode() -> str:
    """The kernel's RDMA namespace mode. Raises HostError."""
    from host.netlink import rdma

    with rdma.rdma() as socket:
        return rdma.mode(socket)


def namespaces(node: ThisNode) -> Iterator[Outcome]:
    """Check whether pods can open HCAs, which depends on the kernel's RDMA namespace mode."""
    if not node.with_rdma:
        yield not_applicable("the node has no RDMA device")
        return
    try:
        mode = rdma_mode()
    except HostError as error:
        yield warning(f"the mode is unknown: {error}", "load ib_core, with Linux 5.2 or later")
        return
    if mode == "shared":
        yield ok(
            "shared: a pod sees every HCA below /sys and can open its own; the "
            'option "rdmaIsolation" and the plugin rdma are refused (they need exclusive)'
        )
        return
    barred = [
        pool.config.resource
        for pool in node.pools
        if pool.config.rdma and pool.config.mode != "exclusive"
    ]
    if barred:
        yield failed(
            f"exclusive: pods cannot open the HCAs of {', '.join(barred)}, which stay in the "
            "host's network namespace",
            "run `rdma system set netns shared`, or make these pools `mode: exclusive` over VFs "
            'and attach them by sriov with "rdmaIsolation": true',
        )
    else:
        yield ok(
            "exclusive: a pod can open an HCA only where sriov moves it there: its definition "
            'needs "rdmaIsolation": true, or the plugin rdma behind it'
        )


def memory_limits(node: ThisNode) -> Iterator[Outcome]:
    """Check RLIMIT_MEMLOCK of containers with HCAs, and the runtime's limit if no hook sets it."""
    wanted = locked_memory.wanted(node.pools)
    low = sorted(_low_limits(node, wanted)) if wanted else []
    if low:
        yield warning(
            f"containers with less locked memory than their pool gives: {some(low)}",
            "delete the pods if they are older than the hook or the pool's `memlock`; else see "
            "which runtimes start the hook: docs/use/devices.md#locked-memory",
        )
    why = memlock.problem(node.paths) if wanted else "no pool sets a limit"
    if why is not None:
        yield from _runtimes(node, why)
    elif not low:
        limits = ", ".join(sorted(set(wanted.values())))
        yield ok(f"the hook {memlock.HOOK} raises the limit of containers with HCAs: {limits}")


def _low_limits(node: ThisNode, wanted: dict[str, str]) -> Iterator[str]:
    """The containers with a lower limit than `wanted`, in words."""
    pods = {holder.uid: holder.pod for holder in node.holders.by_key.values()}
    for one in locked_memory.of_containers(node.paths, wanted):
        if one.is_low:
            pod = pods.get(one.container.pod_uid, one.container.pod_uid)
            yield f"{pod} ({one.container.id[:12]}: {one.limit} bytes, not {one.wanted})"


def _runtimes(node: ThisNode, why: str) -> Iterator[Outcome]:
    """The limits that runtimes pass on to containers. `why` tells why no hook raises the limits."""
    by_runtime: dict[str, set[str]] = {}
    for directory in node.paths.proc.glob("[0-9]*"):
        with suppress(OSError, UnicodeDecodeError):
            name = (directory / "comm").read_text().strip()
            limit = (
                locked_memory.LOCKED.search((directory / "limits").read_text())
                if name in RUNTIMES
                else None
            )
            if limit:
                by_runtime.setdefault(name, set()).add(limit[1])
    if not by_runtime:
        yield not_applicable(
            f"no {', '.join(RUNTIMES[:3])} or {RUNTIMES[-1]} runs by {node.paths.proc}: is it "
            "the host's?"
        )
    for name, limits in sorted(by_runtime.items()):
        low = sorted(int(limit) for limit in limits if limit.isdecimal())
        if not low:
            yield ok(f"{name}: unlimited")
        else:
            yield warning(
                f"{name}: {_bytes(low[0])} may be locked by a container: registering more fails "
                f"with ENOMEM, and NCCL then uses TCP silently. No hook raises this limit: {why}",
                f"correct that; or `systemctl edit {name}`: [Service] LimitMEMLOCK=infinity, "
                "restart it and the pods",
            )


def peer_memory(node: ThisNode) -> Iterator[Outcome]:
    """Check the module nvidia_peermem, with which an HCA accesses a GPU's memory."""
    if not node.gpus or not node.with_rdma:
        yield not_applicable("the node does not have both GPUs and HCAs")
    elif any(
        (node.paths.sys / "module" / name).is_dir() for name in ("nvidia_peermem", "nv_peer_mem")
    ):
        yield ok("nvidia_peermem is loaded")
    else:
        yield warning(
            "nvidia_peermem is not loaded: GPUDirect RDMA works by dma-buf alone",
            "`modprobe nvidia_peermem`; not needed with the driver's open kernel modules, Linux "
            "5.12 or later and CUDA 11.7 or later",
        )


def _load(module: str) -> str:
    return f"`modprobe {module}`, and add it to /etc/modules-load.d for the next boot"


def _bytes(number: int) -> str:
    return f"{number // 1024} KiB" if number < 1 << 20 else f"{number >> 20} MiB"
