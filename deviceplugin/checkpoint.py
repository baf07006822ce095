"""The allocation checkpoint: which HCAs and GPUs the kubelet's containers hold.

The device plugin writes the file, and the CNI plugins read it (docs/reference/checkpoint.md). After
a driver reload, the device numbers in the file may belong to other HCAs.
"""

import errno
import hashlib
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import msgspec
from msgspec.structs import asdict

from base import decoding, files
from base.paths import Paths
from base.types import DeviceId

VERSION = 1

AllocationKey = tuple[str, DeviceId]
"""A resource and one of its device ids. The kubelet gives an id to one container at a time."""


class CheckpointDamaged(Exception):
    """The file cannot be used. The text names the file, the reason and the remedy."""


class CheckpointUnreadable(CheckpointDamaged):
    """The process lacks descriptors or memory, or cannot finish an interrupted write.

    The file may be intact.
    """


class AllocatedNode(msgspec.Struct, frozen=True):
    path: str  # "/dev/infiniband/uverbs0"
    major: int
    minor: int


class AllocatedPort(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    link_layer: str  # "InfiniBand" or "Ethernet"
    guid: str
    pkeys: tuple[int, ...]
    netdevs: tuple[str, ...]
    umad: AllocatedNode | None = None  # `None` if the container did not get the node
    issm: AllocatedNode | None = None


class AllocatedRdmaDevice(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    uverbs: AllocatedNode | None
    ports: tuple[AllocatedPort, ...]


class AllocatedHCA(msgspec.Struct, frozen=True, kw_only=True):
    id: str  # as host.sysfs.discovery.HCA.id
    address: str
    netdevs: tuple[str, ...]
    rdma: tuple[AllocatedRdmaDevice, ...]
    rail: int | None = None  # the entry of `rails` in config.yaml; `None` without an entry


class AllocatedGPU(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a GPU that a container holds by one device id."""

    # Before the id is bound to a GPU, these are "", "" and -1.
    uuid: str  # "GPU-…"; "" also if the driver reported none
    bdf: str  # "0000:1a:00.0"
    minor: int  # N in /dev/nvidiaN
    memory_bytes: int = 0  # of the GPU's memory; 0 in a pool of replicas: no limit
    compute_share: float = 0.0  # of the GPU's time, from 0 to 1; 0 in a pool of replicas: no limit
    slot: str = ""  # the first of the container's ids of the resource; "" for time of a GPU
    group: str = ""  # of the limits (gpu/limits/groups.py); "" before the first start

    @property
    def open(self) -> bool:
        """Whether another GPU may still be chosen when the container starts."""
        return bool(self.slot) and not self.group


class Allocation(msgspec.Struct, frozen=True, kw_only=True):
    """One device id of one resource that a container holds."""

    resource: str
    id: DeviceId  # the kubelet's id
    # One HCA. In mode "all": every HCA of the pool. Empty if adopted and the HCA is unknown.
    devices: tuple[AllocatedHCA, ...]
    time: str  # "2026-11-21T19:12:56Z"
    boot_id: str
    adopted: bool = False  # from the kubelet's records, not from an Allocate of this plugin
    gpu: AllocatedGPU | None = None  # for an id of a pool of GPUs, which has no `devices`

    @property
    def key(self) -> AllocationKey:
        return self.resource, self.id

    @property
    def exclusive(self) -> bool:
        """Whether no other container may hold the HCA. An exclusive id is the HCA's own id."""
        return [device.id for device in self.devices] == [self.id]


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    allocations: tuple[Allocation, ...] = ()
    offered: dict[str, tuple[str, ...]] = {}  # the HCA ids of each pool, by resource


class StoredAllocation(msgspec.Struct, frozen=True, kw_only=True):
    """An allocation in the file. The file stores each HCA only once."""

    resource: str
    id: DeviceId
    devices: tuple[str, ...]  # keys of CheckpointFile.hcas
    time: str
    boot_id: str
    adopted: bool
    gpu: AllocatedGPU | None


class CheckpointFile(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    hcas: dict[str, AllocatedHCA]
    allocations: tuple[StoredAllocation, ...]
    offered: dict[str, tuple[str, ...]]


class EncodedAllocation(NamedTuple):
    """An encoded allocation, which the ledger keeps for its next writes."""

    stored: msgspec.Raw
    hcas: tuple[tuple[str, msgspec.Raw], ...]  # items of CheckpointFile.hcas


class _CheckpointVersion(msgspec.Struct):
    version: int = 0


def read(paths: Paths) -> Checkpoint:
    """Read the checkpoint, which is empty if the file does not exist. Raises CheckpointDamaged."""
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
        problem = f"has version {version}, but this podfabric reads version {VERSION}"
    except msgspec.MsgspecError as error:
        problem = str(error)
    except KeyError as key:
        problem = f'"hcas" has no {key}'
    raise CheckpointDamaged(
        f"{paths.checkpoint}: {problem}: remove the file and restart the agent, which reads the "
        "allocations from the kubelet's records"
    )


def encode(allocation: Allocation) -> EncodedAllocation:
    hcas = {}
    for device in allocation.devices:
        content = msgspec.json.encode(device)
        digest = hashlib.blake2b(content, digest_size=6).hexdigest()
        hcas[f"{device.id}@{digest}"] = msgspec.Raw(content)
    stored = msgspec.json.encode(asdict(allocation) | {"devices": tuple(hcas)})
    return EncodedAllocation(msgspec.Raw(stored), tuple(hcas.items()))


def write(
    paths: Paths,
    allocations: Sequence[EncodedAllocation],
    offered: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """Replace the file. When the call returns, `recover` can restore the new content from disk.

    Only the node's one device plugin may write. After an OSError, readers find the old file.
    """
    hcas = dict(chain.from_iterable(allocation.hcas for allocation in allocations))
    stored = [allocation.stored for allocation in allocations]
    file = {"version": VERSION, "hcas": hcas, "allocations": stored, "offered": offered or {}}
    # Do not wait for the directory's write too: this would take a third of an Allocate.
    files.write_atomically(paths.checkpoint, msgspec.json.encode(file), durable=False)


def recover(paths: Paths) -> None:
    """Finish a `write` that a kill or a power cut interrupted. Raises CheckpointUnreadable.

    Call `recover` before `read`, and only in the node's one device plugin.
    """
    try:
        files.recover(paths.checkpoint, _is_whole)
    except OSError as error:
        raise CheckpointUnreadable(
            f"{paths.checkpoint}: cannot complete the last change of this file: {error.strerror}"
        ) from None


def _is_whole(content: bytes) -> bool:
    try:
        return decoding.decode(content, CheckpointFile).version == VERSION
    except msgspec.MsgspecError:
        return False


def _resolved(file: CheckpointFile) -> Checkpoint:
    """Replace the device keys of the stored allocations by the devices. Raises KeyError."""
    allocations = tuple(
        Allocation(**asdict(stored) | {"devices": tuple(file.hcas[key] for key in stored.devices)})
        for stored in file.allocations
    )
    return Checkpoint(allocations=allocations, offered=file.offered)
