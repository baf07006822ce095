"""Network namespaces: open one, and enter it for a while with the calling thread.

A path may be replaced at any time, so a namespace is opened once and used by its descriptor.
setns(2) moves only the calling thread, and a socket stays in the namespace where it was created.
"""

import ctypes
import errno
import fcntl
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

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
        """`where` the path led here at `look_at_path`; "" if it does not in our mounts."""

    @classmethod
    def open(cls, path: str, descriptor: int | None = None) -> "NetworkNamespace":
        """Open the network namespace at `path`.

        With `descriptor`, that is duplicated instead, and the path need not exist here; the
        caller keeps its own. Raises NamespaceGone if there is nothing at the path, or not a
        network namespace, and HostError if it cannot be opened for another reason (no free
        descriptor, no permission), which says nothing about the namespace.
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
                f'failed to open netns "{path}": unknown FS magic, this is a plain file left '
                "where a namespace was mounted"
            ) from None
        if namespace_type != CLONE_NEWNET:
            os.close(opened)
            raise NamespaceGone(f'failed to open netns "{path}": a namespace of another type')
        return cls(opened, path)

    @classmethod
    def own(cls) -> "NetworkNamespace":
        """The one that the calling thread is in."""
        return cls(os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC), _OWN)

    @property
    def inode(self) -> NetnsInode:
        """Its inode number, unique while it is open. The kernel reuses numbers later."""
        return NetnsInode(os.fstat(self.descriptor).st_ino)

    @property
    def identity(self) -> NetnsIdentity:
        """A text that identifies it among all namespaces of this boot (its cookie)."""
        if self._identity is not None:
            return self._identity
        with self.entered(), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inside:
            return self.identify_by(inside)

    def identify_by(self, inside: socket.socket) -> NetnsIdentity:
        """Its identity, as a socket of the namespace shows it: then no thread has to enter it.

        Only the namespace's number is shown before Linux 5.14.
        """
        try:
            cookie = inside.getsockopt(socket.SOL_SOCKET, SO_NETNS_COOKIE, 8)
        except OSError:
            self._identity = NetnsIdentity(f"inode:{self.inode}")
        else:
            self._identity = NetnsIdentity(f"cookie:{int.from_bytes(cookie, sys.byteorder)}")
        return self._identity

    def look_at_path(self) -> None:
        """Find out whether the path leads here, for `seen_from` and `was_removed`."""
        self.seen_from = where(self.path) if self._path_leads_here() else ""

    def was_removed(self) -> bool:
        """Whether the path no longer leads here, because the runtime removed the sandbox.

        False if it did not lead here at `look_at_path`.
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
        """The namespace with that identity, if a process that we can see is in it.

        A namespace outlives its path while a process is in it. Raises HostError if it was not
        found and some processes may not be examined.
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
                if _exists(entry):  # else the process has ended, which may be told as EACCES
                    hidden = hidden or f"{entry}: {error}"
                continue
            if namespace.identity == identity:
                return namespace
            os.close(namespace.descriptor)
        if hidden:
            raise HostError(f"cannot tell whether a network namespace still exists ({hidden})")
        return None

    @classmethod
    def every(cls) -> "Iterator[NetworkNamespace]":
        """Open every visible namespace: those of processes, and the names below /run/netns.

        Runtimes and ip-netns(8) keep names there. The caller closes the namespaces.
        """
        seen = set()
        for path in (*Path("/run/netns").glob("*"), *_of_processes()):
            try:
                status = path.stat()
                if (status.st_dev, status.st_ino) in seen:
                    continue
                seen.add((status.st_dev, status.st_ino))
                yield cls.open(str(path))
            except (OSError, HostError):
                continue  # it has gone, or may not be examined

    def entered(self) -> AbstractContextManager[None]:
        """The calling thread is in the namespace during the block, and returns in any case."""
        return _Visit(self)

    def __enter__(self) -> "NetworkNamespace":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self.descriptor)


class _Visit:
    """A thread's stay in a namespace."""

    def __init__(self, namespace: NetworkNamespace) -> None:
        self._namespace = namespace
        self._own = -1

    def __enter__(self) -> None:
        self._own = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
        try:
            setns(self._namespace.descriptor, f'cannot enter netns "{self._namespace.path}"')
        except BaseException:
            os.close(self._own)
            raise

    def __exit__(self, *error: object) -> None:
        try:
            setns(self._own, "cannot return to the host's network namespace")
        finally:
            os.close(self._own)


def _of_processes() -> Iterator[Path]:
    """The namespaces of processes, any of which may end at any moment: Path.glob would raise."""
    for name in os.listdir(procfs.path()):  # noqa: PTH208
        path = procfs.path(name) / "ns/net"
        if name.isdecimal() and _exists(path):
            yield path


def _exists(path: Path) -> bool:
    """Unlike Path.exists it raises nothing, also not for ESRCH."""
    return os.path.exists(path)  # noqa: PTH110


def setns(descriptor: int, what: str) -> None:
    """Move the calling thread into a network namespace (setns(2)). Raises HostError."""
    if _libc.setns(descriptor, CLONE_NEWNET) != 0:
        raise HostError(f"{what}: {os.strerror(ctypes.get_errno())}")


def where(path: str) -> str:
    """The mount namespace, and the identity of the path's directory."""
    return f"{view()} {_directory(path)}"


def proves_absence(path: str, seen_from: str) -> bool:
    """Whether a path that leads to no namespace here leads to none where it did (`where`).

    In the same mount namespace it does. In another one, as after the start of another container, it
    does if its directory is the same and has no such name: a runtime unmounts a namespace and then
    removes the file. A file that is there may be mounted upon elsewhere.
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
    """The calling thread's mount namespace: a path means the same in the same one."""
    return os.readlink("/proc/thread-self/ns/mnt")  # noqa: PTH115


class Home:
    """The network namespace that a process works in, to which its threads return."""

    def __init__(self) -> None:
        self._descriptor = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
        self._inode = os.fstat(self._descriptor).st_ino

    def restore(self) -> bool:
        """Move the calling thread back into it if it is elsewhere. False if that fails."""
        try:
            if os.stat(_OWN).st_ino != self._inode:  # noqa: PTH116
                setns(self._descriptor, "cannot return to the host's network namespace")
        except (OSError, HostError):
            return False
        return True
