"""The drawing of `podfabric topo`: NUMA nodes, host bridges, switches and devices as nested boxes.

In the box of a GPU are its holders. The same topology with the same holders gives the same bytes.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import zip_longest
from textwrap import wrap

import msgspec

from cli.gpu_parts import GpuPart, bytes_text
from cli.node_gpus import NodeGPUs
from cli.topo_picture import Picture, TopologyDevice

# Pixels.
_CHARACTER = 7.3  # of the 12 px monospace font, at most
_LINE = 16
_PAD = 12
_GAP = 10
_TITLE = 24
_HEAD = 52

_MOST_HOLDERS = 12  # of a GPU; a pool of replicas may have thousands
_LONGEST = 44  # characters of a holder's name
_WIDEST = 80  # characters of a line of a note

_STYLE = """\
text { font: 12px ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace; fill: #1f2933 }
text.title { font-weight: bold } text.head { font-size: 16px; font-weight: bold }
rect { stroke-width: 1.2 }
.page { fill: #ffffff } .numa { fill: #f5f7fa; stroke: #7b8794 }
.bridge { fill: #e8edf3; stroke: #9aa5b1 } .switch { fill: #fdf6e3; stroke: #c9a227 }
.gpu { fill: #e3f4e1; stroke: #3f9142 } .hca { fill: #e1effa; stroke: #2b6cb0 }
.down { fill: #f8e0e0; stroke: #c0392b; stroke-dasharray: 4 3 }"""


class _Box(msgspec.Struct):
    """A box with a title line and boxes inside, or with lines of text only."""

    style: str
    lines: tuple[str, ...]
    inside: list["_Box"] = []
    columns: int = 2
    width: float = 0.0
    height: float = 0.0


def drawing(picture: Picture, held: NodeGPUs) -> str:
    """The whole SVG document. `held` says who holds what of the GPUs."""
    gpus = sum(device.kind == "gpu" for device in picture.devices)
    head = f"PCIe topology: {gpus} GPUs, {len(picture.devices) - gpus} HCAs"
    shown = {device.address for device in picture.devices}
    holders = {gpu.address: _holders(gpu.held) for gpu in held.gpus}
    # Parts of no GPU in the picture: chosen at the start, or the GPU is gone.
    others = [part for gpu in held.gpus if gpu.address not in shown for part in gpu.held]
    left = [
        _Box("numa", (title, *_holders(parts)))
        for title, parts in (
            ("held, and the GPU is chosen at the start", held.unbound),
            ("held, and the GPU is gone", others),
        )
        if parts
    ]
    notes = [_Box("numa", tuple(wrap(note, _WIDEST))) for note in held.notes]
    page = _Box("page", (), [*_numa_nodes(picture.devices, holders), *left, *notes])
    _measure(page)
    width = max(page.width, len(head) * 10 + 2 * _PAD)
    height = page.height + _HEAD
    shapes = [
        f'<rect class="page" width="{width:g}" height="{height:g}"/>',
        f'<text class="head" x="{_PAD}" y="24">{escape(head)}</text>',
        *_key(),
        *_placed(page, 0, _HEAD - _PAD),
    ]
    if not page.inside:
        shapes.append(f'<text x="{_PAD}" y="{_HEAD + 16}">no GPU and no HCA was found</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" role="img">\n'
        f"<title>{escape(head)}</title>\n<style>\n{_STYLE}\n</style>\n"
        + "\n".join(shapes)
        + "\n</svg>\n"
    )


def _key() -> Iterator[str]:
    x = float(_PAD)
    for style, text in (("gpu", "GPU"), ("hca", "HCA"), ("down", "HCA without a working port")):
        yield f'<rect class="{style}" x="{x:g}" y="33" width="12" height="12" rx="2"/>'
        yield f'<text x="{x + 17:g}" y="43">{text}</text>'
        x += 17 + len(text) * _CHARACTER + 16


def _holders(parts: Iterable[GpuPart]) -> list[str]:
    """A line for each: "ml/trainer main: 20 GiB, 50%"."""
    lines = []
    for part in parts:
        name = f"{part.container.pod or 'not known'} {part.container.name}".strip()
        name = name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"
        memory = bytes_text(part.memory_bytes) if part.memory_bytes else "all"
        share = f", {part.compute_share:.0%}" if part.compute_share else ""
        lines.append(f"{name}: {memory}{share}")
    more = len(lines) - _MOST_HOLDERS
    return [*lines[:_MOST_HOLDERS], *([f"and {more} more"] if more > 0 else [])]


def _numa_nodes(
    devices: Sequence[TopologyDevice], holders: Mapping[str, Sequence[str]]
) -> list[_Box]:
    by_numa: dict[int | None, list[TopologyDevice]] = {}
    for device in devices:
        by_numa.setdefault(device.numa, []).append(device)
    order = sorted(by_numa, key=lambda numa: (numa is None, numa or 0))
    return [
        _Box(
            "numa",
            (f"NUMA node {numa}" if numa is not None else "NUMA node unknown",),
            _bridges(by_numa[numa], holders),
        )
        for numa in order
    ]


def _bridges(devices: Sequence[TopologyDevice], holders: Mapping[str, Sequence[str]]) -> list[_Box]:
    by_bridge: dict[str, list[TopologyDevice]] = {}
    for device in devices:
        by_bridge.setdefault(device.bridge, []).append(device)
    return [
        _Box(
            "bridge",
            (f"host bridge {bridge}" if bridge else "position unknown",),
            _below(by_bridge[bridge], 0, holders),
        )
        for bridge in sorted(by_bridge)
    ]


def _below(
    devices: Sequence[TopologyDevice], level: int, holders: Mapping[str, Sequence[str]]
) -> list[_Box]:
    """The switches at that level with everything below them, then the devices without one."""
    switches: dict[str, list[TopologyDevice]] = {}
    here: list[TopologyDevice] = []
    for device in devices:
        if len(device.switches) > level:
            switches.setdefault(device.switches[level], []).append(device)
        else:
            here.append(device)
    boxes = [
        _Box("switch", (f"switch {switch}",), _below(switches[switch], level + 1, holders))
        for switch in sorted(switches)
    ]
    gpus = [
        _device(device, holders.get(device.address, ())) for device in here if device.kind == "gpu"
    ]
    hcas = [_device(device) for device in here if device.kind == "hca"]
    rows = zip_longest(gpus, hcas)  # a GPU and an HCA side by side as long as there are both
    return [*boxes, *(box for row in rows for box in row if box is not None)]


def _device(device: TopologyDevice, holders: Sequence[str] = ()) -> _Box:
    style = device.kind if device.working else "down"
    netdevs = ", ".join(device.netdevs)
    lines = (device.label, device.address, netdevs if device.kind == "hca" else device.uuid[:12])
    return _Box(style, tuple(line for line in (*lines, *holders) if line))


def _measure(box: _Box) -> None:
    text = max((len(line) for line in box.lines), default=0) * _CHARACTER + 2 * _PAD
    if not box.inside:
        box.width = max(text, 130)
        box.height = len(box.lines) * _LINE + _PAD
        return
    for inner in box.inside:
        _measure(inner)
    widths, heights = _grid(box)
    title = _TITLE if box.lines else 0
    box.width = max(text, sum(widths) + _GAP * (len(widths) - 1) + 2 * _PAD)
    box.height = sum(heights) + _GAP * (len(heights) - 1) + 2 * _PAD + title


def _grid(box: _Box) -> tuple[list[float], list[float]]:
    """Widths of the columns, heights of the rows."""
    columns = min(box.columns, len(box.inside))
    widths = [max(inner.width for inner in box.inside[at::columns]) for at in range(columns)]
    rows = [box.inside[at : at + columns] for at in range(0, len(box.inside), columns)]
    return widths, [max(inner.height for inner in row) for row in rows]


def _placed(box: _Box, x: float, y: float) -> Iterator[str]:
    """The shapes of a box and of everything in it, the outer boxes first."""
    if box.lines:
        yield (
            f'<rect class="{box.style}" x="{x:g}" y="{y:g}" width="{box.width:g}" '
            f'height="{box.height:g}" rx="6"/>'
        )
    for number, line in enumerate(box.lines):
        kind = ' class="title"' if number == 0 else ""
        at = y + _LINE * (number + 1) + 1
        yield f'<text{kind} x="{x + _PAD:g}" y="{at:g}">{escape(line)}</text>'
    if not box.inside:
        return
    widths, heights = _grid(box)
    top = y + _PAD + (_TITLE if box.lines else 0)
    for row, height in enumerate(heights):
        left = x + _PAD
        for inner, width in zip(box.inside[row * len(widths) :], widths, strict=False):
            inner.width, inner.height = width, height  # align the boxes of a row and of a column
            yield from _placed(inner, left, top)
            left += width + _GAP
        top += height + _GAP
