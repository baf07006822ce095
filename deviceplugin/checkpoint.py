"""The allocation checkpoint: which HCAs and GPUs the kubelet's containers hold.

docs/checkpoint.md describes every field for other programs. The device plugin replaces the file
before it answers the kubelet's Allocate; the CNI plugins read it. Device numbers are those of the
time of the allocation: after a driver reload they may belong to another HCA.
"""

import errno
import hashlib
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import msgspec

from base import decoding, files
from base.paths import Paths
from base.types import DeviceId

VERSION = 1
NOTHING: Mapping[str, Sequence[str]] = {}

AllocationKey = tuple[str, DeviceId]
"""A resource and a device id of it, which the kubelet gives to one container at a time."""


class CheckpointDamaged(Exception):
    """The file cannot be used. The text names it and says why and what to do."""


class CheckpointUnreadable(CheckpointDamaged):
    """The process lacks descriptors or memory, or cannot write; the file may be intact."""


class AllocatedNode(msgspec.Struct, frozen=True):
    """A device node in the container."""

    path: str  # "/dev/infiniband/uverbs0"
    major: int
    minor: int


class AllocatedPort(msgspec.Struct, frozen=True, kw_only=True):
    """A port of an RDMA device at the time of the allocation."""

    number: int
    link_layer: str  # "InfiniBand" or "Ethernet"
    guid: str
    pkeys: tuple[int, ...]
    netdevs: tuple[str, ...]
    umad: AllocatedNode | None = None  # None if the container did not get it
    issm: AllocatedNode | None = None


class AllocatedRdmaDevice(msgspec.Struct, frozen=True, kw_only=True):
    """An RDMA device at the time of the allocation."""

    name: str
    uverbs: AllocatedNode | None
    ports: tuple[AllocatedPort, ...]


class AllocatedHCA(msgspec.Struct, frozen=True, kw_only=True):
    """An HCA that a container got."""

    id: str  # as host.sysfs.discovery.HCA.id
    address: str
    netdevs: tuple[str, ...]
    rdma: tuple[AllocatedRdmaDevice, ...]


class AllocatedGPU(msgspec.Struct, frozen=True, kw_only=True):
    """What a container has of a GPU by one device id."""

    uuid: str  # "GPU-…"; "" if the id is not bound to a GPU yet, or if the driver told none
    bdf: str  # "0000:1a:00.0"; "" if the id is not bound to a GPU yet
    minor: int  # N in /dev/nvidiaN; -1 if the id is not bound to a GPU yet
    memory_bytes: int = 0  # of its memory, by this id; 0: no limit in a pool of replicas
    compute_share: float = 0.0  # of its time, from 0 to 1, by this id; 0 as above
    slot: str = ""  # the first of the container's ids of the resource; "" for time of a GPU
    group: str = (
        ""  # the group whose limits they are (gpu/limits/groups.py); "" before the first start
    )

    @property
    def open(self) -> bool:
        """Whether the start of its container may still choose another GPU."""
        return bool(self.slot) and not self.group


class Allocation(msgspec.Struct, frozen=True, kw_only=True):
    """One device id of one resource that a container holds."""

    resource: str
    id: DeviceId  # as the kubelet has it
    # One HCA; in mode "all" every HCA of the pool; none if it was adopted and the HCA is unknown.
    devices: tuple[AllocatedHCA, ...]
    time: str  # "2026-11-21T19:12:56Z"
    boot_id: str
    adopted: bool = False  # from the kubelet's records, not from an Allocate of this plugin
    gpu: AllocatedGPU | None = None  # for an id of a pool of GPUs, which has no `devices`

    @property
    def key(self) -> AllocationKey:
        """Resource and device id."""
        return self.resource, self.id

    @property
    def exclusive(self) -> bool:
        """Whether the holder has its HCA alone: the id of an HCA means the whole of it."""
        return [device.id for device in self.devices] == [self.id]


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """What the file says."""

    allocations: tuple[Allocation, ...] = ()
    offered: dict[str, tuple[str, ...]] = {}  # the HCA ids of each pool, by resource


class StoredAllocation(msgspec.Struct, frozen=True, kw_only=True):
    """An allocation in the file. Many have the same devices, which are therefore stored once."""

    resource: str
    id: DeviceId
    devices: tuple[str, ...]  # keys of CheckpointFile.hcas
    time: str
    boot_id: str
    adopted: bool
    gpu: AllocatedGPU | None


class CheckpointFile(msgspec.Struct, frozen=True, kw_only=True):
    """The file."""

    version: int
    hcas: dict[str, AllocatedHCA]
    allocations: tuple[StoredAllocation, ...]
    offered: dict[str, tuple[str, ...]]


