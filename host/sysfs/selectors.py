"""Selects HCAs for a pool of the device plugin, or for a rule of the policy.

A selector matches if one value of each of its keys matches. A list of selectors matches if one
selector matches. The keys are those of the SR-IOV network device plugin, `ifNames` of the Mellanox
plugin, and our own `rdmaDevices`.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec

from base import documents
from base.documents import DocumentError
from host.sysfs import pci
from host.sysfs.discovery import HCA

LINK_TYPES = {"Ethernet": "ether", "InfiniBand": "infiniband"}  # of a port, of a netdev


class Selector(msgspec.Struct, frozen=True, kw_only=True):
    vendors: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    drivers: tuple[str, ...] = ()
    pciAddresses: tuple[str, ...] = ()
    pfNames: tuple[str, ...] = ()  # "ens2f0#0-3,5"
    rootDevices: tuple[str, ...] = ()  # "0000:86:00.0#0-3,5"
    ifNames: tuple[str, ...] = ()
    linkTypes: tuple[str, ...] = ()  # "ether", "infiniband"
    pKeys: tuple[str, ...] = ()  # "0x8001": the first entry of the table
    acpiIndexes: tuple[str, ...] = ()
    auxTypes: tuple[str, ...] = ()  # "sf"
    rdmaDevices: tuple[str, ...] = ()  # "mlx5_0"
    isRdma: bool = False


OWN: Mapping[str, str] = {key: key for key in Selector.__struct_fields__}
"""The spelling of the keys in our own configuration file."""

_RANGE = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")
_PCI_ID = re.compile(r"(?:0x)?([0-9a-f]{4})", re.IGNORECASE)
_PKEY = re.compile(r"0x[0-9a-f]{1,4}", re.IGNORECASE)


def parse(
    value: object, where: str, spelling: Mapping[str, str] = OWN, *, loose: bool = False
) -> Selector:
    """Read a selector. `spelling` maps the file's keys to our keys. Raises DocumentError."""
    shapes = {
        written: bool if key == "isRdma" else tuple[str, ...] for written, key in spelling.items()
    }
    fields = documents.fields(value, shapes, where, loose=loose)
    checked = {}
    for written, values in fields.items():
        key = spelling[written]
        if values == () and not loose:
            raise DocumentError(f"{where}.{written}: is empty and selects nothing: remove the key")
        if key == "isRdma":
            checked[key] = values
            continue
        checked[key] = tuple(
            _checked(_KEYS[key].check, text, f"{where}.{written}[{index}]")
            for index, text in enumerate(values)
        )
    return Selector(**checked)


def match(selectors: Sequence[Selector], hca: HCA) -> Selector | None:
    """The first selector that matches the HCA.

    If there are no selectors, returns an empty selector, because every HCA matches.
    """
    if not selectors:
        return Selector()
    return next((selector for selector in selectors if _objection(selector, hca) is None), None)


def why_not(selectors: Sequence[Selector], hca: HCA) -> str | None:
    """Why no selector matches: "driver is igb, not one of mlx5_core"; `None` if one matches."""
    if match(selectors, hca) is not None:
        return None
    objections = [_objection(selector, hca) for selector in selectors]
    if len(objections) == 1:
        return objections[0]
    return "; ".join(f"selector {number}: {text}" for number, text in enumerate(objections))


def names(selector: Selector) -> bool:
    """Whether the selector names single HCAs, instead of all HCAs of a kind or of a PF."""
    return bool(selector.pciAddresses or selector.ifNames or selector.rdmaDevices)


def ranges(text: str) -> tuple[str, frozenset[int] | None]:
    """Split "ens2f0#0-2" into ("ens2f0", {0, 1, 2}), "ens2f0" into ("ens2f0", `None`)."""
    name, mark, indexes = text.partition("#")
    if not name:
        raise ValueError("a name is missing before the #")
    return name, _indexes(indexes) if mark else None


def _objection(selector: Selector, hca: HCA) -> str | None:
    return next(_objections(selector, hca), None)


def _objections(selector: Selector, hca: HCA) -> Iterator[str]:
    """The reasons why the selector does not match, in the order of the SR-IOV plugin's checks."""
    for key, (_, what, values) in _KEYS.items():
        if values is not None and (wanted := getattr(selector, key)):
            actual = values(hca)
            if not any(value in wanted for value in actual):
                yield _differs(what, actual, wanted)
    is_pf = hca.pf == ""
    names = hca.netdevs if is_pf else hca.pf_netdevs
    root = (hca.address if is_pf else hca.pf,)
    above = ((selector.pfNames, names, "PF"), (selector.rootDevices, root, "root device"))
    for wanted, actual, what in above:
        if wanted and not any(_within(text, actual, hca) for text in wanted):
            suffix = "" if hca.index is None else f"#{hca.index}"
            yield _differs(what, tuple(f"{name}{suffix}" for name in actual if name), wanted)
    if selector.pKeys:
        first = _first_pkeys(hca)
        if not {int(text, 16) for text in selector.pKeys}.intersection(first):
            yield _differs("first P_Key", tuple(f"{pkey:#06x}" for pkey in first), selector.pKeys)
    if selector.isRdma and not hca.rdma_names:
        yield "it has no RDMA device"


