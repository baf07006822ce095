"""Limits the memory of GPUs for a container's cgroup when its runtime is about to start it.

The runtime starts the hook gpu-limit (hook/gpu_limit.c) once the cgroup exists and before the
container's first program runs. The hook hands the group's name and the runtime's state of the
container to the socket that is served here. A container whose limits cannot be set does not start.

Sources: OCI runtime specification, "POSIX-platform Hooks" (createRuntime) and "State"; CDI's
SPEC.md for how a device names a hook.
"""

import logging
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from base import decoding
from base.text import printable
from gpu import kernel_tier, processes
from gpu.container_edits import OciHook
from gpu.group_limits import GroupError
from gpu.groups import Groups
from gpu.kernel_tier import KernelTierError
from gpu.nvml import Nvml

DONE = "done\n"
MOST = (1 << 20) + 512  # bytes of a request: the state, with the container's annotations
PATIENCE = 5.0  # seconds for a request, and for the hook to take its answer
BACKLOG = 128

_STARTING = ("creating", "created")

_log = logging.getLogger(__name__)


class _StartingContainer(msgspec.Struct):
    """What a hook is told of its container."""

    id: str  # the runtime's name of it, which its cgroup has, too
    status: str
    pid: int


class StartRefused(Exception):
    """The container must not start. The text says why."""


def hook(executable: Path, path: Path, group: str) -> OciHook:
    """The hook of a container of that group. Both paths are the host's."""
    return OciHook(path=str(executable), args=("gpu-limit", str(path), group))


class LimitHook:
    """Serves the hook's socket in a thread, from `start` to `close`.

    Args:
        path: the socket, in a directory that only root may enter.
        groups: the groups, which have the limits.
        driver: answers NVML; None while the driver cannot be asked.
        cgroups: where the host's cgroups of version 2 are.
    """

    def __init__(
        self, path: Path, groups: Groups, driver: Callable[[], Nvml | None], cgroups: Path
    ) -> None:
        self._path = path
        self._groups = groups
        self._driver = driver
        self._cgroups = cgroups
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="gpu-limit-hook", daemon=True)

    def start(self) -> None:
        """Listen, in place of an earlier agent. Raises OSError."""
        new = self._path.with_name(f".{self._path.name}.new")
        new.unlink(missing_ok=True)
        self._listener.bind(str(new))
        new.chmod(0o600)
        self._listener.listen(BACKLOG)
        new.replace(self._path)
        self._thread.start()

    def close(self) -> None:
        """Stop. The socket's file stays: the next agent replaces it, until then starts fail."""
        self._closed = True
        with suppress(OSError):  # it does not listen
            self._listener.shutdown(socket.SHUT_RDWR)
        if self._thread.ident is not None:
            self._thread.join(PATIENCE)  # not for long: the driver may hang
        self._listener.close()

    def _run(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # it was closed, or no descriptor is left
                if not self._closed:
                    _log.warning("GPUs: %s: cannot accept a connection", self._path)
                    threading.Event().wait(0.1)
                continue
            with connection:
                try:
                    self._serve(connection)
                except OSError as error:
                    _log.warning("GPUs: the hook of a container has gone: %s", error.strerror)

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(PATIENCE)
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        _, uid, _ = struct.unpack("iII", credentials)
        answer = DONE
        try:
            request = _read(connection)
            if uid != 0:
                raise StartRefused(f"a process of user {uid} asks for limits: only root may")
            self._limit(request)
        except StartRefused as error:
            why = printable(str(error))  # it may name a cgroup, as its container has named it
            answer = f"{why}\n"
            _log.error("GPUs: a container does not start: %s", why)
        except OSError:  # the hook has gone, or waits for nothing
            raise
        except Exception:  # noqa: BLE001 - else no container would start again
            answer = "an internal error of podfabric's agent, see its log\n"
            _log.exception("GPUs: a container does not start")
        connection.sendall(answer.encode())

    def _limit(self, request: bytes) -> None:
        """Limit the container's cgroup. Raises StartRefused."""
        name, newline, text = request.partition(b"\n")
        group = name.decode(errors="replace")
        try:
            state = decoding.decode(text, _StartingContainer)
        except msgspec.MsgspecError as error:
            raise StartRefused(
                f"group {group}: the runtime's state of the container: {error}"
            ) from None
        if not newline or state.status not in _STARTING or state.pid <= 0:
            raise StartRefused(
                f"group {group}: the container is {state.status} with process {state.pid}: its "
                "limits are set before it starts, by a hook createRuntime"
            )
        try:
            limits = self._groups.read(group).limits
        except (GroupError, OSError) as error:
            raise StartRefused(f"group {group}: has no limits: {error}") from None
        driver = self._driver()
        if driver is None:
            raise StartRefused(f"group {group}: NVIDIA's driver does not answer the agent")
        try:
            cgroup = kernel_tier.cgroup_of(state.pid, self._cgroups)
            container = processes.container_in(f"0::/{cgroup.relative_to(self._cgroups)}")
            # A hook that was given up waits no more, and its process' number may be another's now.
            if container is None or container.id != state.id:
                raise StartRefused(
                    f"group {group}: process {state.pid} is in {cgroup}, which is not container "
                    f"{state.id}'s: this runtime starts hooks before it has made the container's "
                    "cgroup"
                )
            backend = kernel_tier.limit(driver, cgroup, limits)
        except KernelTierError as error:
            raise StartRefused(f"group {group}: {error}") from None
        where = printable(str(cgroup))
        _log.info("GPUs: %s: limits are kept by the driver (%s) in %s", group, backend, where)


def _read(connection: socket.socket) -> bytes:
    """The request. Raises StartRefused and OSError."""
    parts: list[bytes] = []
    length = 0
    while part := connection.recv(65536):
        parts.append(part)
        length += len(part)
        if length > MOST:
            raise StartRefused(f"the runtime's state of the container has more than {MOST} bytes")
    return b"".join(parts)
