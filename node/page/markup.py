"""Builds HTML with xml.etree, which escapes every text and attribute."""

from collections.abc import Iterable, Sequence
from xml.etree.ElementTree import Element

from base.text import printable

Content = Element | str


def tag(name: str, /, *content: Content, **attributes: str) -> Element:
    """An element. `class_` sets "class", and `aria_label` sets "aria-label"."""
    keys = {key.rstrip("_").replace("_", "-"): printable(text) for key, text in attributes.items()}
    made = Element(name, keys)
    for part in content:
        if isinstance(part, Element):
            made.append(part)
        elif len(made):
            made[-1].tail = (made[-1].tail or "") + printable(part)
        else:
            made.text = (made.text or "") + printable(part)
    return made


def lines(texts: Iterable[str]) -> Element:
    """Texts below each other."""
    return tag("span", *(tag("span", text, class_="line") for text in texts))


def table(
    title: str,
    headers: Sequence[str],
    rows: Sequence[Sequence[Content]],
    most: int,
    more: int = 0,
) -> Sequence[Element]:
    """A table that scrolls sideways, with its first `most` rows. Returns () if there are no rows.

    `more` is the number of rows that the caller has left out.
    """
    if not rows:
        return ()
    head = tag("tr", *(tag("th", header, scope="col") for header in headers))
    body = (tag("tr", *(tag("td", cell) for cell in row)) for row in rows[:most])
    made = [
        tag(
            "div",
            tag("table", tag("thead", head), tag("tbody", *body)),
            class_="wide",
            role="region",
            tabindex="0",
            aria_label=title,
        )
    ]
    more += max(len(rows) - most, 0)
    if more:
        made.append(tag("p", f"{more} more rows: use the filter, or choose a node."))
    return made
