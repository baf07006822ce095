"""Draws the addresses of attachments as maps: one for each network, with a cell for each address.

A cell covers several addresses if the network's used part has more than CELLS addresses.
"""

import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple
from xml.etree.ElementTree import Element

from node.fabric_node import AttachmentStatus
from node.page.feed import Nodes
from node.page.markup import tag

CELLS = 256
_COLUMNS, _SIDE = 32, 10  # cells in a row; units of the drawing
_MOST_MAPS = 24
_MOST_TITLES = 4  # pods that a cell names


class MappedNetwork(NamedTuple):
    bits: int  # of an address: 32 or 128
    length: int  # of the prefix
    prefix: int

    def __str__(self) -> str:
        return f"{self.address(self.prefix << (self.bits - self.length))}/{self.length}"

    def address(self, number: int) -> str:
        packed = number.to_bytes(self.bits // 8, "big")
        return socket.inet_ntop(socket.AF_INET if self.bits == 32 else socket.AF_INET6, packed)


Held = dict[int, tuple[AttachmentStatus, str]]  # by address: the attachment, and its node


def drawn(nodes: Nodes) -> Sequence[Element]:
    """The maps of the networks in which pods hold the most addresses."""
    networks: dict[MappedNetwork, Held] = {}
    for name, status in nodes:
        for one in status.attachments:
            for written in one.addresses:
                with suppress(ValueError, OSError):  # a node may write any text
                    network, address = _parsed(written)
                    networks.setdefault(network, {})[address] = one, name
    largest = sorted(networks.items(), key=lambda item: (-len(item[1]), item[0]))
    maps = [_map(network, held) for network, held in largest[:_MOST_MAPS]]
    if len(largest) > _MOST_MAPS:
        maps.append(tag("p", f"{len(largest) - _MOST_MAPS} networks with fewer addresses."))
    return maps


def _parsed(written: str) -> tuple[MappedNetwork, int]:
    """The network and the address of "10.0.0.5/24". Much faster than netaddr, for many nodes."""
    host, _, length = written.partition("/")
    packed = socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)
    bits, address = 8 * len(packed), int.from_bytes(packed, "big")
    return MappedNetwork(bits, int(length), address >> (bits - int(length))), address


def _map(network: MappedNetwork, held: Held) -> Element:
    """Draws a CIDR block that contains all held addresses. The drawing has at most CELLS cells."""
    bits = max((min(held) ^ max(held)).bit_length(), 5)
    bits = min(bits, network.bits - network.length)
    first = min(held) >> bits << bits
    per_cell = max(1, (1 << bits) // CELLS)
    cells = [tag("rect", class_="free", width=str(_SIDE * _COLUMNS), height=str(_height(bits)))]
    titles: dict[int, list[str]] = {}
    for address in sorted(held):
        one, node = held[address]
        title = f"{network.address(address)} {one.pod} {one.interface} {node}"
        titles.setdefault((address - first) // per_cell, []).append(title)
    for cell, texts in titles.items():
        row, column = divmod(cell, _COLUMNS)
        more = [f"and {len(texts) - _MOST_TITLES} more"] if len(texts) > _MOST_TITLES else []
        cells.append(
            tag(
                "rect",
                tag("title", "\n".join([*texts[:_MOST_TITLES], *more])),
                x=str(column * _SIDE),
                y=str(row * _SIDE),
                width=str(_SIDE - 1),
                height=str(_SIDE - 1),
                class_="held",
                fill_opacity=f"{max(0.3, len(texts) / per_cell):.2f}",
            )
        )
    label = f"{network}: {len(held)} addresses are held"
    view = f"0 0 {_SIDE * _COLUMNS} {_height(bits)}"
    drawing = tag("svg", *cells, viewBox=view, role="img", aria_label=label)
    part = f"{label}. The map begins at {network.address(first)}"
    each = f", each cell is {per_cell} addresses." if per_cell > 1 else ", each cell is an address."
    return tag("figure", drawing, tag("figcaption", part + each))


def _height(bits: int) -> int:
    return max(1, min(1 << bits, CELLS) // _COLUMNS) * _SIDE
