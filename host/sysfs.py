"""Reading sysfs: an attribute, the names in a directory, where a link leads.

Devices come and go while they are looked at, and drivers refuse attributes that they do not have
(EINVAL, EOPNOTSUPP, EIO): whatever cannot be read is empty here, and nothing is raised. Paths are
strings, for a Path costs more than the look, of which there are thousands when all HCAs are
read. Files of procfs that a driver makes, such as NVIDIA's, read the same.
"""

import os

_PAGE = 65536  # bytes, the largest of any architecture: an attribute is never longer than one


def text(path: str, errors: str = "strict") -> str:
    """An attribute, stripped; "" if it cannot be read.

    Also "" if it is no UTF-8; with `errors` as bytes.decode has them, "replace" keeps the rest.
    """
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


def decimal(path: str) -> int | None:
    """An attribute that is a number without a sign, "12"; None if it is none."""
    found = text(path)
    return int(found) if found.isdecimal() else None


def names(directory: str) -> list[str]:
    """The names in a directory, in no order; [] if it cannot be read."""
    try:
        return os.listdir(directory)  # noqa: PTH208
    except OSError:
        return []


def link(path: str) -> str:
    """Where a link leads, as it is written; "" if there is none."""
    try:
        return os.readlink(path)  # noqa: PTH115
    except OSError:
        return ""


def target(path: str) -> str:
    """The name of what a link leads to, such as a device's driver; "" if there is none."""
    return link(path).rpartition("/")[2]


def exists(path: str) -> bool:
    """Something is there; a link that leads nowhere is not."""
    return os.path.exists(path)  # noqa: PTH110
