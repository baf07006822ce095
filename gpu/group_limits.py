"""What a group of containers may use of each GPU: checked, and as the agent itself remembers it.

The file `configured` of a group is for the agent alone: a tenant may keep it from opening `limits`.
"""

import re
import uuid as uuids
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from base import files
from gpu import layout
from gpu.limits_file import GpuEntry

NO_LIMIT = layout.NO_LIMIT

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


class GroupError(Exception):
    """Limits cannot be set. The text names the group and says what to do."""


@dataclass(frozen=True)
class Limit:
    """What a group may use of one GPU."""

    uuid: str  # "GPU-…" or "MIG-…"
    memory_bytes: int  # of all its processes together; NO_LIMIT
    compute_share: float  # of the GPU's time, in (0, 1]


_CONFIGURED = msgspec.json.Decoder(tuple[Limit, ...])  # built before there are threads


def bytes_of(uuid: str) -> bytes:
    """The 16 bytes of "GPU-…" or "MIG-…", as cuDeviceGetUuid answers them. Raises GroupError."""
    kind, _, number = uuid.partition("-")
    try:
        if kind not in ("GPU", "MIG"):
            raise ValueError
        return uuids.UUID(number).bytes
    except ValueError:
        raise GroupError(f"{uuid!r}: expected the UUID of a GPU, GPU-… or MIG-…") from None


def check_name(group: str) -> None:
    """Raise GroupError if no group can have this name, which is a directory's."""
    if not _NAME.fullmatch(group):
        raise GroupError(
            f"group {group!r}: a name has up to 200 letters, digits, dots, dashes, underscores"
        )


def check(group: str, limits: Sequence[Limit], context_reserve: int) -> None:
    """Raise GroupError if a group cannot have these limits."""
    check_name(group)
    if not 1 <= len(limits) <= layout.GPUS:
        raise GroupError(f"group {group}: {len(limits)} GPUs: 1 to {layout.GPUS} are possible")
    if len({bytes_of(limit.uuid) for limit in limits}) != len(limits):
        raise GroupError(f"group {group}: a GPU is listed twice: add up its limits")
    for limit in limits:
        if limit.memory_bytes <= context_reserve:
            raise GroupError(
                f"group {group}: {limit.uuid}: {limit.memory_bytes} bytes are not enough for a "
                f"CUDA context: more than {context_reserve} are needed"
            )
        if not 0 < limit.compute_share <= 1:
            raise GroupError(
                f"group {group}: {limit.uuid}: share {limit.compute_share:g}: must be above 0, "
                "and 1 at most"
            )


def in_order(limits: Sequence[Limit], entries: Sequence[GpuEntry]) -> tuple[Limit, ...] | None:
    """The limits in the order of the file `limits`; None if that is of other GPUs."""
    by_gpu = {bytes_of(limit.uuid): limit for limit in limits}
    order = [entry.uuid for entry in entries]
    return tuple(by_gpu[uuid] for uuid in order) if set(order) == by_gpu.keys() else None


def stored(configured: Path) -> tuple[Limit, ...]:
    """What the file `configured` says; () if that is lost."""
    try:
        return _CONFIGURED.decode(files.read(str(configured)))
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ()


def stored_or_in_force(configured: Path, entries: Sequence[GpuEntry]) -> tuple[Limit, ...]:
    """What `configured` says, in the order of the entries of `limits`; these if that is lost."""
    try:
        by_gpu = {bytes_of(limit.uuid): limit for limit in stored(configured)}
        return tuple(by_gpu[entry.uuid] for entry in entries)
    except (GroupError, KeyError):
        return tuple(
            Limit(f"GPU-{uuids.UUID(bytes=entry.uuid)}", entry.memory_bytes, entry.share)
            for entry in entries
        )


def store(configured: Path, limits: Sequence[Limit]) -> None:
    """Write the file `configured`, if it says anything else. Raises OSError."""
    content = msgspec.json.encode(limits)
    try:
        if files.read(str(configured)) == content:
            return
    except OSError:
        pass
    files.write_atomically(configured, content, durable=False)
