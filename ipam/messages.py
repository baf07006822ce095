"""Messages of the plugin for the operator: on standard error, and in a file if the node allows it.

The levels are those of whereabouts, whose default is "debug"; ours is "warning".
"""

import time
from collections.abc import Iterable, Mapping, Sequence

from base import confined
from base.confined import UnsafeFile
from base.text import printable
from cni.spec.notes import note

LEVELS = ("debug", "verbose", "info", "warning", "error", "panic")
MOST_BYTES = 16 << 20  # of a log file
_LINE = 4096  # characters: an error may quote much of a configuration


class Messages:
    """Writes lines at or above `level` to standard error, and to `log_file` unless it is "".

    The file must be below one of `directories`. What a tenant wrote is escaped.
    """

    def __init__(
        self, log_file: str = "", level: str = "warning", directories: Sequence[str] = ()
    ) -> None:
        self._file = log_file if log_file and confined.is_below(directories, log_file) else ""
        self._directories = directories
        self._lowest = LEVELS.index(level)

    def info(self, text: str) -> None:
        """Log a change."""
        self._write("info", text)

    def warning(self, text: str) -> None:
        """What the operator should look at."""
        self._write("warning", text)

    def error(self, text: str) -> None:
        """What failed."""
        self._write("error", text)

    def _write(self, level: str, text: str) -> None:
        if LEVELS.index(level) < self._lowest:
            return
        line = f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} [{level}] {text}"
        line = printable(line[:_LINE])
        note(line)
        if not self._file:
            return
        try:
            content = f"{line}\n".encode()
            confined.append(self._directories, self._file, content, MOST_BYTES)
        except (UnsafeFile, OSError) as error:
            # A pod gets its address also if the log cannot be written.
            reason = error.strerror if isinstance(error, OSError) else error
            note(printable(f'"ipam.log_file": {self._file} {reason}'))
            self._file = ""


def warn_of_ignored(
    idle: Iterable[str], files: Mapping[str, str], directories: Sequence[str]
) -> None:
    """Write one line that names the keys of `ipam` without effect, at any log level.

    These are `idle`, and of `files` (path by key) those that are in none of the `directories`.
    """
    refused = [
        key for key, path in files.items() if path and not confined.is_below(directories, path)
    ]
    if not idle and not refused:
        return
    line = f"without effect on this node: {', '.join(f'ipam.{key}' for key in (*idle, *refused))}"
    if refused:
        line += ' (the administrator can allow directories: "set.hostPaths" of a rule)'
    note(line)
