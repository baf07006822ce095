"""The tier `mps`: NVIDIA's Multi-Process Service limits each client process of a container.

It keeps a part of the GPU's multiprocessors for them, in hardware, and a limit of memory for each
process. The shim keeps the limit for their sum. A program that reaches no control daemon would have
the whole GPU, so the GPU must be in the mode EXCLUSIVE_PROCESS, and a container is refused its
start while none listens. The daemon needs no server yet: it starts one for its first client.

Sources: NVIDIA's MPS documentation, "Environment Variables" and "Legacy MPS v2 Interface";
nvidia-cuda-mps-control(1); nvml.h, nvmlComputeMode_t; what GKE gives its containers.
"""

import errno
import os
import socket
import time
from pathlib import Path

from base.paths import Paths
from gpu.container_edits import ContainerEdits
from gpu.driver_files import SharedFile
from gpu.group_limits import NO_LIMIT, Limit
from gpu.nvml import EXCLUSIVE_PROCESS, Nvml, NvmlError
from gpu.settings import MpsDirectories
from host.errors import HostError

CONTROL = "control"  # the daemon's socket, in the directory of its pipes
PATIENCE = 1.0  # seconds for a connection
LOOK_AGAIN = 5.0  # seconds; the daemon logs connections
OLD = 30.0  # seconds, after which what the driver told of a GPU counts no more

PIPES, THREADS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
MEMORY = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"


class MpsTier:
    """MPS on this node. `learn` is for one thread, `obstacle` for one, the others for any."""

    def __init__(self, paths: Paths, directories: MpsDirectories | None) -> None:
        self._directories = directories
        self._host = paths.host
        # By UUID: when the driver told the compute mode, and what is wrong with that.
        self._modes: dict[str, tuple[float, str | None]] = {}
        self._told: tuple[float, str | None] = (float("-inf"), None)

    def learn(self, driver: Nvml, uuid: str) -> None:
        """Ask for a GPU's compute mode, which may change at any time."""
        if self._directories is None:
            return
        wrong = None
        try:
            if driver.compute_mode(uuid) != EXCLUSIVE_PROCESS:
                wrong = (
                    "the GPU is not in the compute mode EXCLUSIVE_PROCESS, so programs could use "
                    "it without MPS: `nvidia-smi -c EXCLUSIVE_PROCESS`"
                )
        except NvmlError as error:
            wrong = f"the GPU's compute mode is not known: {error}"
        self._modes[uuid] = time.monotonic(), wrong

    def obstacle(self, uuid: str) -> str | None:
        """Why containers cannot be limited on a GPU, as it was some seconds ago."""
        now = time.monotonic()
        at, told = self._told
        if now - at >= LOOK_AGAIN:
            told = self._daemon()
            self._told = now, told
        return told or self._mode(uuid)

    def edits(self, limit: Limit) -> ContainerEdits:
        """What a container that starts gets. Raises HostError: it must not start."""
        refused = self._daemon() or self._mode(limit.uuid)
        if refused is not None or self._directories is None:
            raise HostError(f"MPS would not limit the container: {refused}")
        pipes, shm = (str(path) for path in (self._directories.pipes, self._directories.shm))
        variables = {PIPES: pipes, THREADS: str(max(int(limit.compute_share * 100 + 0.5), 1))}
        if limit.memory_bytes != NO_LIMIT:
            variables[MEMORY] = f"0={limit.memory_bytes >> 20}M"  # its GPU is its first one
        return ContainerEdits(
            files=(
                SharedFile(pipes, pipes, read_only=False),
                SharedFile(shm, "/dev/shm", read_only=False),
            ),
            variables=variables,
        )

    def _mode(self, uuid: str) -> str | None:
        at, wrong = self._modes.get(uuid, (float("-inf"), None))
        if time.monotonic() - at > OLD:
            return "the driver does not tell the GPU's compute mode"
        return wrong

    def _daemon(self) -> str | None:
        """Why nothing can be asked of the control daemon; None if it listens."""
        if self._directories is None:
            return "gpuLimits.mps does not say where the control daemon's pipes are"
        control = self._host / self._directories.pipes.relative_to("/") / CONTROL
        failed = _connect(control)
        if failed is None:
            return None
        return (
            f"no MPS control daemon listens at {self._directories.pipes / CONTROL}: {failed}: "
            "start `nvidia-cuda-mps-control -d` on the node"
        )


def _connect(path: Path) -> str | None:
    """Why no process listens at a unix socket; None if one does."""
    # By its directory's descriptor: the address of a socket has room for 107 bytes only.
    try:
        directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        return error.strerror
    try:
        for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
            with socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC) as client:
                client.settimeout(PATIENCE)
                try:
                    client.connect(f"/proc/self/fd/{directory}/{path.name}")
                except OSError as error:
                    if error.errno != errno.EPROTOTYPE:
                        return error.strerror or str(error)
                else:
                    return None
        return "it is a socket of another type"
    finally:
        os.close(directory)
