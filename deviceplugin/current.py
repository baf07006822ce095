"""Checks whether a container's uverbs nodes still belong to the HCA that the container got.

The kernel numbers uverbs devices in the order of their registration. After a driver reload, the
container's device file may belong to another HCA.
"""

from collections.abc import Mapping

from deviceplugin.checkpoint import AllocatedHCA, AllocatedRdmaDevice
from host.sysfs.discovery import HCA

Uverbs = tuple[str, int, int]  # name, major, minor, as in ("uverbs0", 231, 192)


def outdated(
    allocated: AllocatedHCA, now: Mapping[str, Uverbs], *, complete: bool = True
) -> AllocatedRdmaDevice | None:
    """The first allocated RDMA device with an outdated uverbs node; `None` if all are current.

    `now` has the HCA's uverbs devices by RDMA device. If not `complete`, `now` may lack some
    devices. An empty `now` gives `None`.
    """
    if not now:
        return None
    given = [rdma for rdma in allocated.rdma if rdma.uverbs is not None]
    compared = [rdma for rdma in given if rdma.name in now]
    for rdma in compared:
        if uverbs_of(rdma) != now[rdma.name]:
            return rdma
    # A renamed RDMA device must have one of the HCA's numbers.
    numbers = set(now.values())
    lost = [rdma for rdma in given if rdma.name not in now and uverbs_of(rdma) not in numbers]
    if lost and (complete or lost == given):
        return lost[0]
    return None


def uverbs_of(rdma: AllocatedRdmaDevice) -> Uverbs | None:
    """The uverbs device of a checkpoint's RDMA device, or `None` if the container got none."""
    node = rdma.uverbs
    return None if node is None else (node.path.rpartition("/")[2], node.major, node.minor)


def uverbs_now(hca: HCA) -> dict[str, Uverbs]:
    """The uverbs devices of an HCA, by the names of its RDMA devices."""
    return {
        rdma.name: (rdma.uverbs.name, rdma.uverbs.major, rdma.uverbs.minor)
        for rdma in hca.rdma
        if rdma.uverbs is not None
    }


def is_as_recorded(allocated: AllocatedHCA, hca: HCA) -> bool:
    """Whether the HCA has every uverbs device of the checkpoint's entry, with the same number."""
    now = set(uverbs_now(hca).values())
    return all(uverbs_of(rdma) in now for rdma in allocated.rdma if rdma.uverbs is not None)
