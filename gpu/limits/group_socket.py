"""The socket of a group, at which its processes register, and who they are by the kernel's word."""

import errno
import logging
import os
import socket
import struct
import time
from contextlib import suppress
from pathlib import Path

from gpu.limits import processes

BACKLOG = 512  # more than the slots of a group: none that may register is refused by the kernel
BURST = 1024.0  # clients of a group after a quiet time
PATIENCE = 30.0  # seconds for a request: a client may be slow, too, where a node has much to do
_SO_PEERPIDFD = 77  # asm-generic/socket.h; Linux 6.5

_log = logging.getLogger(__name__)


class GroupSocket:
    """The socket of a group, and how many clients it may have."""

    def __init__(self, group: str, opened: socket.socket) -> None:
        self.group = group
        self.socket = opened
        self.accepting = False
        self.clients = 0
        self.budget = BURST


class Registrant:
    """A connection whose request has not come yet."""

    def __init__(self, listener: GroupSocket, peer: socket.socket) -> None:
        self.listener = listener
        self.socket = peer
        self.deadline = time.monotonic() + PATIENCE
        self.awaited = False  # its request has not come, and the kernel tells when it does


def peer(connection: socket.socket) -> tuple[int, int] | None:
    """The pid and a pidfd of the process that connected; None if it has ended, or is not seen."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, _, _ = struct.unpack("iII", credentials)
    if pid <= 0:
        _log.error(
            "GPUs: a process connected that this agent cannot see: run the agent in the host's pid "
            "namespace (hostPID)"
        )
        return None
    try:
        return pid, connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:  # it has ended
            return None
        pidfd = processes.pidfd_of(pid)  # Linux before 6.5
        return (pid, pidfd) if pidfd is not None else None


def listen(directory: Path) -> socket.socket:
    """A socket that listens as agent.sock, in place of an earlier agent's. Raises OSError."""
    parent = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        with suppress(FileNotFoundError):
            os.unlink(".new", dir_fd=parent)
        # A socket's address has 107 bytes at most, and a group's directory may be longer.
        address = f"/proc/self/fd/{parent}/.new"
        listener.bind(address)
        os.chmod(address, 0o666)  # noqa: PTH101 - the container's user may be any
        listener.listen(BACKLOG)
        listener.setblocking(False)
        os.replace(".new", "agent.sock", src_dir_fd=parent, dst_dir_fd=parent)
    except BaseException:
        listener.close()
        raise
    finally:
        os.close(parent)
    return listener
