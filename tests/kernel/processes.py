"""Forks processes, which saves the start of an interpreter, and kills them at a chosen step.

A fork saves the start of an interpreter. A forked child has every module imported. `killed_at`
kills a child with SIGKILL directly before its n-th change to the kernel or to the disk.
"""

import os
import pathlib
import signal
import sqlite3
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from pyroute2.netlink import NLM_F_ACK
from pyroute2.netlink.rtnl import RTM_GETADDR, RTM_GETLINK, RTM_GETROUTE

from host import announce, packets
from host.netlink.sockets import HEADER, NetlinkSocket

Action = Callable[[], object]

_QUESTIONS = (RTM_GETLINK, RTM_GETADDR, RTM_GETROUTE)
_LOOKS = ("SELECT", "PRAGMA locking_mode", "PRAGMA synchronous", "PRAGMA cell_size_check")


def in_processes(actions: Sequence[Action], timeout: float = 300.0) -> list[int]:
    """Run every action in a separate process, all at once; returns their exit codes."""
    children = [_fork(action) for action in actions]
    deadline = time.monotonic() + timeout
    codes = []
    for child in children:
        while True:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                codes.append(os.waitstatus_to_exitcode(status))
                break
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.01)
    return codes


def killed_at(step: int, action: Action) -> bool:
    """Run the action in a process that is killed before its change number `step`, from 1.

    Returns False if it ended with fewer changes.
    """

    def dying() -> None:
        _arm(step)
        action()

    (code,) = in_processes([dying])
    assert code in (0, -signal.SIGKILL), f"the process ended with {code}"
    return code != 0


def _fork(action: Action) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        action()
        code = 0
    except BaseException:  # noqa: BLE001 - a forked child must never return into pytest
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _arm(step: int) -> None:
    """Make this process die before its change number `step` to files, database or kernel.

    A read, an fsync or an existing directory does not count: other processes see no difference.
    """
    left = step

    def count() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(owner: Any, name: str, changes: Callable[..., bool] = _always) -> None:  # noqa: ANN401
        original = getattr(owner, name)

        def wrapper(*arguments: Any, **keywords: Any) -> Any:  # noqa: ANN401
            if changes(*arguments, **keywords):
                count()
            return original(*arguments, **keywords)

        setattr(owner, name, wrapper)

    for name in ("write", "pwrite", "ftruncate", "rename", "replace"):
        counted(os, name)
    counted(os, "mkdir", lambda path, *_, **__: not os.path.lexists(path))
    counted(os, "unlink", lambda path, **_: os.path.lexists(path))
    for name in ("write_text", "write_bytes"):
        counted(pathlib.Path, name)
    counted(packets, "send")
    counted(announce, "_send_advertisement")
    counted(NetlinkSocket, "send", lambda _, data, *__: _changes_links(data))

    class Connection(sqlite3.Connection):
        def execute(self, *arguments: Any) -> sqlite3.Cursor:  # noqa: ANN401
            if not arguments[0].lstrip().startswith(_LOOKS):
                count()
            return super().execute(*arguments)

        def executemany(self, *arguments: Any) -> sqlite3.Cursor:  # noqa: ANN401
            count()
            return super().executemany(*arguments)

    connect = sqlite3.connect
    sqlite3.connect = lambda *a, **k: connect(*a, factory=Connection, **k)  # type: ignore[assignment]


def _always(*_: object, **__: object) -> bool:
    return True


def _changes_links(data: bytes) -> bool:
    """Whether one of the netlink messages changes anything, rather than only reading."""
    while data:
        length, kind, flags, _, _ = HEADER.unpack_from(data)
        if kind not in _QUESTIONS or flags & NLM_F_ACK:
            return True
        data = data[(length + 3) & ~3 :]
    return False
