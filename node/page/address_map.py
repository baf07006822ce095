"""Draws the addresses of attachments as maps: one for each network, with a cell for each address.

A cell covers several addresses if the network's used part has more than CELLS addresses.
"""

from collections.abc import Sequence
from contextlib import suppress
from xml.etree.ElementTree import Element

from base import address_text
from node.page.feed import Nodes
from node.page.markup import tag

CELLS = 256
_COLUMNS, _SIDE = 32, 10  # cells in a row; units of the drawing
_MOST_MAPS = 24
_MOST_TITLES = 4  # pods that a cell names


def drawn(nodes: Nodes) -> Sequence[Element]:
    """The maps of the networks in which pods hold the most addresses."""
    networks: dict[str, dict[int, str]] = {}
    for name, status in nodes:
        for one in status.attachments:
            for written in one.addresses:
                with suppress(ValueError):  # a foreign node's text
                    found = address_text.network(written)
                    held = networks.setdefault(str(found.cidr), {})
                    held[int(found.ip)] = f"{found.ip} {one.pod} {one.interface} {name}"
    largest = sorted(networks.items(), key=lambda item: (-len(item[1]), item[0]))
    maps = [_map(network, held) for network, held in largest[:_MOST_MAPS]]
    if len(largest) > _MOST_MAPS:
        maps.append(tag("p", f"{len(largest) - _MOST_MAPS} networks with fewer addresses."))
    return maps


def _map(network: str, held: dict[int, str]) -> Element:
    """The smallest CIDR block that contains all held addresses, in at most CELLS cells."""
    net = address_text.network(network)
    most = (128 if net.version == 6 else 32) - net.prefixlen
    bits = min(max((min(held) ^ max(held)).bit_length(), 5), most)
    first = min(held) >> bits << bits
    per_cell = max(1, (1 << bits) // CELLS)
    cells = [tag("rect", class_="free", width=str(_SIDE * _COLUMNS), height=str(_height(bits)))]
    titles: dict[int, list[str]] = {}
    for address in sorted(held):
        titles.setdefault((address - first) // per_cell, []).append(held[address])
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
    part = f"{label}. The map begins at {net.cidr.ip + (first - int(net.cidr.ip))}"
    each = f", each cell is {per_cell} addresses." if per_cell > 1 else ", each cell is an address."
    return tag("figure", drawing, tag("figcaption", part + each))


def _height(bits: int) -> int:
    return max(1, min(1 << bits, CELLS) // _COLUMNS) * _SIDE
