"""Notes of a call, for the runtime's log.

A process that serves one call writes its notes to standard error. An agent collects the notes, and
the call's launcher writes the notes to standard error.
"""

import sys
from contextvars import ContextVar

from base.interrupts import Bound

MAX_BYTES = 256 << 10  # of one call; a delegate may write without end


class Notes:
    def __init__(self) -> None:
        self._lines: list[str] = []
        self._size = 0

    def append(self, line: str) -> None:
        """Keep a line, unless the notes are full."""
        if self._size > MAX_BYTES:
            return
        self._size += len(line.encode(errors="replace")) + 1
        full = self._size > MAX_BYTES
        self._lines.append("(further notes are left out)" if full else line)

    @property
    def text(self) -> str:
        return "".join(f"{line}\n" for line in self._lines)


_notes: ContextVar[Notes | None] = ContextVar("notes", default=None)


def note(line: str) -> None:
    notes = _notes.get()
    if notes is not None:
        notes.append(line)
    else:
        sys.stderr.write(f"{line}\n")


def collected() -> Bound[None, Notes]:
    """In the block, collect this thread's notes instead of writing them."""
    return Bound(_notes, Notes())
