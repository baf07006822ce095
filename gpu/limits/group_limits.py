"""What a group may use of its GPU, checked."""

import re
import uuid as uuids
from dataclasses import dataclass

from gpu.limit_settings import CONTEXT_RESERVE
from gpu.limits.limits_file import GpuEntry

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


class GroupError(Exception):
    """Limits cannot be set. The text names the group and says what to do."""


@dataclass(frozen=True)
class Limit:
    """What a group may use of its GPU."""

    uuid: str  # "GPU-…"
    memory_bytes: int  # of all its processes together
    compute_share: float  # of the GPU's time, in (0, 1]


def bytes_of(uuid: str) -> bytes:
    """The 16 bytes of "GPU-…", as cuDeviceGetUuid answers them. Raises GroupError."""
    kind, _, number = uuid.partition("-")
    try:
        if kind != "GPU":
            raise ValueError
        return uuids.UUID(number).bytes
    except ValueError:
        raise GroupError(f"{uuid!r}: expected the UUID of a GPU, GPU-…") from None


def check_name(group: str) -> None:
    """Raise GroupError if no group can have this name, which is a directory's."""
    if not _NAME.fullmatch(group):
        raise GroupError(
            f"group {group!r}: a name has up to 200 letters, digits, dots, dashes, underscores"
        )


def check(group: str, limit: Limit) -> None:
    """Raise GroupError if a group cannot have this limit."""
    check_name(group)
    bytes_of(limit.uuid)
    if limit.memory_bytes <= CONTEXT_RESERVE:
        raise GroupError(
            f"group {group}: {limit.uuid}: {limit.memory_bytes} bytes are not enough for a "
            f"CUDA context: more than {CONTEXT_RESERVE} are needed"
        )
    if not 0 < limit.compute_share <= 1:
        raise GroupError(
            f"group {group}: {limit.uuid}: share {limit.compute_share:g}: must be above 0, "
            "and 1 at most"
        )


def limit_of(entry: GpuEntry) -> Limit:
    """What the file `limits` says."""
    return Limit(f"GPU-{uuids.UUID(bytes=entry.uuid)}", entry.memory_bytes, entry.share)
