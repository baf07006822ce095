"""The unix sockets of pools, each with a name that is never used again.

Two instances with the same name would unlink each other's socket, and the kubelet would drop the
resource. So a name contains the process id and a random part, and a file is removed only while it
is the one that was made.
"""

import os
import re
import secrets
import stat
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import grpc

from base import files
from base.unix_socket import is_served

MAX_PATH = 107  # bytes: sockaddr_un has 108, with the final NUL (unix(7))
MAX_RECEIVE = 64 << 20  # bytes: GetPreferredAllocation lists every free id
_PAUSE = 0.05  # seconds between two looks for calls that came while the server ended
HALF_MADE = 10.0  # seconds after which a socket without its final name is a leftover

_ANY = re.compile(r"\.?podfabric-.+\.sock")


class SocketError(Exception):
    """A socket cannot be made. The text names it and says why and what to do."""


def remove_leftovers(directory: Path) -> list[Path]:
    """Remove and return the sockets of this program on which no process listens.

    The process ids in the names do not help: plugins in two pods share the directory, but not the
    pid namespace.
    """
    removed = []
    for path in _names(directory):
        if not _ANY.fullmatch(path.name) or is_served(path):
            continue
        with suppress(OSError):
            status = path.stat(follow_symlinks=False)
            half_made = path.name.startswith(".") and time.time() - status.st_mtime < HALF_MADE
            if stat.S_ISSOCK(status.st_mode) and not half_made:
                path.unlink()
                removed.append(path)
    return removed


class Listener:
    """A gRPC server on its own socket, until `close`.

    `serve` adds the service to the server. The file gets its final name when it
    has mode 0600 and the server runs. Raises SocketError, FileNotFoundError (no directory).
    """

    def __init__(
        self,
        directory: Path,
        resource: str,
        serve: Callable[[grpc.Server], object],
        threads: int,
    ) -> None:
        self.path = _fresh(directory, resource)
        hidden = self.path.with_name(f".{self.path.name}")
        if not directory.is_dir():
            raise FileNotFoundError(directory)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=f"kubelet-{resource}")
        self._server = grpc.server(
            self._pool,
            options=(
                ("grpc.max_receive_message_length", MAX_RECEIVE),
                ("grpc.so_reuseport", 0),
            ),
        )
        serve(self._server)
        try:
            self._server.add_insecure_port(f"unix:{hidden}")
            hidden.chmod(0o600)
            self._server.start()
            # gRPC unlinks the name that it bound, even if another process made a file there since.
            # So it binds a name that is not used afterwards, and this class removes the other.
            hidden.rename(self.path)
        except (OSError, RuntimeError) as error:
            self._end(0)
            with suppress(OSError):
                hidden.unlink()
            raise SocketError(f"{self.path}: cannot listen: {_reason(error)}") from None
        self._made = files.version(self.path)

    @property
    def exists(self) -> bool:
        """The file is still the one that this listener made."""
        return len(self._made) > 1 and files.version(self.path) == self._made

    def close(self, end_calls: Callable[[], object], grace: float = 10.0) -> None:
        """End the server. May be called again.

        `end_calls` ends the running calls that would last; they all have `grace` seconds. It is
        called until none runs: a call may come until the server takes no more.
        """
        if self.exists:
            with suppress(OSError):
                self.path.unlink()
        self._made = ()
        self._end(grace, end_calls)

    def _end(self, grace: float, end_calls: Callable[[], object] = lambda: None) -> None:
        stopped = self._server.stop(grace)
        deadline = time.monotonic() + grace + 5
        end_calls()
        while not stopped.wait(_PAUSE) and time.monotonic() < deadline:
            end_calls()
        self._pool.shutdown(wait=False, cancel_futures=True)


def _names(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []


def _fresh(directory: Path, resource: str) -> Path:
    tail = f"-{os.getpid()}-{secrets.token_hex(4)}.sock"
    path = directory / f"podfabric-{resource.replace('/', '_')}{tail}"
    length = len(os.fsencode(path)) + 1  # the hidden name has one more dot
    if length > MAX_PATH:
        raise SocketError(
            f"{path}: a unix socket's path has at most {MAX_PATH} bytes, this one {length}: "
            f"shorten the resource's name by {length - MAX_PATH} bytes, or the kubelet's root "
            "directory"
        )
    return path


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.strerror}: look at the directory's owner and mode"
    return f"{' '.join(str(error).split())}: look at the directory's owner and mode"
