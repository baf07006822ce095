"""Draws the page: one HTML document that needs no other file and no script.

The parameter `q` of a request filters attachments and refused ADDs, and `node` chooses one node. A
node may write any text and any number of entries into its object. So every list shows only some
entries of each node.
"""

import base64
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, urlencode
from xml.etree.ElementTree import Element, tostring

from node.fabric_node import AttachmentStatus, FabricNodeStatus, HcaStatus, RefusalStatus
from node.page import address_map, picture
from node.page.feed import Nodes
from node.page.markup import Content, lines, table, tag

MOST_ROWS = 500  # of a table
MOST_ROWS_OF_NODE = 200
MOST_NODES = 2000
MOST_LETTERS = 256  # of a filter

_STYLE = Path(__file__).with_name("style.css").read_text()
_SCRIPT = Path(__file__).with_name("script.js").read_text()
_CURES = (
    (
        "no longer has",
        "Add the port's GUID to the partition in the subnet manager's configuration.",
    ),
    ("less than the MTU", "Raise the lower MTU, or create the pod again with a lower MTU."),
    (
        "gone from this node",
        "Cordon the node and delete these pods. Look into dmesg and lspci, then reboot the node or "
        "replace the HCA.",
    ),
    ("degraded", "Check the cable and the switch port: the port is slower than before."),
    ("port ", "Check the cable, the switch port and the subnet manager, then run ibstat."),
    (
        "config.yaml",
        "Correct the chart's value config, or this file without Helm. Until then the previous "
        "settings apply.",
    ),
    ("", "Do what the text says. podfabric doctor checks the node."),
)


