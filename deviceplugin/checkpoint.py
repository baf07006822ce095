"""The allocation checkpoint: which HCAs the kubelet's containers hold. docs/checkpoint.md has it
field by field for other programs.

The device plugin writes it before it answers the kubelet: a line of the log that the checkpoint
names, and now and then the checkpoint whole, by one rename. The CNI plugins read both as one. They
say what was handed out, at that time: device numbers may be others after a driver was loaded anew.
"""

import errno
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from base import files
from base.paths import Paths
from deviceplugin import checkpoint_log

VERSION = 1
NOTHING: Mapping[str, Sequence[str]] = {}


class CheckpointDamaged(Exception):
    """The file cannot be read. The text names it and says why and what to do."""


class CheckpointUnreadable(CheckpointDamaged):
    """The reading process lacks descriptors or memory: the file may be sound."""


class AllocatedNode(msgspec.Struct, frozen=True):
    """A device node in the container."""

    path: str  # "/dev/infiniband/uverbs0"
    major: int
    minor: int


class AllocatedPort(msgspec.Struct, frozen=True, kw_only=True):
    """A port, as it was at the time."""

    number: int
    link_layer: str  # "InfiniBand" or "Ethernet"
    guid: str
    pkeys: tuple[int, ...]
    netdevs: tuple[str, ...]
    umad: AllocatedNode | None = None  # None where the container was not given it
    issm: AllocatedNode | None = None


class AllocatedRdmaDevice(msgspec.Struct, frozen=True, kw_only=True):
    """An RDMA device, as it was at the time."""

    name: str
    uverbs: AllocatedNode | None
    ports: tuple[AllocatedPort, ...]


class AllocatedHCA(msgspec.Struct, frozen=True, kw_only=True):
    """An HCA that was handed out."""

    id: str  # host.discovery.Adapter.id
    address: str
    netdevs: tuple[str, ...]
    rdma: tuple[AllocatedRdmaDevice, ...]


class Allocation(msgspec.Struct, frozen=True, kw_only=True):
    """One device id of one resource that a container holds."""

    resource: str
    id: str  # as the kubelet has it
    devices: tuple[
        AllocatedHCA, ...
    ]  # one; in mode "all" every one of the pool; () if nothing tells
    time: str  # "2026-11-21T19:12:56Z"
    boot_id: str
    adopted: bool = False  # told by the kubelet after the fact, not by an Allocate of this plugin

    @property
    def key(self) -> tuple[str, str]:
        """What the kubelet knows it by."""
        return self.resource, self.id

    @property
    def exclusive(self) -> bool:
        """Whether the holder has its HCA alone: the id of an HCA means the whole of it."""
        return [device.id for device in self.devices] == [self.id]


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The whole file. `read` gives it with what its log has, and as if it had none."""

    version: int = VERSION
    resources: tuple[str, ...] = ()  # the pools, also those of which nothing is handed out
    log: str = ""  # the file beside it with what was granted since; "" if there is none
    allocations: tuple[Allocation, ...] = ()
    offered: dict[str, tuple[str, ...]] = {}  # by resource the ids of the pool's HCAs


_LOGGED = msgspec.json.Decoder(Allocation)


class _CheckpointVersion(msgspec.Struct):
    version: int = 0


class _Encoded(msgspec.Struct):
    version: int
    resources: Sequence[str]
    log: str
    allocations: Sequence[msgspec.Raw]
    offered: Mapping[str, Sequence[str]]


def read(paths: Paths) -> Checkpoint:
    """What is handed out; nothing where there is no file. Raises Damaged."""
    whole = _whole(paths)
    while whole.log:
        log = paths.devices / whole.log
        try:
            added = _LOGGED.decode_lines(checkpoint_log.lines(log))
        except FileNotFoundError:  # written whole meanwhile, and names another one now
            before, whole = whole.log, _whole(paths)
            if whole.log == before:
                raise CheckpointDamaged(f"{log}: is not there: {_mend(paths)}") from None
        except OSError as error:
            raise _unread(log, error) from None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CheckpointDamaged(f"{log}: {error}: {_mend(paths)}") from None
        else:
            merged = {one.key: one for one in (*whole.allocations, *added)}
            return msgspec.structs.replace(whole, log="", allocations=tuple(merged.values()))
    return whole


def write(
    paths: Paths,
    resources: Sequence[str],
    allocations: Sequence[msgspec.Raw],
    log: str = "",
    offered: Mapping[str, Sequence[str]] = NOTHING,
) -> None:
    """Replace the file by these allocations, each encoded already: most are as they were.

    `offered` has the ids of each pool's HCAs, by resource. `log` is the name of the file that
    further ones will be added to. The one device plugin of the node is the only writer. The
    content is on disk when this returns, the name may not be. Raises OSError.
    """
    content = msgspec.json.encode(
        _Encoded(
            version=VERSION,
            resources=resources,
            log=log,
            allocations=allocations,
            offered=offered,
        )
    )
    files.write_atomically(paths.checkpoint, content, durable=False)


def _whole(paths: Paths) -> Checkpoint:
    try:
        content = paths.checkpoint.read_bytes()
    except FileNotFoundError:
        return Checkpoint()
    except OSError as error:
        raise _unread(paths.checkpoint, error) from None
    try:
        version = msgspec.json.decode(content, type=_CheckpointVersion).version
        if version == VERSION:
            return msgspec.json.decode(content, type=Checkpoint)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointDamaged(f"{paths.checkpoint}: {error}: {_mend(paths)}") from None
    raise CheckpointDamaged(
        f"{paths.checkpoint}: has version {version}, this is for version {VERSION}: {_mend(paths)}"
    )


def _unread(path: Path, error: OSError) -> CheckpointDamaged:
    lacking = error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
    return (CheckpointUnreadable if lacking else CheckpointDamaged)(
        f"{path}: cannot be read: {error.strerror}"
    )


def _mend(paths: Paths) -> str:
    return (
        f"remove {paths.checkpoint} and restart the agent, which asks the kubelet for what is "
        "allocated"
    )
