"""Messages of the plugin for the operator: on standard error, and in a file if the node allows it.

The levels are those of whereabouts, whose default is "debug"; ours is "warning".
"""

import time
from collections.abc import Iterable, Mapping, Sequence

from base import confined
from base.confined import UnsafeFile
from base.text import printable
from cni.policy.document import PART
from cni.policy.rules import Policy
from cni.spec.notes import note

LEVELS = ("debug", "verbose", "info", "warning", "error", "panic")
MOST_BYTES = 16 << 20  # of a log file
_LINE = 4096  # characters: an error may quote much of a configuration
_ALLOWED_BY = {"log_file": "log_directories", "resolvConf": "resolv_conf_directories"}


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


def warn_of_ignored(idle: Iterable[str], files: Mapping[str, str], policy: Policy) -> None:
    """Write one line that names the keys of `ipam` without effect, at any log level.

    These are `idle`, and of `files` (path by key) those in a directory that the policy does not
    allow.
    """
    refused = [
        key
        for key, path in files.items()
        if path and not confined.is_below(getattr(policy, _ALLOWED_BY[key]), path)
    ]
    if not idle and not refused:
        return
    line = f"without effect on this node: {', '.join(f'ipam.{key}' for key in (*idle, *refused))}"
    if refused:
        settings = " and ".join(f'"{PART}.{_ALLOWED_BY[key]}"' for key in refused)
        line += f" (the administrator can allow directories: {settings} in config.yaml)"
    note(line)
