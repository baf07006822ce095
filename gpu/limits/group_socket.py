"""The socket of a group, where processes register. The kernel identifies each process."""

import errno
import logging
import os
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from gpu.limits import processes

BACKLOG = 512  # above the number of slots: a process for each slot can wait
BURST = 1024.0  # clients of a group that the agent accepts at once after a pause
PATIENCE = 30.0  # seconds that a client has to send a request
_SO_PEERPIDFD = 77  # asm-generic/socket.h; Linux 6.5

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class GroupSocket:
    group: str
    socket: socket.socket
    accepting: bool = False
    clients: int = 0
    budget: float = BURST  # clients that the agent may accept now


@dataclass(eq=False)
class Registrant:
    """A client that has sent no request yet."""

    listener: GroupSocket
    socket: socket.socket
    deadline: float = field(default_factory=lambda: time.monotonic() + PATIENCE)
    awaited: bool = False  # epoll watches the socket


def peer(connection: socket.socket) -> tuple[int, int] | None:
    """The pid and a pidfd of the connected process; `None` if it has ended or is not visible."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, _, _ = struct.unpack("iII", credentials)
    if pid <= 0:
        _log.error(
            "GPUs: the agent cannot see a process that connected: run the agent in the host's pid "
            "namespace (hostPID)"
        )
        return None
    try:
        return pid, connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:  # the process has ended
            return None
        pidfd = processes.pidfd_of(pid)  # Linux before 6.5
        return (pid, pidfd) if pidfd is not None else None


def listen(directory: Path) -> socket.socket:
    """Make agent.sock in `directory`, or replace an earlier agent's socket. Raises OSError."""
    parent = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        with suppress(FileNotFoundError):
            os.unlink(".new", dir_fd=parent)
        # A socket's address has at most 107 bytes; a group's directory may be longer.
        address = f"/proc/self/fd/{parent}/.new"
        listener.bind(address)
        os.chmod(address, 0o666)  # noqa: PTH101 - for any user of the container
        listener.listen(BACKLOG)
        listener.setblocking(False)
        os.replace(".new", "agent.sock", src_dir_fd=parent, dst_dir_fd=parent)
    except BaseException:
        listener.close()
        raise
    finally:
        os.close(parent)
    return listener
