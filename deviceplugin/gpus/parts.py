"""What the agent adds to pools of GPUs: NVML, and the groups whose limits are enforced.

A device plugin that runs alone has neither: then `memory` in config.yaml says how much memory the
GPUs have, and nothing enforces the limits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gpu.groups import Limit
from gpu.inventory import GpuMemory, MemorySource


class LimitedGroups(Protocol):
    """The groups of processes with common limits, one for each container: gpu.groups.Groups.

    Raises GroupError and OSError.
    """

    def make(self, group: str, limits: Sequence[Limit]) -> Path:
        """Make a group unless it exists; its directory, with the files `limits` and `region`."""

    def change(self, group: str, limits: Sequence[Limit]) -> None:
        """Give a group other limits, which its processes follow at once."""

    def remove(self, group: str) -> None:
        """Remove a group if it exists."""


@dataclass(frozen=True)
class SharedFile:
    """A file or directory of the host that each container with limits sees."""

    host: str
    container: str
    read_only: bool = True


def _no_memory() -> Mapping[str, GpuMemory]:
    return {}


@dataclass(frozen=True)
class GpuParts:
    """The parts of an agent. Without `groups` nothing is enforced: the tier is "none"."""

    memory: MemorySource = _no_memory
    groups: LimitedGroups | None = None
    files: tuple[SharedFile, ...] = ()  # of the library that enforces the limits, and its socket
