"""Runs an act in a child process that is killed at its n-th system call that changes files."""

import os
import signal
from collections.abc import Callable

import pytest

CHANGES = ("pwrite", "replace", "unlink", "mkdir", "rmdir", "fchmod", "ftruncate", "open")


def killed_at(number: int, act: Callable[[], object]) -> bool:
    """Run `act` in a child, killed before its change of that number; False if it made fewer."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            _arm(number)
            act()
            status = 0
        except BaseException as error:  # noqa: BLE001 - the child must not return into pytest
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return True
    assert os.WEXITSTATUS(status) == 0, "the act failed"
    return False


def _arm(number: int) -> None:
    left = number

    def counted(real: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **more: object) -> object:
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **more)

        return call

    patch = pytest.MonkeyPatch()
    for name in CHANGES:
        patch.setattr(os, name, counted(getattr(os, name)))
