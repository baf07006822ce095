"""Prints the output of commands: tables for people, JSON for programs.

Escapes unprintable characters and line ends, because a tenant's name could control a terminal.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from io import StringIO
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from base.text import printable

if TYPE_CHECKING:
    from rich.table import Table as RichTable

FORMS = ("table", "json")
CLEAR = "\x1b[H\x1b[2J"  # cursor to the first line, then an empty screen
_WIDE = 4000  # columns, so that rows are not folded

Lines = str | Sequence[str]  # one line, or several


class Cell(NamedTuple):
    """Lines in one of rich's styles, such as "red"."""

    lines: Lines
    style: str = ""


class Table(msgspec.Struct, frozen=True):
    """Each row has a cell for each header. If `folded`, long cells wrap at the terminal's width."""

    headers: Sequence[str]
    rows: Sequence[Sequence[Lines | Cell]]
    folded: bool = False

    def __bool__(self) -> bool:
        return bool(self.rows)


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--output", choices=FORMS, default="table", help="json is for programs"
    )


def document(value: object) -> None:
    sys.stdout.write(f"{msgspec.json.format(msgspec.json.encode(value), indent=2).decode()}\n")


def show(*parts: Table | Lines) -> None:
    """Print tables and paragraphs that have content, separated by empty lines."""
    from rich.console import Console
    from rich.text import Text

    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if terminal else _WIDE
    text = StringIO()
    console = Console(
        file=text, width=_WIDE, force_terminal=True if terminal else None, highlight=False
    )
    for number, part in enumerate(part for part in parts if part):
        if number:
            console.print()
        if isinstance(part, Table):
            console.print(_rich(part), width=width if part.folded else _WIDE)
        else:
            console.print(Text(_printable(part)), width=width)
    for line in text.getvalue().splitlines():
        sys.stdout.write(f"{line.rstrip()}\n")


def _printable(lines: Lines) -> str:
    return "\n".join(map(printable, [lines] if isinstance(lines, str) else lines))


def _rich(table: Table) -> "RichTable":
    from rich.table import Table as RichTable
    from rich.text import Text

    made = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for header in table.headers:
        made.add_column(Text(header), overflow="fold")
    for row in table.rows:
        cells = (cell if isinstance(cell, Cell) else Cell(cell) for cell in row)
        made.add_row(*(Text(_printable(cell.lines) or "-", style=cell.style) for cell in cells))
    return made
