"""What the plugin tells the operator: on standard error, and in a file if the network names one.

The levels are whereabouts', which writes everything to standard error unless told otherwise;
here that begins with warnings.
"""

import time
from pathlib import Path

from cni.spec.notes import note

LEVELS = ("debug", "verbose", "info", "warning", "error", "panic")


class Messages:
    """Lines at or above `level`, to standard error and to `log_file` ("" is none)."""

    def __init__(self, log_file: str = "", level: str = "warning") -> None:
        self._file = Path(log_file) if log_file else None
        self._lowest = LEVELS.index(level)

    def debug(self, text: str) -> None:
        """What was decided."""
        self._write("debug", text)

    def info(self, text: str) -> None:
        """What was done."""
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
        note(line)
        if self._file is None:
            return
        try:
            with self._file.open("a") as file:
                file.write(f"{line}\n")
        except (OSError, ValueError) as error:
            # A log that cannot be written must not keep a pod from its address.
            note(f'"ipam.log_file" {str(self._file)!r}: {error}')
            self._file = None
