"""Unix sockets that only root can open."""

import errno
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path


def listen(path: Path, backlog: int) -> socket.socket:
    """Listen at `path`. Replaces the socket file of a dead process.

    Raises OSError, with EADDRINUSE if a process listens there or the file is not a socket. The
    caller must prevent two calls for one path at the same time, because both may succeed.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode) or is_served(path):
            remedy = f"end the process that `fuser {path}` shows; if there is none, delete the file"
            text = f"{os.strerror(errno.EADDRINUSE)} ({remedy})"
            raise OSError(errno.EADDRINUSE, text, str(path))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    temporary = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)
        os.fchmod(listener.fileno(), 0o600)  # bind(2) gives this mode to the file
        listener.bind(str(temporary))
        listener.listen(backlog)
        temporary.replace(path)
    except BaseException:
        listener.close()
        raise
    return listener


def is_served(path: Path) -> bool:
    """Whether a process listens on the stream socket `path`."""
    with socket.socket(socket.AF_UNIX) as client:
        client.setblocking(False)
        try:
            client.connect(str(path))
        except BlockingIOError:  # the socket's backlog is full
            return True
        except OSError:
            return False
    return True
