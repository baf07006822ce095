"""How far PCI devices are from each other, by sysfs alone, in the classes of nvidia-smi(1).

GPUDirect RDMA works up to PXB (NCCL_NET_GDR_LEVEL): being on one NUMA node is not enough.
A virtual machine shows its devices side by side whatever the machine below is like, so a file
can say it instead: /etc/podfabric/topology.xml, in the format of NCCL_TOPO_FILE.

Sources: `nvidia-smi topo -m`, legend; NCCL src/graph/{xml,topo,paths}.cc; the kernel's
Documentation/ABI/testing/sysfs-bus-pci.
"""

import enum
import re
from collections.abc import Iterable
from itertools import pairwise, takewhile
from pathlib import Path
from xml.etree import ElementTree

import msgspec

from base.paths import Paths
from host import pci, sysfs
from host.errors import HostError

_BRIDGE = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_BDF = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]")
# Broadcom PEX switches of generation 4 and 5: one chip shows itself as two levels (getBcmGen).
_TWO_LEVELS = frozenset(((0x1000, 0xC010), (0x1000, 0xC030)))


class Distance(enum.IntEnum):
    """nvidia-smi's classes; SAME is its X, the device itself or another function of the card."""

    SAME = 0
    PIX = 1  # at most one PCIe switch between them
    PXB = 2  # several, but not the host bridge
    PHB = 3  # one host bridge
    NODE = 4  # host bridges of one NUMA node
    SYS = 5  # NUMA nodes, or not known


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a device is. A VF and an SF are where their PF is."""

    address: str
    bridge: str  # the host bridge, "pci0000:17"; "cpu 0" from the file
    chain: tuple[str, ...]  # addresses from the root port to the function, which is last
    numa: int | None
    # The ports on the way, in pairs: a root or downstream port, the upstream port below it. The
    # chain, as a rule; the file names switches only, so the ports above those are made up.
    ports: tuple[str, ...]
    flat: frozenset[str]  # those of `ports` that count as one with the switch above


class Topology:
    """A snapshot of where some devices are."""

    def __init__(self, places: Iterable[Place]) -> None:
        self._places = {place.address: place for place in places}
        self._distances: dict[tuple[str, str], Distance] = {}

    @classmethod
    def read(cls, paths: Paths, addresses: Iterable[str]) -> "Topology":
        """The places of these addresses, "0000:3b:00.0" or "mlx5_core.sf.4"; others have none.

        Those that the file names are where it says. HostError if there is one that is wrong.
        """
        given = _override(topology_file(paths))
        places = (_place(paths, address, given) for address in addresses)
        return cls(place for place in places if place is not None)

    def place(self, address: str) -> Place | None:
        """Where a device is; None if it is not known."""
        return self._places.get(address)

    def distance(self, a: str, b: str) -> Distance:
        """The class of the way between two devices; SYS if either's place is not known."""
        known = self._distances.get((a, b))
        if known is None:
            here, there = self._places.get(a), self._places.get(b)
            known = _distance(here, there) if here and there else Distance.SYS
            self._distances[a, b] = self._distances[b, a] = known
        return known

    def switch(self, address: str) -> str:
        """What a device hangs on: the same for those at PIX of each other, "" if not known.

        The address of the switch' upstream port, or the root port, or the device's own card.
        """
        place = self._places.get(address)
        if place is None:
            return ""
        if len(place.ports) == 1:
            return _card(place.ports[0])
        at = max(len(place.ports) - 3, 0)
        while at >= 2 and place.ports[at] in place.flat:
            at -= 2
        return place.ports[at]


def topology_file(paths: Paths) -> Path:
    """The file that says it for a virtual machine, which need not be there."""
    return paths.etc / "topology.xml"


def _distance(a: Place, b: Place) -> Distance:
    if _card(a.chain[-1]) == _card(b.chain[-1]):
        return Distance.SAME
    if a.bridge != b.bridge:
        return Distance.NODE if a.numa == b.numa is not None else Distance.SYS
    pairs = zip(a.ports[:-1], b.ports[:-1], strict=False)
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    if common == 0:
        return Distance.PHB
    levels = max(_levels(a, common), _levels(b, common))
    return Distance.PIX if levels <= 1 else Distance.PXB


def _levels(place: Place, common: int) -> int:
    """Switches from the last common port on, its own included, on the way to a device."""
    below = place.ports[common:-1]
    return (len(below) + 1) // 2 - sum(port in place.flat for port in below)


def _card(address: str) -> str:
    return address.rpartition(".")[0]


