"""Network namespaces: opened once, entered by one thread, always left again.

A path may be replaced under us, so a namespace is a descriptor from the first look on.
setns(2) moves the calling thread only, and a socket stays where it was made.
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
from types import TracebackType

from host.errors import HostError, NamespaceGone

CLONE_NEWNET = 0x40000000  # linux/sched.h
NS_GET_NSTYPE = 0xB703  # linux/nsfs.h, _IO(0xb7, 3)
SO_NETNS_COOKIE = 71  # asm-generic/socket.h, Linux 5.14

_OWN = "/proc/thread-self/ns/net"

_libc = ctypes.CDLL(None, use_errno=True)


class NetworkNamespace:
    """An open network namespace; a context manager that closes it."""

    def __init__(self, descriptor: int, path: str, seen_from: str | None = None) -> None:
        self.descriptor = descriptor
        self.path = path
        if seen_from is None:
            seen_from = view() if self._leads_here() else ""
        self.seen_from = seen_from
        """The view in which the path leads here, "" if it does not in ours (a container's)."""

    @classmethod
    def open(cls, path: str, given: int | None = None) -> "NetworkNamespace":
        """Open CNI_NETNS. Raises NamespaceGone if nothing is there or it is no such namespace.

        Any other reason not to open it (a full table of files, a missing right) proves nothing
        about the namespace, and is a HostError. `given` is a descriptor of it, which stays the
        caller's: then the path need not lead anywhere from here.
        """
        try:
            # O_NONBLOCK: whatever was put at the path must not make us wait
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
            descriptor = os.open(path, flags) if given is None else os.dup(given)
        except OSError as error:
            kind = NamespaceGone if error.errno in (errno.ENOENT, errno.ENOTDIR) else HostError
            raise kind(f'failed to open netns "{path}": {error.strerror}') from None
        try:
            namespace_type = fcntl.ioctl(descriptor, NS_GET_NSTYPE)
        except OSError:
            os.close(descriptor)
            raise NamespaceGone(
                f'failed to open netns "{path}": unknown FS magic, this is a plain file left '
                "where a namespace was mounted"
            ) from None
        if namespace_type != CLONE_NEWNET:
            os.close(descriptor)
            raise NamespaceGone(f'failed to open netns "{path}": a namespace of another type')
        return cls(descriptor, path)

    @classmethod
    def own(cls) -> "NetworkNamespace":
        """The one that the calling thread is in."""
        return cls(os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC), _OWN, seen_from="")

    @property
    def inode(self) -> int:
        """What tells this namespace from others while it is open: the kernel reuses numbers."""
        return os.fstat(self.descriptor).st_ino

    @property
    def identity(self) -> str:
        """What tells this namespace from every other of this boot."""
        with self.entered(), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inside:
            try:
                cookie = inside.getsockopt(socket.SOL_SOCKET, SO_NETNS_COOKIE, 8)
            except OSError:  # before Linux 5.14
                return f"inode:{self.inode}"
        return f"cookie:{int.from_bytes(cookie, sys.byteorder)}"

    def was_removed(self) -> bool:
        """Whether the path has ceased to lead here: the sandbox was torn down under us."""
        return self.seen_from != "" and not self._leads_here()

    def _leads_here(self) -> bool:
        try:
            there = os.stat(self.path)  # noqa: PTH116 - a Path costs more than the call
        except OSError:
            return False
        return os.path.samestat(there, os.fstat(self.descriptor))

    @classmethod
    def find(cls, identity: str) -> "NetworkNamespace | None":
        """The namespace of that identity, if a process that we see still lives in it.

        A namespace outlives its path for as long as anybody is inside. HostError if it was not
        found and there are processes that we may not look into.
        """
        seen = set()
        hidden = ""
        for entry in Path("/proc").glob("[0-9]*/ns/net"):
            try:
                link = entry.readlink()
                if link in seen:
                    continue
                seen.add(link)
                namespace = cls.open(str(entry))
            except (FileNotFoundError, ProcessLookupError, NamespaceGone):
                continue  # the process has ended
            except (OSError, HostError) as error:
                hidden = hidden or f"{entry}: {error}"
                continue
            if namespace.identity == identity:
                return namespace
            os.close(namespace.descriptor)
        if hidden:
            raise HostError(f"cannot tell whether a network namespace still lives ({hidden})")
        return None

    @classmethod
    def every(cls) -> "Iterator[NetworkNamespace]":
        """Each namespace that can be seen, open for the caller to close: processes' and names'.

        Runtimes and ip-netns(8) keep names of namespaces below /run/netns.
        """
        seen = set()
        for path in (*Path("/run/netns").glob("*"), *Path("/proc").glob("[0-9]*/ns/net")):
            try:
                there = path.stat()
                if (there.st_dev, there.st_ino) in seen:
                    continue
                seen.add((there.st_dev, there.st_ino))
                yield cls.open(str(path))
            except (OSError, HostError):
                continue  # gone by now, or not ours to look into

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The calling thread is inside; every way out leads back."""
        own = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _setns(self.descriptor, f'cannot enter netns "{self.path}"')
            try:
                yield
            finally:
                _setns(own, "cannot return to the host's network namespace")
        finally:
            os.close(own)

    def __enter__(self) -> "NetworkNamespace":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self.descriptor)


def _setns(descriptor: int, what: str) -> None:
    if _libc.setns(descriptor, CLONE_NEWNET) != 0:
        raise HostError(f"{what}: {os.strerror(ctypes.get_errno())}")


def view() -> str:
    """What tells one set of mounts from another: in the same one, a path means the same."""
    return os.readlink("/proc/thread-self/ns/mnt")  # noqa: PTH115


class Home:
    """The network namespace that a process works for, and that its threads come back to."""

    def __init__(self) -> None:
        self._descriptor = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
        self._inode = os.fstat(self._descriptor).st_ino

    def bring_back(self) -> bool:
        """Put the calling thread into it if it is elsewhere. False if that cannot be done."""
        try:
            if os.stat(_OWN).st_ino != self._inode:  # noqa: PTH116
                _setns(self._descriptor, "cannot return to the host's network namespace")
        except (OSError, HostError):
            return False
        return True
