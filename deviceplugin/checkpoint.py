"""The allocation checkpoint: which HCAs the kubelet's containers hold. docs/checkpoint.md has it
field by field for other programs.

The device plugin writes it before it answers the kubelet, whole, by one rename; the CNI plugins
read it. It says what was handed out, at that time: device numbers may be others after a driver was
loaded anew.
"""

from collections.abc import Sequence

import msgspec

from host import files
from host.paths import Paths

VERSION = 1


class Damaged(Exception):
    """The file cannot be read. The text names it and says why and what to do."""


class Node(msgspec.Struct, frozen=True):
    """A device node in the container."""

    path: str  # "/dev/infiniband/uverbs0"
    major: int
    minor: int


class Port(msgspec.Struct, frozen=True, kw_only=True):
    """A port, as it was at the time."""

    number: int
    link_layer: str  # "InfiniBand" or "Ethernet"
    guid: str
    pkeys: tuple[int, ...]
    netdevs: tuple[str, ...]
    umad: Node | None = None  # None where the container was not given it
    issm: Node | None = None


class Rdma(msgspec.Struct, frozen=True, kw_only=True):
    """An RDMA device, as it was at the time."""

    name: str
    uverbs: Node | None
    ports: tuple[Port, ...]


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter that was handed out."""

    id: str  # host.adapters.Adapter.id
    address: str
    netdevs: tuple[str, ...]
    rdma: tuple[Rdma, ...]


class Allocation(msgspec.Struct, frozen=True, kw_only=True):
    """One device id of one resource that a container holds."""

    resource: str
    id: str  # as the kubelet has it
    devices: tuple[Device, ...]  # one; in mode "all" every one of the pool
    time: str  # "2026-11-21T19:12:56Z"
    boot_id: str
    adopted: bool = False  # told by the kubelet after the fact, not by an Allocate of this plugin

    @property
    def key(self) -> tuple[str, str]:
        """What the kubelet knows it by."""
        return self.resource, self.id


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The whole file."""

    version: int = VERSION
    resources: tuple[str, ...] = ()  # the pools, also those of which nothing is handed out
    allocations: tuple[Allocation, ...] = ()


class _Versioned(msgspec.Struct):
    version: int = 0


class _Encoded(msgspec.Struct):
    version: int
    resources: Sequence[str]
    allocations: Sequence[msgspec.Raw]


def read(paths: Paths) -> Checkpoint:
    """What is handed out; nothing where there is no file. Raises Damaged."""
    try:
        content = paths.checkpoint.read_bytes()
    except FileNotFoundError:
        return Checkpoint()
    except OSError as error:
        raise Damaged(f"{paths.checkpoint}: cannot be read: {error.strerror}") from None
    try:
        version = msgspec.json.decode(content, type=_Versioned).version
        if version == VERSION:
            return msgspec.json.decode(content, type=Checkpoint)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Damaged(
            f"{paths.checkpoint}: {error}: remove it and restart the agent, which asks the kubelet "
            "for what is allocated"
        ) from None
    raise Damaged(
        f"{paths.checkpoint}: has version {version}, this is for version {VERSION}: remove it and "
        "restart the agent, which asks the kubelet for what is allocated"
    )


def write(paths: Paths, resources: Sequence[str], allocations: Sequence[msgspec.Raw]) -> None:
    """Replace the file by these allocations, each encoded already: most are as they were.

    The one device plugin of the node is its only writer. The file survives a kill. After a power
    cut it may be the one before: the kubelet is asked then.
    """
    content = msgspec.json.encode(
        _Encoded(version=VERSION, resources=resources, allocations=allocations)
    )
    files.write_atomically(paths.checkpoint, content, durable=False)