def _place(paths: Paths, address: str, given: dict[str, Place]) -> Place | None:
    found = pci.canonical(address)
    if found is None:
        return None
    functions = f"{paths.sys}/bus/pci/devices"
    kind = "pci" if ":" in found else "auxiliary"
    device = f"{paths.sys}/bus/{kind}/devices/{found}"
    physical = sysfs.target(f"{device}/physfn")
    # A link's own words: no look at each directory on the way, as realpath(3) has.
    bridge, chain = _chain(sysfs.link(f"{functions}/{physical or found}"))
    if not bridge:
        bridge, chain = _chain(sysfs.link(device))
    pf = chain[-1] if chain else ""
    # NCCL names a card with several functions by its first.
    for name in (found, pf, f"{_card(pf)}.0"):
        if name in given:
            return msgspec.structs.replace(given[name], address=address)
    if not bridge:
        return None
    return Place(
        address=address,
        bridge=bridge,
        chain=chain,
        numa=_numa(device, f"{functions}/{pf}"),
        ports=chain,
        flat=_flat({port: _ids(paths, port) for port in chain[:-1]}, chain),
    )


def _chain(link: str) -> tuple[str, tuple[str, ...]]:
    """Host bridge and functions of a device's directory; of an SF those of its PF.

    Below a VMD there is a host bridge of its own: it hangs on no switch, and its root ports are
    at PHB of each other and of everything on the bridge that the VMD is on.
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


def _flat(ids: dict[str, tuple[int, int]], ports: tuple[str, ...]) -> frozenset[str]:
    """Upstream ports of those switches that are the second level of the chip above."""
    upstream = ports[-3::-2][::-1]
    return frozenset(
        below
        for above, below in pairwise(upstream)
        if ids.get(below) in _TWO_LEVELS and ids.get(above) == ids.get(below)
    )


def _ids(paths: Paths, address: str) -> tuple[int, int]:
    at = f"{paths.sys}/bus/pci/devices/{address}"
    return (_hexadecimal(sysfs.text(f"{at}/vendor")), _hexadecimal(sysfs.text(f"{at}/device")))


def _numa(*devices: str) -> int | None:
    """The node of the first device that has one; -1 is the kernel's "unknown"."""
    found = (sysfs.decimal(f"{device}/numa_node") for device in devices)
    return next((numa for numa in found if numa is not None), None)


class _Builder(ElementTree.TreeBuilder):
    def doctype(self, name: str, public: str | None, system: str | None) -> None:
        raise ValueError("it has a DOCTYPE, which could define entities: remove it")


def _override(path: Path) -> dict[str, Place]:
    """The places in a file of NCCL's format, by address; {} if there is none."""
    what = f"cannot use {path}, the topology in NCCL's XML format"
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise HostError(f"{what}: {error.strerror}") from None
    try:
        root = ElementTree.fromstring(content, ElementTree.XMLParser(target=_Builder()))
        if root.tag != "system":
            raise ValueError(f"its outermost element is <{root.tag}>, not <system>")
        places: dict[str, Place] = {}
        for cpu in root.iter("cpu"):
            for element in cpu.findall("pci"):
                _read_pci(element, cpu.get("numaid", ""), (), {}, places)
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        raise HostError(f"{what}: {error}; correct it or remove it") from None
    return places


def _read_pci(
    element: ElementTree.Element,
    numa: str,
    above: tuple[str, ...],
    ids: dict[str, tuple[int, int]],
    places: dict[str, Place],
) -> None:
    text = element.get("busid", "")
    address = pci.canonical(text)
    if address is None or ":" not in address:
        raise ValueError(f'busid="{text}" of a <pci> is no PCI address such as "0000:3b:00.0"')
    if address in places:
        raise ValueError(f"there are two <pci> of {address}")
    ids = ids | {
        address: (
            _hexadecimal(element.get("vendor", "")),
            _hexadecimal(element.get("device", "")),
        )
    }
    ports = (*above, f"above {address}", address) if above or len(element.findall("pci")) else ()
    ports = ports or (address,)
    places[address] = Place(
        address=address,
        bridge=f"cpu {numa}",
        chain=tuple(port for port in ports if " " not in port),
        numa=int(numa) if numa.isdecimal() else None,
        ports=ports,
        flat=_flat(ids, ports),
    )
    for below in element.findall("pci"):
        _read_pci(below, numa, ports, ids, places)


def _hexadecimal(text: str) -> int:
    try:
        return int(text, 16)
    except ValueError:
        return 0
