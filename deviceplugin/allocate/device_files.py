"""Looks up and checks the device nodes of an HCA.

A node's major and minor must equal the numbers in sysfs. A node with old numbers may belong to
another HCA.
"""

from collections.abc import Iterator

from base.paths import Paths
from deviceplugin.pools.pool import Pool
from host.device_nodes import DeviceNode, look_up, verify
from host.errors import HostError
from host.sysfs import discovery, selectors
from host.sysfs.discovery import HCA, CharacterDevice


def inside(name: str) -> str:
    """The path of an RDMA node in a container."""
    return f"/dev/infiniband/{name}"


def gives_uverbs(pool: Pool, hca: HCA) -> bool:
    """Whether a container gets the HCA's verbs devices.

    If some selectors of a pool have isRdma, only these selectors give verbs devices.
    """
    if not pool.config.rdma:
        return False
    if not any(selector.isRdma for selector in pool.config.selectors):
        return True
    by = selectors.match(pool.config.selectors, hca)
    return by is None or by.isRdma  # `None`: the HCA is offered only because a container holds it


def connection_manager(paths: Paths) -> DeviceNode:
    """The host's node rdma_cm, for connections by IP address. Raises HostError if there is none."""
    node = discovery.rdma_cm(paths)
    if node is None:
        raise HostError(
            "the host has no /dev/infiniband/rdma_cm, which RDMA connections by IP address "
            "need: load the kernel module rdma_ucm"
        )
    return verify(paths, node)


def of_hca(
    paths: Paths, pool: Pool, hca: HCA, manager: DeviceNode | None
) -> tuple[DeviceNode, ...]:
    """The nodes that a container gets with this HCA. Raises HostError."""
    try:
        if not gives_uverbs(pool, hca):
            return _vfio(paths, hca)
        verified = [verify(paths, node) for node in _nodes(pool, hca)]
    except HostError as error:
        raise HostError(f"{hca.id}: {error}") from None
    if not verified:
        raise HostError(f"{hca.id}: {_without_uverbs(hca)}")
    return (*verified, manager) if manager is not None else tuple(verified)


def _nodes(pool: Pool, hca: HCA) -> Iterator[CharacterDevice]:
    for rdma in hca.rdma:
        if rdma.uverbs is None:
            continue
        yield rdma.uverbs
        for port in rdma.ports:
            if pool.config.umad and port.umad is not None:
                yield port.umad
            if pool.config.issm and port.issm is not None:
                yield port.issm


def _vfio(paths: Paths, hca: HCA) -> tuple[DeviceNode, ...]:
    """The nodes of a function that is bound to vfio-pci; () for other functions."""
    if not hca.iommu_group:
        return ()
    group = hca.iommu_group
    unprotected = f"noiommu-{group}"  # on a machine without an IOMMU (drivers/vfio/group.c)
    if (paths.dev / "vfio" / unprotected).exists():
        group = unprotected
    return (_vfio_node(paths, "vfio"), _vfio_node(paths, group))


def _vfio_node(paths: Paths, name: str) -> DeviceNode:
    again = "remove the file and bind the function again"
    return look_up(paths.dev / "vfio" / name, f"/dev/vfio/{name}", "is vfio-pci loaded?", again)


def _without_uverbs(hca: HCA) -> str:
    if hca.iommu_group:
        return f"is bound to {hca.driver}, so it has no verbs device: bind its own driver"
    if hca.rdma:
        names = ", ".join(rdma.name for rdma in hca.rdma)
        return f"{names} has no verbs device now: load ib_uverbs"
    if hca.rdma_names:
        names = ", ".join(hca.rdma_names)
        return f"{names} is in another network namespace: end the pod that has it"
    return f"has no RDMA device now: look in the kernel's log for errors of {hca.driver}"
