"""Where the host's proc(5) is.

An agent in a container has two. Its own /proc shows only processes of the container, and its
sysctls are read-only there. The host's /proc is mounted elsewhere: it shows the processes that live
in pods' namespaces. In both, /proc/sys/net is that of the namespace of the thread that looks.
"""

import re
from pathlib import Path

_root = Path("/proc")
_root_name = "/proc"


def use(root: Path) -> None:
    """Take the host's from there, in the whole process; before its first thread."""
    global _root, _root_name
    _root, _root_name = root, str(root)


def path(name: str = "") -> Path:
    """The host's /proc/NAME."""
    return _root / name


def name(of: str) -> str:
    """The same as a string. A Path costs as much as it takes to read a small file."""
    return f"{_root_name}/{of}"


def lines(text: str) -> list[str]:
    """The lines of a file of proc(5), without empty ones.

    Only a line feed ends one: a name of a directory may have any other of the characters at which
    str.splitlines splits, and proc(5) does not escape them.
    """
    return [line for line in text.split("\n") if line]


def unescaped(text: str) -> str:
    """A path as it is, from mountinfo, which writes "\\040" for a space."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), text)
