"""Modules, device nodes, the RDMA subsystem's mode, and how much memory may be locked.

Modules may be built in, so what counts is what they make in sysfs.
"""

import re
from collections.abc import Iterator
from contextlib import suppress

from cli.checks import Outcome, failed, not_applicable, ok, warning
from cli.this_node import ThisNode
from host import discovery as sysfs
from host.errors import HostError

RUNTIMES = ("containerd", "crio", "cri-o", "dockerd", "kubelet")
_TOLD = 2  # nodes that are wrong, each by itself
_ONLY_MANAGES = "kubelet"  # starts no container itself
_LOCKED = re.compile(r"^Max locked memory\s+(\S+)", re.MULTILINE)


def verbs_module(node: ThisNode) -> Iterator[Outcome]:
    """ib_uverbs: without it no program of user space gets at an HCA."""
    devices = [rdma for one in node.hcas for rdma in one.rdma]
    if not devices and not any(one.rdma_names for one in node.hcas):
        yield not_applicable("no RDMA device is there")
    elif (node.paths.sys / "class/infiniband_verbs").is_dir():
        without = sorted(rdma.name for rdma in devices if rdma.uverbs is None)
        if without:
            yield failed(
                f"{', '.join(without)}: no uverbs device",
                "load the HCA's RDMA driver anew (mlx5_ib), and look at `dmesg`",
            )
        else:
            yield ok("ib_uverbs is there, and a uverbs device for each RDMA device")
    else:
        yield failed("ib_uverbs is not loaded", _load("ib_uverbs"))


def connection_manager(node: ThisNode) -> Iterator[Outcome]:
    """rdma_ucm: what connects by addresses (rping, UCX's rdmacm, NFS) needs it."""
    if not _with_rdma(node):
        yield not_applicable("no RDMA device is there")
    elif sysfs.rdma_cm(node.paths) is None:
        yield warning(
            "rdma_ucm is not loaded: containers get no /dev/infiniband/rdma_cm, and what connects "
            "by IP addresses fails",
            _load("rdma_ucm"),
        )
    else:
        yield ok("rdma_ucm is there")


def ipoib_module(node: ThisNode) -> Iterator[Outcome]:
    """ib_ipoib: the interfaces that the plugin `ipoib` makes children of."""
    hcas = [
        one
        for one in node.hcas
        if any(port.link_layer == "InfiniBand" for rdma in one.rdma for port in rdma.ports)
    ]
    if not hcas:
        yield not_applicable("no InfiniBand HCA is there")
        return
    there = any("infiniband" in one.link_types for one in hcas)
    if there or (node.paths.sys / "module/ib_ipoib").is_dir():
        yield ok("ib_ipoib is there")
    else:
        yield failed("ib_ipoib is not loaded: no HCA has an IPoIB interface", _load("ib_ipoib"))


def mad_module(node: ThisNode) -> Iterator[Outcome]:
    """ib_umad, where a pool gives its devices."""
    asking = [pool.config.resource for pool in node.pools if pool.config.umad or pool.config.issm]
    if not asking:
        yield not_applicable("no pool gives umad or issm")
    elif (node.paths.sys / "class/infiniband_mad").is_dir():
        yield ok("ib_umad is there")
    else:
        yield failed(f"ib_umad is not loaded, and {', '.join(asking)} gives it", _load("ib_umad"))


def device_nodes(node: ThisNode) -> Iterator[Outcome]:
    """/dev/infiniband against sysfs: udev may be behind, or /dev another one than the host's."""
    nodes = [rdma.uverbs for one in node.hcas for rdma in one.rdma]
    ports = [port for one in node.hcas for rdma in one.rdma for port in rdma.ports]
    if any(pool.config.umad for pool in node.pools):
        nodes += [port.umad for port in ports]
    if any(pool.config.issm for pool in node.pools):
        nodes += [port.issm for port in ports]
    known = [one for one in (*nodes, sysfs.rdma_cm(node.paths)) if one is not None]
    wrong = []
    for one in known:
        try:
            sysfs.verify(node.paths, one)
        except HostError as error:
            wrong.append(str(error))
    for text in wrong[:_TOLD]:
        yield failed(text, "containers are refused it until then: `udevadm trigger`")
    if len(wrong) > _TOLD:
        yield failed(f"{len(wrong) - _TOLD} more nodes are like that", "as above")
    if not known:
        yield not_applicable("sysfs knows no device that would have a node")
    elif not wrong:
        yield ok(f"{len(known)} nodes in {node.paths.dev / 'infiniband'} are as sysfs says")


