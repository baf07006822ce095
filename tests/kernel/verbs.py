"""A program that uses verbs, and Soft-RoCE devices for it.

In the guest: `python -m tests.kernel.verbs DEVICE` makes a Soft-RoCE device.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.kernel.igb import RDMA
from tests.kernel.pods import IP, run
from tools.compiling import CHECKOUT, compiled

DRIVER = "/etc/libibverbs.d/rxe.driver"
SOURCE = CHECKOUT / "tests/kernel/hold_objects.c"


def program() -> Path:
    """hold_objects.c, compiled."""
    flags = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror"]
    built = CHECKOUT / "build/verbs" / os.uname().machine / "hold_objects"
    return compiled(["gcc", *flags, str(SOURCE), "-libverbs"], built, [SOURCE])


def make(device: str) -> str:
    """Make a Soft-RoCE device on a new interface, and return the interface's name."""
    netdev = f"{device}-net"
    run("/sbin/modprobe", "rdma_rxe")
    run(IP, "link", "add", netdev, "type", "dummy")
    run(IP, "link", "set", netdev, "up")
    run(RDMA, "link", "add", device, "type", "rxe", "netdev", netdev)
    return netdev


@contextmanager
def soft_roce(device: str) -> Iterator[None]:
    """A Soft-RoCE device on a new interface, for the block."""
    netdev = make(device)
    try:
        yield
    finally:
        run(IP, "link", "delete", netdev)  # the device goes too


if __name__ == "__main__":
    make(sys.argv[1])