class EncodedAllocation(NamedTuple):
    """An allocation as the file has it. Encoded once, since most do not change between writes."""

    stored: msgspec.Raw
    hcas: tuple[tuple[str, msgspec.Raw], ...]  # items of CheckpointFile.hcas


class _CheckpointVersion(msgspec.Struct):
    version: int = 0


class _Encoded(msgspec.Struct):
    """A CheckpointFile of encoded parts."""

    version: int
    hcas: Mapping[str, msgspec.Raw]
    allocations: Sequence[msgspec.Raw]
    offered: Mapping[str, Sequence[str]]


def read(paths: Paths) -> Checkpoint:
    """Read the checkpoint; an empty one if there is no file. Raises CheckpointDamaged."""
    try:
        content = files.read(str(paths.checkpoint))
    except FileNotFoundError:
        return Checkpoint()
    except OSError as error:
        lacking = error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
        raise (CheckpointUnreadable if lacking else CheckpointDamaged)(
            f"{paths.checkpoint}: cannot be read: {error.strerror}"
        ) from None
    try:
        version = decoding.decode(content, _CheckpointVersion).version
        if version == VERSION:
            return _resolved(decoding.decode(content, CheckpointFile))
    except msgspec.MsgspecError as error:
        raise CheckpointDamaged(f"{paths.checkpoint}: {error}: {_remedy(paths)}") from None
    except KeyError as key:
        raise CheckpointDamaged(
            f'{paths.checkpoint}: "hcas" has no {key}: {_remedy(paths)}'
        ) from None
    raise CheckpointDamaged(
        f"{paths.checkpoint}: has version {version}, this podfabric reads version {VERSION}: "
        f"{_remedy(paths)}"
    )


def encode(allocation: Allocation) -> EncodedAllocation:
    """An allocation for `write`."""
    hcas = {}
    for device in allocation.devices:
        content = msgspec.json.encode(device)
        digest = hashlib.blake2b(content, digest_size=6).hexdigest()
        hcas[f"{device.id}@{digest}"] = msgspec.Raw(content)
    stored = StoredAllocation(
        resource=allocation.resource,
        id=allocation.id,
        devices=tuple(hcas),
        time=allocation.time,
        boot_id=allocation.boot_id,
        adopted=allocation.adopted,
        gpu=allocation.gpu,
    )
    return EncodedAllocation(msgspec.Raw(msgspec.json.encode(stored)), tuple(hcas.items()))


def write(
    paths: Paths,
    allocations: Sequence[EncodedAllocation],
    offered: Mapping[str, Sequence[str]] = NOTHING,
) -> None:
    """Replace the file. Its content is on disk when this returns, and `recover` finds it there.

    `offered` has the HCA ids of each pool, by resource. Only the node's one device plugin may call
    this. Raises OSError: then a reader finds the old file.
    """
    hcas = dict(chain.from_iterable(allocation.hcas for allocation in allocations))
    content = msgspec.json.encode(
        _Encoded(
            version=VERSION,
            hcas=hcas,
            allocations=[allocation.stored for allocation in allocations],
            offered=offered,
        )
    )
    # A wait for the directory, too, would be a third of an Allocate.
    files.write_atomically(paths.checkpoint, content, durable=False)


def recover(paths: Paths) -> None:
    """Finish the last `write`, if a kill or a power cut interrupted it.

    Only the node's one device plugin may call this, before it reads. Raises CheckpointUnreadable.
    """
    try:
        files.recover(paths.checkpoint, _is_whole)
    except OSError as error:
        raise CheckpointUnreadable(
            f"{paths.checkpoint}: its last change cannot be finished: {error.strerror}"
        ) from None


def _is_whole(content: bytes) -> bool:
    try:
        return decoding.decode(content, CheckpointFile).version == VERSION
    except msgspec.MsgspecError:
        return False


def _resolved(file: CheckpointFile) -> Checkpoint:
    """The file's content with the devices in the allocations. Raises KeyError."""
    allocations = tuple(
        Allocation(
            resource=stored.resource,
            id=stored.id,
            devices=tuple(file.hcas[key] for key in stored.devices),
            time=stored.time,
            boot_id=stored.boot_id,
            adopted=stored.adopted,
            gpu=stored.gpu,
        )
        for stored in file.allocations
    )
    return Checkpoint(allocations=allocations, offered=file.offered)


def _remedy(paths: Paths) -> str:
    return (
        f"remove {paths.checkpoint} and restart the agent, which asks the kubelet for what is "
        "allocated"
    )
