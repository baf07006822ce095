"""Counts the RDMA objects of each process, such as queue pairs (core/nldev.c, Linux 4.18).

The kernel shows the objects on the devices that are visible in the socket's network namespace. An
object's pid is the pid in the reader's PID namespace. So only a reader in the host's PID namespace
sees the pids of all processes.
"""

from collections import Counter

from host.netlink.messages import (
    RDMA_RES_CM_ID_GET,
    RDMA_RES_CQ_GET,
    RDMA_RES_GET,
    RDMA_RES_MR_GET,
    RDMA_RES_QP_GET,
    RdmaMessage,
    attributes,
    message,
)
from host.netlink.rdma import NetlinkRdmaDevice, RdmaNetlink
from host.netlink.sockets import trying

# The kernel's short names, as in `rdma resource`: command and table.
KINDS = {
    "qp": (RDMA_RES_QP_GET, "RDMA_NLDEV_ATTR_RES_QP"),
    "mr": (RDMA_RES_MR_GET, "RDMA_NLDEV_ATTR_RES_MR"),
    "cq": (RDMA_RES_CQ_GET, "RDMA_NLDEV_ATTR_RES_CQ"),
    "cm_id": (RDMA_RES_CM_ID_GET, "RDMA_NLDEV_ATTR_RES_CM_ID"),
}


def totals(socket: RdmaNetlink) -> object:
    """A value that differs if the number of objects of a device differs. Raises HostError."""
    with trying("counting RDMA objects"):
        answers = map(attributes, socket.table(RDMA_RES_GET, message(RdmaMessage)))
        return {
            found["RDMA_NLDEV_ATTR_DEV_INDEX"]: found["RDMA_NLDEV_ATTR_RES_SUMMARY"]
            for found in answers
        }


def by_process(socket: RdmaNetlink, device: NetlinkRdmaDevice) -> dict[str, Counter[int]]:
    """The number of objects of each pid on a device, by kind. Raises HostError."""
    found = {}
    with trying(f'counting the RDMA objects of device "{device.name}"'):
        for kind, (command, table) in KINDS.items():
            request = message(RdmaMessage, [("RDMA_NLDEV_ATTR_DEV_INDEX", device.index)])
            answers = socket.table(command, request)
            found[kind] = Counter(
                pid for answer in answers for pid in attributes(answer).get(table, ())
            )
    return found
