"""Processes without the price of an interpreter's start, and their death at a chosen step.

A forked child has every module imported. `killed_at` lets a child die by SIGKILL right before
its n-th action on the kernel or on the disk.
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

from host import announce, namespaces
from host.netlink import NetlinkSocket

Action = Callable[[], object]


def in_processes(actions: Sequence[Action], timeout: float = 300.0) -> list[int]:
    """Run every action in a process of its own, all at once. Answers their exit codes."""
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
    """Run the action in a process that dies before its step-th action (1 is the first).

    Answers False if it came to its end with fewer actions than that.
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
    left = step

    def count() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(owner: Any, name: str) -> None:  # noqa: ANN401 - a module or a class
        original = getattr(owner, name)

        def wrapper(*arguments: Any, **keywords: Any) -> Any:  # noqa: ANN401
            count()
            return original(*arguments, **keywords)

        setattr(owner, name, wrapper)

    for name in ("fsync", "fdatasync", "write", "pwrite", "ftruncate", "unlink", "rename"):
        counted(os, name)
    for name in ("replace", "rename", "unlink", "mkdir", "write_text", "write_bytes"):
        counted(pathlib.Path, name)
    counted(namespaces, "_setns")
    counted(announce, "_send_arp")
    counted(announce, "_send_advertisement")
    counted(NetlinkSocket, "send")

    class Connection(sqlite3.Connection):
        def execute(self, *arguments: Any) -> sqlite3.Cursor:  # noqa: ANN401
            count()
            return super().execute(*arguments)

        def executemany(self, *arguments: Any) -> sqlite3.Cursor:  # noqa: ANN401
            count()
            return super().executemany(*arguments)

    connect = sqlite3.connect
    sqlite3.connect = lambda *a, **k: connect(*a, factory=Connection, **k)  # type: ignore[assignment]