def _hash(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


POLICY = (
    f"default-src 'none'; style-src {_hash(_STYLE)}; script-src {_hash(_SCRIPT)}; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)


class Choice(NamedTuple):
    """The filter and the node of a query."""

    words: str = ""  # "ml/worker": rows that contain this text
    node: str = ""

    @classmethod
    def of(cls, query: str) -> "Choice":
        found = parse_qs(query[: 4 * MOST_LETTERS], max_num_fields=8)
        words, node = (found.get(key, [""])[0][:MOST_LETTERS].strip() for key in ("q", "node"))
        return cls(words, node)

    def fits(self, *texts: str) -> bool:
        return not self.words or self.words.lower() in "\n".join(texts).lower()


def document(every: Nodes, query: str = "") -> bytes:
    """The page of these nodes, encoded."""
    choice = Choice.of(query)
    nodes = [(name, status) for name, status in every if choice.node in ("", name)][:MOST_NODES]
    title = nodes[0][0] if len(nodes) == 1 else f"{len(nodes)} nodes"
    page = tag(
        "html",
        tag(
            "head",
            tag("meta", charset="utf-8"),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("title", f"podfabric: {title}"),
            _raw("style", _STYLE),
        ),
        tag(
            "body",
            tag("header", tag("h1", "podfabric"), _form(every, choice)),
            tag("main", *_main(nodes, choice, title), id="main"),
            _raw("script", _SCRIPT),
        ),
        lang="en",
    )
    html: bytes = tostring(page, encoding="utf-8", method="html")
    return b"<!DOCTYPE html>\n" + html


def _raw(name: str, text: str) -> Element:
    made = tag(name)
    made.text = text
    return made


def _form(nodes: Nodes, choice: Choice) -> Element:
    names = [name for name, _ in nodes[:MOST_NODES]]
    options = [tag("option", "all nodes", value="")]
    for name in names:
        chosen = {"selected": ""} if name == choice.node else {}
        options.append(tag("option", name, value=name, **chosen))
    select = tag("label", "Node ", tag("select", *options, name="node"))
    words = tag("input", name="q", type="search", value=choice.words, maxlength=str(MOST_LETTERS))
    return tag(
        "form",
        *([select] if len(names) > 1 else []),
        tag("label", "Pod, namespace, P_Key, HCA or address ", words),
        tag("button", "Filter"),
        tag("span", id="live", role="status"),
        method="get",
        action="/",
    )


def _main(nodes: Nodes, choice: Choice, title: str) -> Iterator[Element]:
    counts = [status.counts for _, status in nodes]
    faults, refused = sum(one.faults for one in counts), sum(one.refusals for one in counts)
    yield tag("h2", title)
    yield tag(
        "p",
        f"{sum(one.hcas for one in counts)} HCAs, {sum(one.active_ports for one in counts)} of "
        f"{sum(one.ports for one in counts)} ports active, {sum(one.gpus for one in counts)} GPUs, "
        f"{sum(one.attachments for one in counts)} attachments, ",
        tag("strong", f"faults: {faults}, refused ADDs: {refused}", class_=_mark(faults + refused)),
    )
    warnings = [f"{name}: {text}" for name, status in nodes for text in status.warnings[:8]]
    yield from (tag("p", text, class_="bad") for text in warnings[:MOST_ROWS])
    yield from _section("faults", "Faults", _faults(nodes))
    yield from _section("refused", "Refused ADDs", _refused(nodes, choice))
    if len(nodes) == 1:
        yield from _section("picture", "The node", picture.drawn(nodes[0][1]))
    yield from _section("hcas", "HCAs", _hcas(nodes, choice))
    yield from _section("pools", "Pools", _pools(nodes))
    yield from _section("gpus", "GPUs", _gpus(nodes))
    yield from _section("gpu-parts", "Parts of GPUs", _gpu_parts(nodes))
    yield from _section("addresses", "Addresses", address_map.drawn(nodes))
    yield from _section("attachments", "Attachments", _attachments(nodes, choice))
    yield from _section("objects", "RDMA objects", _objects(nodes, choice))


def _section(name: str, title: str, content: Sequence[Element]) -> Iterator[Element]:
    if content:
        yield tag("section", tag("h3", title, id=name), *content, aria_labelledby=name)


def _mark(bad: object) -> str:
    return "bad" if bad else "good"


def _faults(nodes: Nodes) -> Sequence[Element]:
    rows = [
        (
            name,
            fault.about,
            tag("span", fault.text, class_="bad"),
            lines(fault.pods),
            fault.since,
            next(cure for word, cure in _CURES if word in f"{fault.about} {fault.text}"),
        )
        for name, status in nodes
        for fault in status.faults
    ]
    return table("Faults", ("Node", "Fault of", "Why", "Pods", "Since", "Cure"), rows, MOST_ROWS)


def _refused(nodes: Nodes, choice: Choice) -> Sequence[Element]:
    def shown(name: str, one: RefusalStatus) -> Sequence[Content]:
        text = tag("span", one.text, class_="bad")
        return name, one.pod, one.interface, one.network, str(one.code), text, one.since

    rows = [
        shown(name, one)
        for name, status in nodes
        for one in status.refusals
        if choice.fits(name, one.pod, one.network, one.text)
    ]
    headers = ("Node", "Pod", "Interface", "Network", "Code", "Why, and what to do", "Since")
    return table("Refused ADDs", headers, rows, MOST_ROWS)


def _hcas(nodes: Nodes, choice: Choice) -> Sequence[Element]:
    """A row for each node, with a box for each HCA."""
    rows: list[Sequence[Content]] = []
    for name, status in nodes:
        boxes = [_box(hca) for hca in status.hcas[:MOST_ROWS_OF_NODE] if not hca.pf]
        query = urlencode({"node": name} | ({"q": choice.words} if choice.words else {}))
        link = tag("a", name, href=f"/?{query}")
        rows.append((link, tag("span", *boxes, class_="boxes"), status.written, status.version))
    return table("HCAs", ("Node", "HCAs", "Changed", "Version"), rows, MOST_NODES)


def _box(hca: HcaStatus) -> Element:
    state, mark = picture.state_of(hca)
    name = ", ".join(hca.rdma) or hca.id
    text = f"{name}: {hca.fault or state}"
    rates = {port.rate for port in hca.ports if port.rate}
    return tag("span", text, class_=f"box {mark}", title=", ".join([hca.id, *sorted(rates)]))


def _pools(nodes: Nodes) -> Sequence[Element]:
    rows = [
        (
            name,
            pool.resource,
            pool.mode,
            tag("meter", value=str(pool.held), max=str(max(pool.ids, 1)), aria_label="held"),
            f"{pool.held} of {pool.ids}",
            tag(
                "span",
                str(free := max(pool.ids - pool.held - pool.withheld, 0)),
                class_=_mark(not free),
            ),
            tag("span", str(pool.withheld), class_=_mark(pool.withheld)),
            lines(pool.reasons),
        )
        for name, status in nodes
        for pool in status.pools[:MOST_ROWS_OF_NODE]
    ]
    headers = ("Node", "Pool", "Mode", "Use", "Held", "Free", "Withheld", "Why withheld")
    return table("Pools", headers, rows, MOST_ROWS)


def _gpus(nodes: Nodes) -> Sequence[Element]:
    def memory(count: int | None) -> str:
        return "" if count is None else f"{count / 2**30:.1f} GiB"

    rows = [
        (
            name,
            gpu.id,
            gpu.uuid,
            lines(gpu.pools or ("not offered",)),
            memory(gpu.memory_bytes),
            memory(gpu.free_bytes),
            "" if gpu.free_percent is None else f"{gpu.free_percent} %",
            lines(gpu.pods[:MOST_ROWS_OF_NODE]),
            tag("span", gpu.fault, class_="bad"),
        )
        for name, status in nodes
        for gpu in status.gpus[:MOST_ROWS_OF_NODE]
    ]
    headers = (
        "Node", "GPU", "UUID", "Pools", "Memory", "Free memory", "Free time", "Pods", "Fault",
    )  # fmt: skip
    return table("GPUs", headers, rows, MOST_ROWS)


def _gpu_parts(nodes: Nodes) -> Sequence[Element]:
    rows = [
        (name, *part.texts)
        for name, status in nodes
        for part in status.gpu_parts[:MOST_ROWS_OF_NODE]
    ]
    headers = (
        "Node", "GPU", "Pod", "Container", "Memory limit", "Used memory", "Time limit", "Throttled",
    )  # fmt: skip
    return table("Parts of GPUs", headers, rows, MOST_ROWS)


def _attachments(nodes: Nodes, choice: Choice) -> Sequence[Element]:
    def shown(name: str, one: AttachmentStatus) -> Sequence[Content]:
        place = one.hca, one.parent, one.pkey
        return name, one.pod, one.interface, one.phase, *place, lines(one.addresses), one.network

    found = [(name, one) for name, status in nodes for one in _fitting(status, name, choice)]
    rows = [shown(*each) for each in found[:MOST_ROWS]]
    headers = (
        "Node", "Pod", "Interface", "Phase", "HCA", "On", "P_Key", "Addresses", "Network",
    )  # fmt: skip
    left_out = [
        tag("p", f"{name}: the FabricNode lacks {status.left_out}.")
        for name, status in nodes
        if status.left_out
    ]
    shown_rows = table("Attachments", headers, rows, MOST_ROWS, more=len(found) - len(rows))
    if choice.words and not rows:
        shown_rows = [tag("p", "No attachment fits the filter. A Pending pod has no attachment.")]
    return [*shown_rows, *left_out[:MOST_ROWS_OF_NODE]]


def _objects(nodes: Nodes, choice: Choice) -> Sequence[Element]:
    rows = [
        (name, *one.texts)
        for name, status in nodes
        for one in status.objects[:MOST_ROWS_OF_NODE]
        if choice.fits(name, one.pod, one.device)
    ]
    headers = (
        "Node", "Pod", "Device", "Queue pairs", "Memory regions", "Completion queues",
        "Connection ids",
    )  # fmt: skip
    return table("RDMA objects", headers, rows, MOST_ROWS)


def _fitting(status: FabricNodeStatus, node: str, choice: Choice) -> Sequence[AttachmentStatus]:
    return [
        one
        for one in status.attachments
        if choice.fits(node, one.pod, one.hca, one.parent, one.pkey, one.network, *one.addresses)
    ][:MOST_ROWS_OF_NODE]
