"""A program that uses verbs, and Soft-RoCE devices for it.

In the guest: `python -m tests.kernel.verbs DEVICE` makes a Soft-RoCE device, and
`python -m tests.kernel.verbs DEVICE OTHER` two that reach each other.
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


def make(device: str, *other: str) -> str:
    """Make a Soft-RoCE device on a new interface, and return the interface's name.

    With an `other` device the two interfaces are the ends of a cable, which transports packets
    between their link-local addresses. The kernel would not send to another address of its own.
    """
    netdev = f"{device}-net"
    run("/sbin/modprobe", "rdma_rxe")
    end = ("peer", "name", f"{other[0]}-net") if other else ()
    run(IP, "link", "add", netdev, "type", "veth" if other else "dummy", *end)
    for name in (device, *other):
        run(IP, "link", "set", f"{name}-net", "up", *(("mtu", "4500") if other else ()))
    for name in (device, *other):
        run(RDMA, "link", "add", name, "type", "rxe", "netdev", f"{name}-net")
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
    make(*sys.argv[1:])
