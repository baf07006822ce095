"""More helpers for tests of VFs: permanent addresses, InfiniBand on VFs, exclusive RDMA."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tests.kernel import cards
from tests.kernel.cards import DEVICES, Card
from tests.kernel.pods import IP, run
from tests.waiting import until

PARENTS = ("ib0", "ib1")
RDMA = "/usr/bin/rdma"


@contextmanager
def with_addressed_vfs(card: Card, number: int) -> Iterator[Card]:
    """`cards.with_vfs`, after `give_addresses`."""
    with cards.with_vfs(card, number) as made:
        give_addresses(made)
        yield made


def give_addresses(card: Card) -> None:
    """Let the PF give every VF an address, and wait until it has carrier again.

    igb gives none. So igbvf invents an address at each bind, the PF shows it like a set one once
    the VF has been up, and the first carrier takes six seconds.
    """
    for index, vf in enumerate(card.vfs):
        address = f"02:1b:10:01:{card.address[5:7]}:{index:02x}"
        run(IP, "link", "set", card.pf, "vf", str(index), "mac", address)
        (DEVICES / vf / "driver/unbind").write_text(vf)  # the driver asks when it is bound
        Path("/sys/bus/pci/drivers_probe").write_text(vf)
        cards.await_netdev(vf)
    await_carrier(card.pf)


@contextmanager
def ibloop_unloaded() -> Iterator[None]:
    """Unplug all HCAs for the block. Afterwards they are as at the guest's start."""
    _modprobe("--remove", "ibloop")
    try:
        yield
    finally:
        _modprobe("--remove", "ibloop")
        _modprobe("ibloop")
        for parent in PARENTS:
            run(IP, "link", "set", parent, "up")
    for parent in PARENTS:
        await_carrier(parent)


@contextmanager
def with_hcas(*functions: str) -> Iterator[None]:
    """ibloop0 under the first of these PCI functions, ibloop1 under the second, and so on.

    Each has an IPoIB interface, the only interface of a function without a driver.
    """
    with ibloop_unloaded():
        _modprobe("ibloop", f"parents={','.join(functions)}")
        for function in functions:
            until(partial(_has_ipoib, function), what=f"IPoIB interface of {function}")
        yield


@contextmanager
def with_many_hcas(number: int) -> Iterator[None]:
    """That many HCAs of ibloop, whose parents ib0, ib1 and so on are up."""
    with ibloop_unloaded():
        _modprobe("ibloop", f"hcas={number}")
        parents = [f"ib{index}" for index in range(number)]
        for parent in parents:
            run(IP, "link", "set", parent, "up")
        for parent in parents:
            await_carrier(parent)
        yield


@contextmanager
def exclusive_rdma() -> Iterator[None]:
    """Each RDMA device is in one namespace. The kernel refuses this while other namespaces
    exist."""
    _set_rdma("exclusive")
    try:
        yield
    finally:
        _set_rdma("shared")


def _set_rdma(mode: str) -> None:
    """Set the mode, repeatedly, because the kernel removes a deleted namespace a little later."""
    command = [RDMA, "system", "set", "netns", mode]
    until(lambda: not subprocess.run(command, capture_output=True).returncode, what=f"{mode} RDMA")


def await_carrier(interface: str, netns: str = "") -> None:
    """Wait for the carrier of an interface that is up."""
    where = ("-n", netns) if netns else ()
    until(
        lambda: "LOWER_UP" in run(IP, *where, "-brief", "link", "show", interface),
        what=f"carrier of {interface}",
    )


def _has_ipoib(function: str) -> bool:
    return any((path / "pkey").exists() for path in (DEVICES / function / "net").glob("*"))


def _modprobe(*arguments: str) -> None:
    subprocess.run(["/sbin/modprobe", *arguments], check=True)


def unbind(function: str) -> None:
    """Unbind a VF from its driver."""
    (DEVICES / function / "driver/unbind").write_text(function)


def bind(function: str, driver: str) -> None:
    """Bind a VF to a driver."""
    Path(f"/sys/bus/pci/drivers/{driver}/bind").write_text(function)
