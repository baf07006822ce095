"""Reads and writes sysfs: attributes, directories and links.

A read raises nothing, and an unreadable file counts as empty. A device may vanish during a read. A
driver refuses attributes that it does not support (EINVAL, EOPNOTSUPP, EIO). Paths are strings,
because making a Path takes longer than a read.
"""

import os

_PAGE = 65536  # bytes; the largest page of any architecture; an attribute fits into a page


def text(path: str, errors: str = "strict") -> str:
    """An attribute, stripped; "" if it is unreadable or not UTF-8. `errors` goes to `decode`."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return ""
    try:
        return os.read(descriptor, _PAGE).decode(errors=errors).strip()
    except (OSError, UnicodeDecodeError):
        return ""
    finally:
        os.close(descriptor)


def write(path: str, text: str) -> None:
    """Write an attribute that exists. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)  # without O_CREAT, unlike open()
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def number(path: str) -> int | None:
    """The number in an attribute, such as "12" or "0x1"; `None` if it has no number."""
    try:
        return int(text(path), 0)
    except ValueError:
        return None


def numa_node(*devices: str) -> int | None:
    """The first known NUMA node (not -1) of these devices, or `None`."""
    nodes = (number(f"{device}/numa_node") for device in devices)
    return next((node for node in nodes if node is not None and node >= 0), None)


def names(directory: str) -> list[str]:
    """The names in a directory, unsorted; [] if the directory cannot be read."""
    try:
        return os.listdir(directory)  # noqa: PTH208
    except OSError:
        return []


def link(path: str) -> str:
    """The text of a symbolic link; "" if there is none."""
    try:
        return os.readlink(path)  # noqa: PTH115
    except OSError:
        return ""


def target(path: str) -> str:
    """The last component of a symbolic link, such as a driver's name; "" if there is none."""
    return link(path).rpartition("/")[2]


def exists(path: str) -> bool:
    """Whether the path exists; False for a broken link."""
    return os.path.exists(path)  # noqa: PTH110
