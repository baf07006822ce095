"""What can go wrong below: one exception with a text that stands alone."""

import errno
import os


class HostError(Exception):
    """The kernel refused, or something is not there. The text says what, on what, and why."""


class NamespaceGone(HostError):
    """The network namespace cannot be entered: the path is gone, or is no namespace any more."""


class LinkMissing(HostError):
    """No such interface."""


def explained(what: str, code: int) -> HostError:
    """The HostError for an errno that the kernel answered to `what`."""
    return HostError(f"{what}: {os.strerror(code)} ({errno.errorcode.get(code, code)})")
