"""Network namespaces: opened once, entered by one thread, always left again.

A path may be replaced under us, so a namespace is a descriptor from the first look on.
setns(2) moves the calling thread only, and a socket stays where it was made.
"""

import ctypes
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from host.errors import HostError, NamespaceGone

CLONE_NEWNET = 0x40000000  # linux/sched.h
NS_GET_NSTYPE = 0xB703  # linux/nsfs.h, _IO(0xb7, 3)

_libc = ctypes.CDLL(None, use_errno=True)


class NetworkNamespace:
    """An open network namespace; a context manager that closes it."""

    def __init__(self, descriptor: int, path: str) -> None:
        self.descriptor = descriptor
        self.path = path

    @classmethod
    def open(cls, path: str) -> "NetworkNamespace":
        """Open CNI_NETNS. Raises NamespaceGone if nothing is there or it is no such namespace."""
        try:
            # O_NONBLOCK: whatever was put at the path must not make us wait
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise NamespaceGone(f'failed to open netns "{path}": {error.strerror}') from None
        try:
            kind = fcntl.ioctl(descriptor, NS_GET_NSTYPE)
        except OSError:
            os.close(descriptor)
            raise NamespaceGone(
                f'failed to open netns "{path}": unknown FS magic, this is a plain file left '
                "where a namespace was mounted"
            ) from None
        if kind != CLONE_NEWNET:
            os.close(descriptor)
            raise NamespaceGone(f'failed to open netns "{path}": a namespace of another type')
        return cls(descriptor, path)

    @property
    def inode(self) -> int:
        """What tells this namespace from another while it lives."""
        return os.fstat(self.descriptor).st_ino

    def exists_at_path(self) -> bool:
        """Whether the path still leads here: false once the sandbox was torn down under us."""
        try:
            return Path(self.path).stat().st_ino == self.inode
        except OSError:
            return False

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The calling thread is inside; every way out leads back."""
        own = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
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
