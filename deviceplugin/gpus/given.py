"""What a container with parts of a GPU gets: its nodes, the driver, and the files of its limits.

Bound at admission, Allocate answers with the nodes of the GPU that it chose. Bound at the start, it
answers with a CDI name, and the start writes what that is (`slot_files`). The files of the limits
have the same paths whichever GPU it is: a group is named after the container's slot, which is the
first of its ids, and so is the CDI device.
"""

import errno
import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import grpc

from base.paths import Paths
from deviceplugin.api import v1beta1_pb2
from deviceplugin.checkpoint import AllocatedGPU
from deviceplugin.gpus import alnair, answer, slot_files
from deviceplugin.gpus.parts import GpuParts
from deviceplugin.gpus.tiers import mounted
from deviceplugin.kubelet.server import Rejected
from deviceplugin.pools.gpu_pool import GpuBinding, GpuPoolConfig
from gpu import nodes
from gpu.container_edits import ContainerEdits
from gpu.driver_files import SharedFile
from gpu.group_limits import GroupError, Limit
from gpu.nodes import GpuNode
from gpu.tiers import BY_CDI
from host.errors import HostError
from host.selinux import READ, WRITE, ContainerLabels

_LONGEST = 200  # bytes of a group's name, which is part of the name of a file

INSIDE = "/run/podfabric/gpu"

# The nvidia runtime would give a container what its image asks for, which may be all GPUs.
VOID = {"NVIDIA_VISIBLE_DEVICES": "void"}


class Giver:
    """Makes what containers get, in the order in which a kill may interrupt it."""

    def __init__(self, paths: Paths, parts: GpuParts) -> None:
        self._paths = paths
        self._labels = ContainerLabels(paths.sys)
        self.parts = parts
        self.binding: GpuBinding = "admission"  # of new containers
        self.leaving = False  # there are to be no new containers

    @property
    def context_reserve(self) -> int:
        """Bytes above which each limit must be."""
        return self.parts.context_reserve

    def clear(self, resource: str, given: AllocatedGPU) -> None:
        """Before an Allocate is recorded: remove what an earlier holder of the slot had.

        Its processes have ended, since the kubelet gives the slot away again. Raises OSError.
        """
        if given.slot:
            self.remove(group_of(resource, given.slot))

    def answer(
        self, resource: str, given: AllocatedGPU, config: GpuPoolConfig, limit: Limit
    ) -> v1beta1_pb2.ContainerAllocateResponse:
        """The answer of an Allocate that is recorded; variables at most for time alone.

        Raises Rejected and OSError.
        """
        group = group_of(resource, given.slot) if given.slot else ""
        variables = alnair.variables(group, limit) if config.compat == "alnair" else {}
        if not group:
            return answer.response(variables=variables)
        if given.tier in BY_CDI and not given.cdi:  # `gpuBinding` has changed since the last look
            raise Rejected(
                grpc.StatusCode.UNAVAILABLE,
                f"what keeps limits of {resource} changes now: try again in a second",
            )
        if given.cdi:
            name = slot_files.qualified(group)
            return answer.response((), config.driver_mount, cdi=[name], variables=variables)
        files = self._limited(given, config, group, [limit])
        return answer.response(
            self.nodes(given, resource),
            config.driver_mount,
            files=files,
            # One without limits has no files of the driver from us, and may need the runtime's.
            variables={**(VOID if files else {}), **variables},
        )

    def nodes(self, given: AllocatedGPU, resource: str) -> tuple[GpuNode, ...]:
        """The nodes of a GPU. Raises Rejected."""
        try:
            return nodes.of_gpus(self._paths, [given.minor], nodes.TOOLS_AND_DISPLAY)
        except HostError as error:
            raise Rejected(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"cannot give {given.bdf} for {resource}: {error}",
            ) from None

    def start(
        self, resource: str, given: AllocatedGPU, config: GpuPoolConfig, limit: Limit
    ) -> None:
        """What a container has that starts: its limits, then its CDI device.

        Raises Rejected and OSError.
        """
        found, edits = self.nodes(given, resource), self._edits(given, limit)
        files = self._limited(given, config, given.group, [limit], change=True)
        if given.cdi:
            slot_files.write(
                self._paths,
                group_of(resource, given.slot),
                found,
                [*files, *edits.files],
                {**VOID, **edits.variables},
                edits.hooks,
            )

    def started(self, resource: str, slot: str) -> frozenset[int]:
        """N of each /dev/nvidiaN that a container with a CDI name was given when it started."""
        return slot_files.read(self._paths, group_of(resource, slot))

    def remove(self, group: str) -> None:
        """Remove what a container had that is gone. Raises OSError."""
        slot_files.remove(self._paths, group)
        if self.parts.groups is not None:
            try:
                self.parts.groups.remove(group)
            except GroupError as error:
                raise OSError(errno.EBUSY, str(error), group) from None

    def _limited(
        self,
        given: AllocatedGPU,
        config: GpuPoolConfig,
        group: str,
        limits: Sequence[Limit],
        *,
        change: bool = False,
    ) -> list[SharedFile]:
        """Have a group with limits, with `change` these; the files that its container sees.

        Nothing for a container whose limits are not kept. Raises Rejected and OSError.
        """
        if given.tier == "none" or self.parts.groups is None:
            return []
        if given.tier == "mps":  # which keeps a part of the multiprocessors, not of the time
            limits = [replace(limit, compute_share=1.0) for limit in limits]
        try:
            directory = self.parts.groups.make(group, limits)
            if change:
                self.parts.groups.change(group, limits)
            files = [*_files_of(directory), *self.parts.files(mounted(config))]
        except (GroupError, HostError) as error:
            raise Rejected(grpc.StatusCode.FAILED_PRECONDITION, str(error)) from None
        self._label(directory, files)
        return files

    def _label(self, directory: Path, files: Sequence[SharedFile]) -> None:
        """Let containers use what is podfabric's of these, where SELinux denies it else."""
        for host in {file.host for file in files}:
            path = Path(host)
            if path.parent == self._paths.shims or path == directory / "limits":
                self._labels.set(path, READ)
        # What is made in the directory `agent` later, a new socket, has the directory's label.
        for path in (directory / "region", directory / "agent", *(directory / "agent").iterdir()):
            self._labels.set(path, WRITE)

    def _edits(self, given: AllocatedGPU, limit: Limit) -> ContainerEdits:
        """What the container gets for its tier beside that of the shims. Raises Rejected."""
        try:
            return self.parts.edits(given.tier, given.group, limit)
        except HostError as error:
            raise Rejected(grpc.StatusCode.FAILED_PRECONDITION, str(error)) from None


def group_of(resource: str, slot: str) -> str:
    """The group of the container whose slot of a resource that is: a name of a directory."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", f"{resource}.{slot}")
    if len(name) <= _LONGEST:
        return name
    return f"{name[: _LONGEST - 9]}-{hashlib.sha256(f'{resource}.{slot}'.encode()).hexdigest()[:8]}"


def _files_of(directory: Path) -> tuple[SharedFile, ...]:
    return (
        SharedFile(str(directory / "limits"), f"{INSIDE}/limits"),
        SharedFile(str(directory / "region"), f"{INSIDE}/region", read_only=False),
        # The directory, since an agent that starts again makes a new socket.
        SharedFile(str(directory / "agent"), f"{INSIDE}/agent"),
    )