def _differs(what: str, actual: Sequence[str], wanted: Sequence[str]) -> str:
    return (
        f"{what} is {', '.join(filter(None, actual)) or 'unknown'}, not one of {', '.join(wanted)}"
    )


def _within(wanted: str, above: Sequence[str], hca: HCA) -> bool:
    name, indexes = _ranges(wanted)
    return name in above and (indexes is None or hca.index in indexes)


def _link_types(hca: HCA) -> tuple[str, ...]:
    if hca.link_types:
        return hca.link_types
    layers = {port.link_layer for rdma in hca.rdma for port in rdma.ports}
    return tuple(sorted(LINK_TYPES.get(layer, layer) for layer in layers))


def _first_pkeys(hca: HCA) -> tuple[int, ...]:
    return tuple(
        port.pkeys[0]
        for rdma in hca.rdma
        for port in rdma.ports
        if port.link_layer == "InfiniBand" and port.pkeys
    )


def _checked(check: Callable[[str], str], text: str, where: str) -> str:
    try:
        return check(text)
    except ValueError as error:
        raise DocumentError(f"{where}: {documents.shown(text)}: {error}") from None


def _text(text: str) -> str:
    if not text or text != text.strip():
        raise ValueError("is empty, or begins or ends with a blank: write a text without blanks")
    return text


def _pci_id(text: str) -> str:
    matched = _PCI_ID.fullmatch(text)
    if matched is None:
        raise ValueError('write four hexadecimal digits, such as "15b3"')
    return matched[1].lower()


def _pkey(text: str) -> str:
    if not _PKEY.fullmatch(text) or not int(text, 16) & 0x7FFF:
        raise ValueError('write a P_Key as sysfs does, such as "0x8001"')
    return f"{int(text, 16):#06x}"


def _address(text: str) -> str:
    address = pci.canonical(text)
    if address is None:
        raise ValueError('write an address such as "0000:3b:00.1" or "mlx5_core.sf.4"')
    return address


def _link_type(text: str) -> str:
    if text.lower() not in LINK_TYPES.values():
        raise ValueError(f"expected one of {', '.join(LINK_TYPES.values())}")
    return text.lower()


def _aux_type(text: str) -> str:
    if text != "sf":
        raise ValueError("sf is the only supported auxiliary type: remove all other entries")
    return text


def _pf_name(text: str) -> str:
    name, _ = ranges(text)
    if re.search(r"[][*?()^$|\\+{}\s/]", name):
        raise ValueError("is not an interface name (patterns are not supported): list each name")
    return text


def _root_device(text: str) -> str:
    address, mark, indexes = text.partition("#")
    ranges(text)
    return _address(address) + mark + indexes


def _indexes(text: str) -> frozenset[int]:
    indexes: set[int] = set()
    for part in text.split(","):
        matched = _RANGE.fullmatch(part)
        first = int(matched[1]) if matched else 0
        last = int(matched[2] or first) if matched else -1
        if last < first or last > 0xFFFF:
            raise ValueError(f'"{part}" is not a range of VFs: write for example "ens2f0#0-3,5"')
        indexes.update(range(first, last + 1))
    return frozenset(indexes)


_ranges = lru_cache(maxsize=1024)(ranges)


class _Key(NamedTuple):
    """A key of selectors. `check` raises ValueError for an invalid value."""

    check: Callable[[str], str]
    what: str = ""  # the name of the values in error texts
    values: Callable[[HCA], tuple[str, ...]] | None = None  # an HCA's values to compare


_KEYS: Mapping[str, _Key] = {
    "vendors": _Key(_pci_id, "vendor", lambda hca: (hca.vendor,)),
    "devices": _Key(_pci_id, "device", lambda hca: (hca.device,)),
    "drivers": _Key(_text, "driver", lambda hca: (hca.driver,)),
    "pciAddresses": _Key(_address, "address", lambda hca: (hca.address,)),
    "acpiIndexes": _Key(_text, "ACPI index", lambda hca: (hca.acpi_index,)),
    "ifNames": _Key(_text, "interface", lambda hca: hca.netdevs),
    "linkTypes": _Key(_link_type, "link type", _link_types),
    "auxTypes": _Key(_aux_type, "auxiliary type", lambda hca: (hca.aux_type,)),
    "rdmaDevices": _Key(_text, "RDMA device", lambda hca: hca.rdma_names),
    "pfNames": _Key(_pf_name),
    "rootDevices": _Key(_root_device),
    "pKeys": _Key(_pkey),
}
