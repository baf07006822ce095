"""Runs a part of a test in a child process with mounts of its own, which end with it."""

import ctypes
import os
import traceback
from collections.abc import Callable

_CLONE_NEWNS = 0x20000
_MS_REC, _MS_PRIVATE = 16384, 1 << 18


def with_own_mounts(act: Callable[[], object]) -> None:
    """Run `act` in a mount namespace. What it raises fails the test; its mounts end with it."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            enter()
            act()
            status = 0
        except BaseException:  # noqa: BLE001 - the child must not return into pytest
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, "failed with mounts of its own: see above"


def enter() -> None:
    """Give this process mounts of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) or libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
