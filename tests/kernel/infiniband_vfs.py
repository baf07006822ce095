"""InfiniBand VFs: the functions of one SR-IOV card, bound to ibloop's driver."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from base.paths import Paths
from host.sysfs import pci
from tests.kernel import cards, igb
from tests.kernel.cards import DEVICES, Card
from tests.kernel.pods import INFINIBAND, IP, knob, run

DRIVER = "ibloop"
PARAMETERS = Path("/sys/module/ibloop/parameters")
VOLATILE = (" address", " broadcast")  # of IPoIB: each binding makes a new queue pair


@contextmanager
def with_infiniband_vfs(number: int) -> Iterator[Card]:
    """The card of `make`, for the block."""
    before = cards.driver_of(_address())
    try:
        yield make(number)
    finally:
        remove(before)


def make(number: int) -> Card:
    """A PF with that many VFs, each with an HCA and an IPoIB interface. The PF is up.

    The VFs have their own GUIDs, which the PF does not know until it sets some.
    """
    address = _address()
    take(address)
    card = Card(address, cards.await_netdev(address))
    # Otherwise igbvf, which knows their IDs, would be bound to the VFs.
    (DEVICES / address / "sriov_drivers_autoprobe").write_text("0")
    (DEVICES / address / "sriov_numvfs").write_text(str(number))
    vfs = tuple(function.address for function in pci.vfs(Paths(), address))
    for vf in vfs:
        take(vf)
        cards.await_netdev(vf)
    run(IP, "link", "set", card.pf, "up")
    igb.await_carrier(card.pf)
    return card._replace(vfs=vfs)


def remove(driver: str) -> None:
    """Remove all or part of the work of `make`; the PF goes to `driver`, "" for none."""
    address = _address()
    (DEVICES / address / "sriov_numvfs").write_text("0")
    (DEVICES / address / "sriov_drivers_autoprobe").write_text("1")
    igb.unbind(address)
    (DEVICES / address / "driver_override").write_text("\n")
    if driver:
        igb.bind(address, driver)
        cards.await_netdev(address)


def are_made() -> bool:
    """Whether `make` has bound the PF."""
    return cards.driver_of(_address()) == DRIVER


def _address() -> str:
    """The PCI address of the last card's PF."""
    return max(path.parent.name for path in DEVICES.glob("*/sriov_totalvfs"))


def take(function: str) -> None:
    """Bind a function to ibloop's driver."""
    (DEVICES / function / "driver_override").write_text(DRIVER)
    if cards.driver_of(function):
        igb.unbind(function)
    Path("/sys/bus/pci/drivers_probe").write_text(function)


def rebind(vf: str) -> None:
    """Bind the VF's driver again, as an administrator does after setting its GUIDs."""
    igb.unbind(vf)
    igb.bind(vf, DRIVER)
    cards.await_netdev(vf)


def set_guids(card: Card, index: int, node: str, port: str) -> None:
    """Let the PF set a VF's GUIDs, one at a time, because the kernel accepts one per command."""
    for kind, guid in (("node_guid", node), ("port_guid", port)):
        run(IP, "link", "set", card.pf, "vf", str(index), kind, guid)


def rdma_device(function: str) -> str:
    """The name of a function's RDMA device."""
    (name,) = pci.rdma_of(Paths(), function)
    return name


def hca_number(function: str) -> int:
    """The number in the name of a function's RDMA device, as `pods.knob` takes it."""
    return int(rdma_device(function).removeprefix("ibloop"))


def node_guid(function: str) -> str:
    """The node GUID of a function's RDMA device, as ip(8) writes it."""
    digits = (INFINIBAND / rdma_device(function) / "node_guid").read_text().replace(":", "")
    return bytes.fromhex(digits).hex(":")


def port_state(function: str) -> str:
    """ "ACTIVE" or "DOWN"."""
    state = (INFINIBAND / rdma_device(function) / "ports/1/state").read_text()
    return state.split()[1]


def plug(function: str, *, connected: bool) -> None:
    """Connect or disconnect the cable of a function's port."""
    knob(hca_number(function), "port").write_text("up" if connected else "down")


@contextmanager
def new_vfs_have_no_guid() -> Iterator[None]:
    """VFs that are bound in the block have GUIDs of all FF, unless their PF sets their GUIDs."""
    (PARAMETERS / "vf_guids").write_text("N")
    try:
        yield
    finally:
        (PARAMETERS / "vf_guids").write_text("Y")


@contextmanager
def partitioned(pkeys: Mapping[str, int]) -> Iterator[None]:
    """Let the subnet manager give ports with these GUIDs their P_Keys, for the block."""
    members = PARAMETERS / "members"
    for guid, pkey in pkeys.items():
        members.write_text(f"{guid.replace(':', '')} {pkey:x}")
    try:
        yield
    finally:
        for guid in pkeys:
            members.write_text(f"{guid.replace(':', '')} 0")


def state(card: Card) -> dict[str, str]:
    """All state that must be restored: `cards.snapshot`, and each VF's GUIDs, port and uverbs
    device."""
    settings = {
        key: value
        for key, value in cards.snapshot().items()
        if not (key.startswith("ib") and key.endswith(VOLATILE))
    }
    for function in (card.address, *card.vfs):
        rdma, netdev = rdma_device(function), cards.netdev_of(function)
        address = Path("/sys/class/net", netdev, "address").read_text().strip()
        settings |= {
            f"{function} RDMA": rdma,
            f"{function} uverbs": pci.uverbs_of(Paths(), rdma),
            f"{function} node GUID": node_guid(function),
            f"{function} port GUID": address[-23:],
            f"{function} port": port_state(function),
        }
    return settings
