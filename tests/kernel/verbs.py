"""A program that uses verbs, and Soft-RoCE devices for it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.kernel.igb import RDMA
from tests.kernel.pods import IP, run
from tools.compiling import CHECKOUT, compiled

SOURCE = CHECKOUT / "tests/kernel/hold_objects.c"


def program() -> Path:
    """hold_objects.c, compiled."""
    flags = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror"]
    built = CHECKOUT / "build/verbs" / os.uname().machine / "hold_objects"
    return compiled(["gcc", *flags, str(SOURCE), "-libverbs"], built, [SOURCE])


@contextmanager
def soft_roce(device: str) -> Iterator[None]:
    """A Soft-RoCE device on a new interface, for the block."""
    netdev = f"{device}-net"
    run("/sbin/modprobe", "rdma_rxe")
    run(IP, "link", "add", netdev, "type", "dummy")
    try:
        run(IP, "link", "set", netdev, "up")
        run(RDMA, "link", "add", device, "type", "rxe", "netdev", netdev)
        yield
    finally:
        run(IP, "link", "delete", netdev)  # the device goes too
