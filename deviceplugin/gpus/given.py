"""What a container with parts of a GPU gets: its nodes, the driver, and the files of its limits.

With `binding` at admission, Allocate answers with the nodes of the GPU that it chose. The files of
the limits have the same paths whichever GPU it is: a group is named after the container's slot,
which is the first of its ids.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import grpc

from base.paths import Paths
from deviceplugin.api import v1beta1_pb2
from deviceplugin.checkpoint import AllocatedGPU
from deviceplugin.gpus import answer
from deviceplugin.gpus.parts import GpuLimit, GpuParts, SharedFile
from deviceplugin.kubelet.server import Rejected
from deviceplugin.pools.gpu_pool import GpuPoolConfig
from gpu import nodes
from gpu.nodes import GpuNode
from host.errors import HostError

INSIDE = "/run/podfabric/gpu"


class Giver:
    """Makes what containers get, in the order in which a kill may interrupt it."""

    def __init__(self, paths: Paths, parts: GpuParts) -> None:
        self._paths = paths
        self._parts = parts

    @property
    def tier(self) -> str:
        """What enforces the limits of new containers."""
        return "none" if self._parts.groups is None else "shim"

    def clear(self, resource: str, given: AllocatedGPU) -> None:
        """Before an Allocate is recorded: remove what an earlier holder of the slot had.

        Its processes have ended, since the kubelet gives the slot away again. Raises OSError.
        """
        if given.slot:
            self.remove(group_of(resource, given.slot))

    def answer(
        self, resource: str, given: AllocatedGPU, config: GpuPoolConfig
    ) -> v1beta1_pb2.ContainerAllocateResponse:
        """The answer of an Allocate that is recorded; nothing for time alone.

        Raises Rejected and OSError.
        """
        if not given.slot:
            return v1beta1_pb2.ContainerAllocateResponse()
        found = self.nodes(given, resource)
        files: list[SharedFile] = []
        if self._parts.groups is not None:
            group = group_of(resource, given.slot)
            limit = GpuLimit(given.uuid, given.memory_bytes, given.compute_share or 1.0)
            files = [*_files_of(self._parts.groups.make(group, [limit])), *self._parts.files]
        return answer.response(found, config.driver_mount, files=files)

    def nodes(self, given: AllocatedGPU, resource: str) -> tuple[GpuNode, ...]:
        """The nodes of a GPU. Raises Rejected."""
        try:
            return nodes.of_gpus(self._paths, [given.minor], nodes.TOOLS_AND_DISPLAY)
        except HostError as error:
            raise Rejected(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"cannot give {given.bdf} for {resource}: {error}",
            ) from None

    def limit(self, group: str, limits: Sequence[GpuLimit]) -> None:
        """Have the group of a container that starts, with these limits. Raises OSError."""
        if self._parts.groups is not None:
            self._parts.groups.make(group, limits)
            self._parts.groups.change(group, limits)

    def remove(self, group: str) -> None:
        """Remove the group of a container that is gone. Raises OSError."""
        if self._parts.groups is not None:
            self._parts.groups.remove(group)


def group_of(resource: str, slot: str) -> str:
    """The group of the container whose slot of a resource that is: a name of a directory."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", f"{resource}.{slot}")


def _files_of(directory: Path) -> tuple[SharedFile, SharedFile]:
    return (
        SharedFile(str(directory / "limits"), f"{INSIDE}/limits"),
        SharedFile(str(directory / "region"), f"{INSIDE}/region", read_only=False),
    )
