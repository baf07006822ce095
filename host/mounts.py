"""Mounts and unmounts (mount(2), umount2(2)), also in the host's mount namespace.

No runtime sees mounts in an agent's container, so the agent mounts in the host's mount namespace.
setns(2) refuses a thread that shares its root and working directory with another thread
(unshare(2), CLONE_FS). The thread cannot move back, so each task runs in a new thread.
"""

import ctypes
import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from host import procfs
from host.namespaces import NetworkNamespace

NOSUID, NODEV, NOEXEC, BIND = 2, 4, 8, 4096  # linux/mount.h, MS_...
_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432  # asm-generic/unistd.h, on all architectures
_CLOEXEC, _CMD_CREATE = 1, 6  # linux/mount.h: FSOPEN_..., FSMOUNT_..., FSCONFIG_...
_RDONLY_NOSUID_NODEV_NOEXEC = 0xF  # linux/mount.h, MOUNT_ATTR_...
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8
_CLONE_FS, _CLONE_NEWNS = 0x200, 0x20000  # linux/sched.h

_libc = ctypes.CDLL(None, use_errno=True)

T = TypeVar("T")


def mount(source: str, target: Path, kind: str, flags: int, options: str = "") -> None:
    """Call mount(2). Raises OSError."""
    encoded = os.fsencode(source), os.fsencode(target), kind.encode(), flags, options.encode()
    _check(_libc.mount(*encoded), str(target))


@contextmanager
def sysfs_of(namespace: NetworkNamespace) -> Iterator[Path]:
    """The sysfs of a network namespace, for the block. Raises OSError or HostError.

    The kernel shows network and RDMA devices of the namespace in which sysfs was mounted. This
    mount is in no mount namespace (fsmount(2), Linux 5.2), so it needs no mount point.
    """
    with namespace.entered():
        context = _system_call(_FSOPEN, b"sysfs", _CLOEXEC)
        try:
            _system_call(_FSCONFIG, context, _CMD_CREATE, None, None, 0)
            mounted = _system_call(_FSMOUNT, context, _CLOEXEC, _RDONLY_NOSUID_NODEV_NOEXEC)
        finally:
            os.close(context)
    try:
        yield Path(f"/proc/self/fd/{mounted}")
    finally:
        os.close(mounted)


def _system_call(number: int, *arguments: object) -> int:
    result: int = _libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"mounting a sysfs: {os.strerror(code)}")
    return result


def unmount(target: Path) -> None:
    """Detach all mounts at `target`, even if processes use them. Raises OSError."""
    while _libc.umount2(os.fsencode(target), _MNT_DETACH | _UMOUNT_NOFOLLOW) == 0:
        pass
    code = ctypes.get_errno()
    if code not in (errno.EINVAL, errno.ENOENT):  # `target` is not a mount point, or does not exist
        raise OSError(code, os.strerror(code), str(target))


def below(directory: Path) -> list[Path]:
    """The mount points below `directory`, the deepest first. Raises OSError."""
    lines = procfs.lines(os.fsdecode(Path("/proc/thread-self/mountinfo").read_bytes()))
    points = {procfs.unescaped(line.split(" ", 5)[4]) for line in lines}
    return [Path(point) for point in sorted(points)[::-1] if point.startswith(f"{directory}/")]


def unmount_below(directory: Path) -> None:
    """Call `unmount` for every mount point below `directory`. Raises OSError."""
    for point in below(directory):
        unmount(point)


def in_host(act: Callable[[], T]) -> T:
    """Call `act` in the host's mount namespace, with the host's root directory. Raises OSError."""
    host = procfs.path("1/ns/mnt")
    try:
        descriptor = os.open(host, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return act()
    try:
        own, other = Path("/proc/thread-self/ns/mnt").stat(), os.fstat(descriptor)
        if (own.st_dev, own.st_ino) == (other.st_dev, other.st_ino):
            return act()
        return _in_thread(descriptor, act)
    finally:
        os.close(descriptor)


def _in_thread(namespace: int, act: Callable[[], T]) -> T:
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            _check(_libc.unshare(_CLONE_FS), "unshare")
            _check(_libc.setns(namespace, _CLONE_NEWNS), "the host's mount namespace")
            results.append(act())
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            errors.append(error)

    thread = threading.Thread(target=run, name="host-mounts", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), what)
