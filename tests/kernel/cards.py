"""The machine's two igb PFs: their VFs, and all state that an attachment must not change."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from base.paths import Paths
from host.sysfs import pci
from tests.kernel.pods import IP, run
from tests.waiting import until

DEVICES = Path("/sys/bus/pci/devices")
# igbvf shows the address of its last reset as the permanent one. A move removes the queueing
# discipline, and the next up sets the default one.
VOLATILE = (
    "ifindex",
    "stats",
    "stats64",
    "operstate",
    "link_index",
    "permaddr",
    "qdisc",
)
SET_BY_USERS = {"UP", "PROMISC", "ALLMULTI", "NOARP", "MULTICAST", "DYNAMIC"}  # of the flags


class Card(NamedTuple):
    """A PF and its VFs."""

    address: str
    pf: str  # its interface
    vfs: tuple[str, ...] = ()  # PCI addresses

    def netdev(self, index: int) -> str:
        """The interface of a VF while it is on the host."""
        return netdev_of(self.vfs[index])


def cards() -> list[Card]:
    """Both PFs, up, with their present VFs."""
    subprocess.run(["/sbin/modprobe", "--all", "igb", "igbvf"], check=True)
    addresses = sorted(path.name for path in Path("/sys/bus/pci/drivers/igb").glob("0*"))
    cards = [Card(address, netdev_of(address)) for address in addresses]
    for card in cards:
        run(IP, "link", "set", card.pf, "up")
    return cards


@contextmanager
def with_vfs(card: Card, number: int) -> Iterator[Card]:
    """The card with that many VFs, for the block."""
    try:
        yield make_vfs(card, number)
    finally:
        remove_vfs(card)


def make_vfs(card: Card, number: int) -> Card:
    """The card with that many VFs, each with an interface."""
    remove_vfs(card)
    (DEVICES / card.address / "sriov_numvfs").write_text(str(number))
    vfs = tuple(function.address for function in pci.vfs(Paths(), card.address))
    assert len(vfs) == number
    for vf in vfs:
        await_netdev(vf)
    return card._replace(vfs=vfs)


def remove_vfs(card: Card) -> None:
    """Remove all VFs of the card."""
    (DEVICES / card.address / "sriov_numvfs").write_text("0")


def netdev_of(address: str) -> str:
    """The interface of a function on the host, or ""."""
    directory = DEVICES / address / "net"
    return next((path.name for path in directory.iterdir()), "") if directory.exists() else ""


def await_netdev(address: str) -> str:
    """Wait until a function's driver has made its interface; returns the interface."""
    return until(lambda: netdev_of(address), what=f"interface of {address}")


def driver_of(address: str) -> str:
    """The driver that a function is bound to, or ""."""
    link = DEVICES / address / "driver"
    return link.readlink().name if link.exists() else ""


@contextmanager
def at_vfio(address: str, *, back: bool = True) -> Iterator[None]:
    """Bind a VF to vfio-pci; after the block, if `back`, to its own driver under its old name."""
    subprocess.run(["/sbin/modprobe", "vfio-pci"], check=True)
    own, name = driver_of(address), netdev_of(address)
    _bind(address, "vfio-pci")
    try:
        yield
    finally:
        if back:
            _bind(address, own)
            made = await_netdev(address)
            if made != name:
                run(IP, "link", "set", made, "name", name)


def setting(address: str, name: str) -> Any:  # noqa: ANN401 - any JSON value
    """A setting of a VF at its PF, by the name that ip(8) uses."""
    pf = (DEVICES / address / "physfn").resolve()
    index = next(i for i in range(8) if (pf / f"virtfn{i}").resolve().name == address)
    return shown(netdev_of(pf.name), index).get(name)


def shown(pf: str, index: int) -> dict[str, Any]:
    """A VF as `ip link` shows it at its PF."""
    (link,) = json.loads(run(IP, "-d", "-j", "link", "show", pf))
    shown: dict[str, Any] = link["vfinfo_list"][index]
    return shown


def snapshot() -> dict[str, str]:
    """All state that must be restored: interfaces with their settings, drivers, RDMA devices."""
    settings: dict[str, str] = {}
    for link in json.loads(run(IP, "-d", "-j", "link", "show")):
        vfs = link.pop("vfinfo_list", [])
        kept = {key: value for key, value in link.items() if key not in VOLATILE}
        kept["flags"] = sorted(SET_BY_USERS & set(link["flags"]))
        kept["altnames"] = sorted(link.get("altnames", ()))
        settings |= {f"{link['ifname']} {key}": str(value) for key, value in kept.items()}
        for vf in vfs:
            at = f"{link['ifname']} VF {vf['vf']}"
            settings |= {f"{at} {key}": str(value) for key, value in vf.items() if key != "stats"}
    for pf in DEVICES.glob("*/sriov_numvfs"):
        for vf in pci.vfs(Paths(), pf.parent.name):
            settings[vf.address] = f"{vf.driver} {netdev_of(vf.address)}"
    for device in json.loads(run("/usr/bin/rdma", "-j", "dev")):
        settings[f"RDMA device {device['ifname']}"] = "on the host"
    return settings


def rdma_mode() -> str:
    """ "shared" or "exclusive"."""
    return "shared" if "shared" in run("/usr/bin/rdma", "system", "show") else "exclusive"


def _bind(address: str, driver: str) -> None:
    function = pci.find(Paths(), address)
    assert function is not None
    pci.unbind(Paths(), function)
    unbound = pci.find(Paths(), address)
    assert unbound is not None
    pci.bind(Paths(), unbound, driver)
