"""Runs a part of a test in child processes with separate mounts, which end with them."""

import ctypes
import os
import traceback
from collections.abc import Callable
from pathlib import Path

from host import procfs

_libc = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNS = 0x20000
REC, PRIVATE, SLAVE, SHARED = 16384, 1 << 18, 1 << 19, 1 << 20  # linux/mount.h


def with_own_mounts(act: Callable[[], object]) -> None:
    """Run `act` in a mount namespace that it sees as the host's. An exception fails the test."""

    def host() -> None:
        _enter(PRIVATE)
        _look_at_host("self")
        act()

    _in_child(host)


def in_container(act: Callable[[], object], propagation: int = SLAVE) -> None:
    """Run `act` in a mount namespace below a second one, which it sees as the host's.

    With the propagation SLAVE, as with HostToContainer, it sees the host's later mounts.
    """

    def host() -> None:
        _enter(PRIVATE)
        mount("none", "/", "", REC | SHARED)

        def container() -> None:
            _enter(propagation)
            _look_at_host(str(os.getppid()))
            act()

        _in_child(container)

    _in_child(host)


def mounts_below(root: Path, pid: str = "self") -> list[str]:
    """The mounts below a directory, as a process sees them."""
    lines = procfs.path(f"{pid}/mountinfo").read_text().splitlines()
    points = (line.split()[4] for line in lines)
    return [point.removeprefix(f"{root}/") for point in points if point.startswith(f"{root}/")]


def _in_child(act: Callable[[], object]) -> None:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            act()
            status = 0
        except BaseException:  # noqa: BLE001 - the child must not return into pytest
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, "the child failed: see its standard error"


def _enter(propagation: int) -> None:
    """Give this process a separate mount namespace."""
    if _libc.unshare(_CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    mount("none", "/", "", REC | propagation)


def mount(source: str, target: str, kind: str, flags: int = 0) -> None:
    """mount(2), without options."""
    if _libc.mount(source.encode(), target.encode(), kind.encode(), flags, None) != 0:
        raise OSError(ctypes.get_errno(), "mount", target)


def _look_at_host(pid: str) -> None:
    """Treat that process as the host's first one."""
    proc = Path("/mnt")
    mount("tmpfs", str(proc), "tmpfs")
    (proc / "1").symlink_to(f"/proc/{pid}")
    for name in ("self", "sys"):
        (proc / name).symlink_to(f"/proc/{name}")
    procfs.use(proc)
