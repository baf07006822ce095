"""Reads distances between PCI devices from sysfs, in the classes of nvidia-smi(1).

GPUDirect RDMA works up to the distance PXB (NCCL_NET_GDR_LEVEL). A virtual machine hides the
topology of the host.

Sources: `nvidia-smi topo -m`, legend; NCCL src/graph/{topo,paths}.cc; the kernel's
Documentation/ABI/testing/sysfs-bus-pci.
"""

import enum
import re
from collections.abc import Iterable
from itertools import pairwise, takewhile

import msgspec

from base.paths import Paths
from host.sysfs import attribute_files, pci

_BRIDGE = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_BDF = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]")
# Broadcom PEX switches of generation 4 and 5: one chip appears as two levels (getBcmGen).
_TWO_LEVELS = frozenset(((0x1000, 0xC010), (0x1000, 0xC030)))


class Distance(enum.IntEnum):
    """The distance classes of nvidia-smi."""

    SAME = 0  # "X": the device itself, or another function of the same card
    PIX = 1  # at most one PCIe switch between them
    PXB = 2  # several switches, but not the host bridge
    PHB = 3  # one host bridge
    NODE = 4  # host bridges of one NUMA node
    SYS = 5  # different NUMA nodes, or unknown


class PciLocation(msgspec.Struct, frozen=True, kw_only=True):
    """The place of a device on the PCI bus. VFs and SFs have the place of their PF."""

    address: str
    bridge: str  # the host bridge, "pci0000:17"
    # Addresses from the root port to the function, which is last. The ports above the function are
    # in pairs: a root or downstream port, then the upstream port below that port.
    chain: tuple[str, ...]
    numa: int | None
    # Upstream ports in `chain` that form one switch with the upstream port above.
    flat: frozenset[str]


class Topology:
    """The locations of some devices at one moment, and the distances between the devices."""

    def __init__(self, locations: Iterable[PciLocation]) -> None:
        self._locations = {location.address: location for location in locations}
        self._distances: dict[tuple[str, str], Distance] = {}

    @classmethod
    def read(cls, paths: Paths, addresses: Iterable[str]) -> "Topology":
        """Read the locations of these addresses: "0000:3b:00.0" or "mlx5_core.sf.4"."""
        locations = (_location(paths, address) for address in addresses)
        return cls(location for location in locations if location is not None)

    def location(self, address: str) -> PciLocation | None:
        return self._locations.get(address)

    def distance(self, a: str, b: str) -> Distance:
        """The distance between two devices; SYS if the location of either device is unknown."""
        distance = self._distances.get((a, b))
        if distance is None:
            first, second = self._locations.get(a), self._locations.get(b)
            distance = _distance(first, second) if first and second else Distance.SYS
            self._distances[a, b] = self._distances[b, a] = distance
        return distance

    def switch(self, address: str) -> str:
        """The switch of a device, which all devices at distance PIX share; "" if unknown."""
        location = self._locations.get(address)
        if location is None:
            return ""
        if len(location.chain) == 1:
            return _card(location.chain[0])
        at = max(len(location.chain) - 3, 0)
        while at >= 2 and location.chain[at] in location.flat:
            at -= 2
        return location.chain[at]


def _distance(a: PciLocation, b: PciLocation) -> Distance:
    if _card(a.chain[-1]) == _card(b.chain[-1]):
        return Distance.SAME
    if a.bridge != b.bridge:
        return Distance.NODE if a.numa == b.numa is not None else Distance.SYS
    pairs = zip(a.chain[:-1], b.chain[:-1], strict=False)
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    if common == 0:
        return Distance.PHB
    levels = max(_levels(a, common), _levels(b, common))
    return Distance.PIX if levels <= 1 else Distance.PXB


def _levels(location: PciLocation, common: int) -> int:
    """The number of switches on a device's path, below its first `common` functions."""
    below = location.chain[common:-1]
    return (len(below) + 1) // 2 - sum(port in location.flat for port in below)


def _card(address: str) -> str:
    return address.rpartition(".")[0]


def _location(paths: Paths, address: str) -> PciLocation | None:
    bdf = pci.canonical(address)
    if bdf is None:
        return None
    functions = f"{paths.sys}/bus/pci/devices"
    kind = "pci" if ":" in bdf else "auxiliary"
    device = f"{paths.sys}/bus/{kind}/devices/{bdf}"
    physical = attribute_files.target(f"{device}/physfn")
    # The link's text suffices; realpath(3) would read each directory of the path.
    bridge, chain = _chain(attribute_files.link(f"{functions}/{physical or bdf}"))
    if not bridge:
        bridge, chain = _chain(attribute_files.link(device))
    if not bridge:
        return None
    return PciLocation(
        address=address,
        bridge=bridge,
        chain=chain,
        numa=attribute_files.numa_node(device, f"{functions}/{chain[-1]}"),
        flat=_flat({port: _ids(paths, port) for port in chain[:-1]}, chain),
    )


def _chain(link: str) -> tuple[str, tuple[str, ...]]:
    """The host bridge, and the functions on the path to a device; for an SF, the path to its PF.

    A VMD is a PCI function with a second host bridge below it. The outer host bridge counts, and
    the chain starts below the VMD. So devices below different root ports of the VMD have distance
    PHB.
    """
    bridge = ""
    chain: list[str] = []
    for part in link.split("/"):
        if _BRIDGE.fullmatch(part):
            bridge = bridge or part
            chain = []
        elif bridge and _BDF.fullmatch(part):
            chain.append(part)
    return (bridge, tuple(chain)) if chain else ("", ())


def _flat(ids: dict[str, tuple[int, int]], chain: tuple[str, ...]) -> frozenset[str]:
    """The upstream ports of the same switch chip as the next upstream port to the host bridge."""
    upstream = chain[-3::-2][::-1]
    return frozenset(
        below
        for above, below in pairwise(upstream)
        if ids.get(below) in _TWO_LEVELS and ids.get(above) == ids.get(below)
    )


def _ids(paths: Paths, address: str) -> tuple[int, int]:
    at = f"{paths.sys}/bus/pci/devices/{address}"
    vendor = attribute_files.number(f"{at}/vendor")
    return vendor or 0, attribute_files.number(f"{at}/device") or 0
