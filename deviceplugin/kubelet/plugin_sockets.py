"""The unix sockets of pools, each with a name that is never used again.

Two instances with the same socket name would unlink each other's socket, and the kubelet would drop
the resource. So a name contains the process id and a random part.
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
MAX_RECEIVE = 64 << 20  # bytes; GetPreferredAllocation lists every free id
_PAUSE = 0.05  # seconds between checks for calls that came while the server ended
HALF_MADE = 10.0  # seconds after which a socket without its final name is a leftover

_ANY = re.compile(r"\.?podfabric-.+\.sock")


class SocketError(Exception):
    """The plugin cannot make a socket. The text names the socket, the reason and the remedy."""


def remove_leftovers(directory: Path) -> list[Path]:
    """Remove and return this program's sockets on which no process listens."""
    removed = []
    try:
        paths = sorted(directory.iterdir())
    except OSError:
        return []
    for path in paths:
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
    """A gRPC server on its own socket, until `close`. `serve` adds the service to the server.

    Raises SocketError, or FileNotFoundError if the directory is missing.
    """

    def __init__(
        self, directory: Path, resource: str, serve: Callable[[grpc.Server], object], threads: int
    ) -> None:
        self.path = _fresh(directory, resource)
        hidden = self.path.with_name(f".{self.path.name}")
        if not directory.is_dir():
            raise FileNotFoundError(directory)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=f"kubelet-{resource}")
        self._server = grpc.server(
            self._pool,
            options=(("grpc.max_receive_message_length", MAX_RECEIVE), ("grpc.so_reuseport", 0)),
        )
        serve(self._server)
        try:
            self._server.add_insecure_port(f"unix:{hidden}")
            hidden.chmod(0o600)
            self._server.start()
            # At its end, gRPC unlinks the name that it bound, even if another process has made a
            # file there. So gRPC binds a hidden name, and this class removes the final name.
            hidden.rename(self.path)
        except (OSError, RuntimeError) as error:
            self._end(0)
            with suppress(OSError):
                hidden.unlink()
            reason = getattr(error, "strerror", None) or " ".join(str(error).split())
            raise SocketError(
                f"{self.path}: cannot listen: {reason}: check the directory's owner and mode"
            ) from None
        self._made = files.version(self.path)

    @property
    def exists(self) -> bool:
        """Whether the socket file is still the file that this listener made."""
        return len(self._made) > 1 and files.version(self.path) == self._made

    def close(self, end_calls: Callable[[], object], grace: float = 10.0) -> None:
        """End the server. Running calls have `grace` seconds to finish. May be called again.

        Repeats `end_calls`, because new calls may come until the server has stopped.
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


def _fresh(directory: Path, resource: str) -> Path:
    tail = f"-{os.getpid()}-{secrets.token_hex(4)}.sock"
    path = directory / f"podfabric-{resource.replace('/', '_')}{tail}"
    length = len(os.fsencode(path)) + 1  # the hidden name has one more dot
    if length > MAX_PATH:
        raise SocketError(
            f"{path}: the path of a unix socket has at most {MAX_PATH} bytes, but this path has "
            f"{length}: shorten the resource's name, or the path of the kubelet's directory, by "
            f"{length - MAX_PATH} bytes"
        )
    return path
