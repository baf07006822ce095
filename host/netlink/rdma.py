"""Lists, moves and renames RDMA devices over NETLINK_RDMA (core/nldev.c).

In the RDMA subsystem's exclusive mode a device is in one network namespace. In shared mode it is
visible in all namespaces. A device keeps its index in a move, and is in no namespace for some
milliseconds. After a move, the kernel creates the device's IPoIB interfaces again.
"""

import errno
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import msgspec
from pyroute2.netlink import NLM_F_ACK

from host.errors import HostError, explained
from host.namespaces import NetworkNamespace
from host.netlink.messages import (
    NETLINK_RDMA,
    RDMA_GET,
    RDMA_SET,
    RDMA_SYS_GET,
    RdmaMessage,
    attributes,
    message,
)
from host.netlink.sockets import DUMPS, NetlinkError, NetlinkSocket, trying

MODES = ("exclusive", "shared")  # NETNS_MODE's values
EXCLUSIVE = (
    "run `rdma system set netns exclusive` before any pod runs, or load ib_core with "
    "`options ib_core netns_mode=0` in /etc/modprobe.d"
)
MISSING = "the kernel has no RDMA netlink (Linux 5.2): load the HCA's driver, or ib_core"


class NetlinkRdmaDevice(msgspec.Struct, frozen=True, kw_only=True):
    index: int  # unique over all namespaces; a move keeps it
    name: str  # "mlx5_0"; unique over all namespaces
    node_guid: str  # "0011:2233:4455:6677", in sysfs's form
    protocol: str  # RDMA_NLDEV_ATTR_DEV_PROTOCOL: "ib", "roce", "iw", "opa", "usnic", ""


class RdmaNetlink(NetlinkSocket):
    """A socket for one thread. Without `namespace`, it belongs to the thread's own namespace."""

    def __init__(self, namespace: NetworkNamespace | None = None) -> None:
        self.namespace = namespace
        try:
            super().__init__(NETLINK_RDMA)
        except OSError as error:
            code = error.errno or errno.EIO
            words = MISSING if code == errno.EPROTONOSUPPORT else ""
            raise explained("opening an RDMA netlink socket", code, words) from None

    def inside(self) -> AbstractContextManager[None]:
        """Keep the calling thread in the socket's namespace during the block."""
        return nullcontext() if self.namespace is None else self.namespace.entered()


@contextmanager
def rdma(namespace: NetworkNamespace | None = None) -> Iterator[RdmaNetlink]:
    """A socket in `namespace`, by default the calling thread's. It is closed after the block."""
    if namespace is None:
        opened = RdmaNetlink()
    else:
        with namespace.entered():
            opened = RdmaNetlink(namespace)
    with opened:
        yield opened


def mode(socket: RdmaNetlink) -> str:
    """The RDMA subsystem's mode. Raises HostError before Linux 5.2, and in a pod before 5.4."""
    what = "asking for the RDMA subsystem's mode"
    try:
        answer = socket.ask(RDMA_SYS_GET, message(RdmaMessage))
    except NetlinkError as refused:
        absent = (errno.EINVAL, errno.ECONNREFUSED, errno.EPROTONOSUPPORT)
        words = MISSING if refused.code in absent else refused.words
        raise explained(what, refused.code, words) from None
    value = answer.get_attr("RDMA_NLDEV_SYS_ATTR_NETNS_MODE")
    if value is None or value >= len(MODES):
        raise HostError(f"{what}: the kernel answered {value}, which is not a known mode")
    return MODES[value]


def devices(socket: RdmaNetlink) -> list[NetlinkRdmaDevice]:
    """The devices that are visible in the socket's namespace.

    A device that leaves during a dump hides another device, without an error (_nldev_get_dumpit).
    So the dump is repeated until two consecutive dumps agree.
    """
    what = "listing RDMA devices"
    last: list[NetlinkRdmaDevice] | None = None
    for _ in range(DUMPS):
        with trying(what):
            listed = [_device(answer) for answer in socket.table(RDMA_GET, message(RdmaMessage))]
        if listed == last:
            return listed
        last = listed
    words = f"the devices changed during each of {DUMPS} attempts"
    raise explained(what, errno.EAGAIN, words)


def find(socket: RdmaNetlink, name: str) -> NetlinkRdmaDevice | None:
    """The device with that name, if it is visible in the socket's namespace."""
    return next((device for device in devices(socket) if device.name == name), None)


def by_index(socket: RdmaNetlink, index: int) -> NetlinkRdmaDevice | None:
    """The device with that index, if it is visible in the socket's namespace."""
    request = message(RdmaMessage, [("RDMA_NLDEV_ATTR_DEV_INDEX", index)])
    try:
        answer = socket.ask(RDMA_GET, request)
    except NetlinkError as refused:
        # nldev_get_doit answers EINVAL if the device does not exist.
        if refused.code in (errno.EINVAL, errno.ENODEV, errno.ENOENT):
            return None
        raise explained(f"looking up RDMA device {index}", refused.code, refused.words) from None
    return _device(answer)


def move(socket: RdmaNetlink, device: NetlinkRdmaDevice, target: NetworkNamespace) -> None:
    """Move a device from the socket's namespace to `target`. Returns when the device is there.

    The thread enters the socket's namespace, because the kernel checks the thread's namespace
    (ib_device_set_netns_put).
    """
    what = f'moving RDMA device "{device.name}" into netns "{target.path}"'
    try:
        with socket.inside():
            _set(socket, device, ("RDMA_NLDEV_NET_NS_FD", target.descriptor))
    except NetlinkError as refused:
        words = refused.words
        if refused.code == errno.EOPNOTSUPP and mode(socket) == "shared":
            words = f"the RDMA subsystem is in shared mode: {EXCLUSIVE}"
        elif refused.code == errno.EOPNOTSUPP:
            words = "its driver cannot detach running programs, and so cannot move the device"
        elif refused.code in (errno.EINVAL, errno.ENODEV):
            words = words or "the device is no longer in the socket's namespace"
        raise explained(what, refused.code, words) from None


def rename(socket: RdmaNetlink, device: NetlinkRdmaDevice, name: str) -> None:
    """Rename a device. No device in any namespace may have the new name."""
    with trying(f'renaming RDMA device "{device.name}" to "{name}"'):
        _set(socket, device, ("RDMA_NLDEV_ATTR_DEV_NAME", name))


def _set(socket: RdmaNetlink, device: NetlinkRdmaDevice, change: tuple[str, object]) -> None:
    index = ("RDMA_NLDEV_ATTR_DEV_INDEX", device.index)
    socket.ask(RDMA_SET, message(RdmaMessage, [index, change]), NLM_F_ACK)


def _device(answer: RdmaMessage) -> NetlinkRdmaDevice:
    shown = attributes(answer)
    guid = f"{shown['RDMA_NLDEV_ATTR_NODE_GUID']:016x}"
    return NetlinkRdmaDevice(
        index=shown["RDMA_NLDEV_ATTR_DEV_INDEX"],
        name=shown["RDMA_NLDEV_ATTR_DEV_NAME"],
        node_guid=":".join(guid[at : at + 4] for at in range(0, 16, 4)),
        protocol=shown.get("RDMA_NLDEV_ATTR_DEV_PROTOCOL", ""),
    )