def rdma_mode() -> str:
    """The RDMA subsystem's mode, asked of the running kernel. Raises HostError."""
    from host import rdma

    with rdma.rdma() as socket:
        return rdma.mode(socket)


def namespaces(node: ThisNode) -> Iterator[Outcome]:
    """Whether a pod can open an HCA that was not moved to it, and whether one can be moved."""
    if not _with_rdma(node):
        yield not_applicable("no RDMA device is there")
        return
    try:
        mode = rdma_mode()
    except HostError as error:
        yield warning(f"the mode is not known: {error}", "load ib_core, with Linux 5.2 or later")
        return
    if mode == "shared":
        yield ok(
            "shared: a pod sees every HCA below /sys and can open those that it was given; the "
            'option "rdmaIsolation" and the plugin rdma are refused (they need exclusive)'
        )
        return
    barred = [
        pool.config.resource
        for pool in node.pools
        if pool.config.rdma and not _movable(pool.config.mode)
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


def locked_memory(node: ThisNode) -> Iterator[Outcome]:
    """RLIMIT_MEMLOCK of the runtimes, which containers inherit: registered memory is locked."""
    found: dict[str, set[str]] = {}
    for directory in node.paths.proc.glob("[0-9]*"):
        with suppress(OSError, UnicodeDecodeError):
            name = (directory / "comm").read_text().strip()
            limit = _LOCKED.search((directory / "limits").read_text()) if name in RUNTIMES else None
            if limit:
                found.setdefault(name, set()).add(limit[1])
    if not found:
        yield not_applicable(
            f"no {', '.join(RUNTIMES[:3])} or {RUNTIMES[-1]} is seen in {node.paths.proc}: is it "
            "the host's?"
        )
    for name, limits in sorted(found.items()):
        low = sorted(int(one) for one in limits if one.isdecimal())
        if not low:
            yield ok(f"{name}: unlimited")
        elif name == _ONLY_MANAGES:
            yield ok(f"{name}: {_bytes(low[0])}, which no container inherits")
        else:
            yield warning(
                f"{name}: {_bytes(low[0])} may be locked by a container: registering more fails "
                "with ENOMEM, and NCCL then uses TCP without a word",
                f"`systemctl edit {name}`: [Service] LimitMEMLOCK=infinity, restart it, and start "
                "the pods anew; or give root containers the capability IPC_LOCK",
            )


def peer_memory(node: ThisNode) -> Iterator[Outcome]:
    """What lets an HCA read a GPU's memory."""
    if not node.gpus or not _with_rdma(node):
        yield not_applicable("there are not both GPUs and HCAs")
    elif any(
        (node.paths.sys / "module" / name).is_dir() for name in ("nvidia_peermem", "nv_peer_mem")
    ):
        yield ok("nvidia_peermem is loaded")
    else:
        yield warning(
            "nvidia_peermem is not loaded: GPUDirect RDMA works by dma-buf alone",
            "`modprobe nvidia_peermem`, unless the open kernel modules of the driver with Linux "
            "5.12 or later and CUDA 11.7 or later are there, which need none",
        )


def _movable(mode: str) -> bool:
    return mode == "exclusive"


def _with_rdma(node: ThisNode) -> bool:
    return any(one.rdma or one.rdma_names for one in node.hcas)


def _load(module: str) -> str:
    return f"`modprobe {module}`, and name it in /etc/modules-load.d for the next boot"


def _bytes(number: int) -> str:
    return f"{number // 1024} KiB" if number < 1 << 20 else f"{number >> 20} MiB"
