"""Finds the host's proc(5).

In a container, /proc shows only processes of the container, and its sysctls are read-only. So the
host's /proc is mounted at another path. At both paths, sys/net belongs to the network namespace of
the reading thread.
"""

import re
from pathlib import Path

_root = Path("/proc")
_root_name = "/proc"


def use(root: Path) -> None:
    """Set the location of the host's /proc for the process, before its first thread."""
    global _root, _root_name
    _root, _root_name = root, str(root)


def path(name: str = "") -> Path:
    """The host's /proc/NAME."""
    return _root / name


def name(of: str) -> str:
    """The host's /proc/OF as a string. Making a Path takes as long as reading a small file."""
    return f"{_root_name}/{of}"


def lines(text: str) -> list[str]:
    """The lines of a file of proc(5), without empty ones.

    str.splitlines also splits at characters that proc(5) does not escape in names.
    """
    return [line for line in text.split("\n") if line]


def unescaped(text: str) -> str:
    """The path that mountinfo shows with escapes, such as "\\040" for a space."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), text)
