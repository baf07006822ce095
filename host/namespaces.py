"""Opens, finds and enters network namespaces.

A path may later lead to another file. So a namespace is opened once and used by its descriptor.
setns(2) moves only the calling thread. A socket stays in the namespace where it was created.
"""

import ctypes
import errno
import fcntl
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from base.types import NetnsIdentity, NetnsInode
from host import procfs
from host.errors import HostError, NamespaceGone

CLONE_NEWNET = 0x40000000  # linux/sched.h
NS_GET_NSTYPE = 0xB703  # linux/nsfs.h, _IO(0xb7, 3)
SO_NETNS_COOKIE = 71  # asm-generic/socket.h, Linux 5.14

_OWN = "/proc/thread-self/ns/net"

_libc = ctypes.CDLL(None, use_errno=True)


class NetworkNamespace:
    """An open network namespace. As a context manager it closes the descriptor."""

    def __init__(self, descriptor: int, path: str) -> None:
        self.descriptor = descriptor
        self.path = path
        self._identity: NetnsIdentity | None = None
        self.seen_from = ""
        """`where` of the path, if it led to this namespace at `look_at_path`; otherwise ""."""

    @classmethod
    def open(cls, path: str, descriptor: int | None = None) -> "NetworkNamespace":
        """Open the network namespace at `path`, or duplicate `descriptor`.

        Raises NamespaceGone if the path does not lead to a network namespace. Raises HostError if
        the path cannot be opened for another reason (no free descriptor, no permission).
        """
        try:
            # O_NONBLOCK: opening a FIFO at this path would wait
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
            opened = os.open(path, flags) if descriptor is None else os.dup(descriptor)
        except OSError as error:
            kind = NamespaceGone if error.errno in (errno.ENOENT, errno.ENOTDIR) else HostError
            raise kind(f'failed to open netns "{path}": {error.strerror}') from None
        try:
            namespace_type = fcntl.ioctl(opened, NS_GET_NSTYPE)
        except OSError:
            os.close(opened)
            raise NamespaceGone(
                f'failed to open netns "{path}": unknown FS magic: the namespace that was '
                "mounted at this path is gone, and a plain file is left"
            ) from None
        if namespace_type != CLONE_NEWNET:
            os.close(opened)
            raise NamespaceGone(f'failed to open netns "{path}": it is not a network namespace')
        return cls(opened, path)

    @classmethod
    def own(cls) -> "NetworkNamespace":
        """The calling thread's namespace."""
        return cls(os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC), _OWN)

    @property
    def inode(self) -> NetnsInode:
        """The inode number, unique while the namespace exists. The kernel reuses numbers later."""
        return NetnsInode(os.fstat(self.descriptor).st_ino)

    @property
    def identity(self) -> NetnsIdentity:
        """A text that no other namespace of this boot has."""
        if self._identity is not None:
            return self._identity
        with self.entered(), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inside:
            return self.identify_by(inside)

    def identify_by(self, inside: socket.socket) -> NetnsIdentity:
        """The identity, read from a socket inside; before Linux 5.14 only the inode number."""
        try:
            cookie = inside.getsockopt(socket.SOL_SOCKET, SO_NETNS_COOKIE, 8)
        except OSError:
            self._identity = NetnsIdentity(f"inode:{self.inode}")
        else:
            self._identity = NetnsIdentity(f"cookie:{int.from_bytes(cookie, sys.byteorder)}")
        return self._identity

    def look_at_path(self) -> None:
        """Set `seen_from` if the path leads to this namespace. `was_removed` needs `seen_from`."""
        self.seen_from = where(self.path) if self._path_leads_here() else ""

    def was_removed(self) -> bool:
        """Whether the path led to this namespace when `look_at_path` was called, and no longer
        does.
        """
        return self.seen_from != "" and not self._path_leads_here()

    def _path_leads_here(self) -> bool:
        try:
            at_path = os.stat(self.path)  # noqa: PTH116 - a Path costs more than the call
        except OSError:
            return False
        return os.path.samestat(at_path, os.fstat(self.descriptor))

    @classmethod
    def find(cls, identity: str) -> "NetworkNamespace | None":
        """The namespace with that identity, if a visible process is inside.

        Raises HostError if no process is found inside, but some processes cannot be examined.
        """
        seen = set()
        hidden = ""
        for entry in _of_processes():
            try:
                link = entry.readlink()
                if link in seen:
                    continue
                seen.add(link)
                namespace = cls.open(str(entry))
            except (FileNotFoundError, ProcessLookupError, NamespaceGone):
                continue  # the process has ended
            except (OSError, HostError) as error:
                if _exists(entry):  # for a process that has ended the kernel may report EACCES
                    hidden = hidden or f"{entry}: {error}"
                continue
            if namespace.identity == identity:
                return namespace
            os.close(namespace.descriptor)
        if hidden:
            raise HostError(
                "cannot find the processes of a network namespace, because some are unreadable: "
                f"{hidden}: run podfabric as root in the host's PID namespace"
            )
        return None

    @classmethod
    def every(cls) -> "Iterator[NetworkNamespace]":
        """Open every namespace of visible processes or below /run/netns. The caller closes them."""
        seen = set()
        for path in (*Path("/run/netns").glob("*"), *_of_processes()):
            try:
                status = path.stat()
                if (status.st_dev, status.st_ino) in seen:
                    continue
                seen.add((status.st_dev, status.st_ino))
                yield cls.open(str(path))
            except (OSError, HostError):
                continue  # the namespace has gone, or cannot be examined

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Move the calling thread into the namespace during the block."""
        own = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
        try:
            setns(self.descriptor, f'cannot enter netns "{self.path}"')
            try:
                yield
            finally:
                setns(own, "cannot return to the host's network namespace")
        finally:
            os.close(own)

    def __enter__(self) -> "NetworkNamespace":
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self.descriptor)


def _of_processes() -> Iterator[Path]:
    """The namespaces of processes. If a process ends meanwhile, Path.glob would raise."""
    for name in os.listdir(procfs.path()):  # noqa: PTH208
        path = procfs.path(name) / "ns/net"
        if name.isdecimal() and _exists(path):
            yield path


def _exists(path: Path) -> bool:
    """Whether a path exists. Unlike Path.exists, this function never raises, even for ESRCH."""
    return os.path.exists(path)  # noqa: PTH110


def setns(descriptor: int, what: str) -> None:
    """Move the calling thread into a network namespace (setns(2)). Raises HostError."""
    if _libc.setns(descriptor, CLONE_NEWNET) != 0:
        raise HostError(f"{what}: {os.strerror(ctypes.get_errno())}")


def where(path: str) -> str:
    """A text that identifies the calling thread's mount namespace and the path's directory."""
    return f"{view()} {_directory(path)}"


def proves_absence(path: str, seen_from: str) -> bool:
    """Whether a namespace that is missing at `path` here is missing in `seen_from` (`where`), too.

    This is certain in the same mount namespace. Another mount namespace must have the same
    directory without a file at `path`, because the file may be a mount point there.
    """
    mounts, _, directory = seen_from.partition(" ")
    if mounts == view():
        return True
    return (
        directory not in ("", "?") and directory == _directory(path) and not os.path.lexists(path)
    )


def _directory(path: str) -> str:
    try:
        status = os.stat(os.path.dirname(path))  # noqa: PTH116, PTH120
    except OSError:
        return "?"
    return f"{status.st_dev}:{status.st_ino}"


def view() -> str:
    """The calling thread's mount namespace."""
    return os.readlink("/proc/thread-self/ns/mnt")  # noqa: PTH115


class Home:
    """The network namespace of the process. `restore` moves a thread back into the namespace."""

    def __init__(self) -> None:
        self._descriptor = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
        self._inode = os.fstat(self._descriptor).st_ino

    def restore(self) -> bool:
        """Move the calling thread back, if it is in another namespace. Returns False on failure."""
        try:
            if os.stat(_OWN).st_ino != self._inode:  # noqa: PTH116
                setns(self._descriptor, "cannot return to the host's network namespace")
        except (OSError, HostError):
            return False
        return True
