"""The exceptions of this package. Their texts can be understood alone."""

import errno
import os


class HostError(Exception):
    """The kernel refused something, or something does not exist. The text says what and why.

    `code` is the kernel's errno, or 0.
    """

    code = 0


class NamespaceGone(HostError):
    """The network namespace has gone: its path does not exist or is not a namespace any more."""


class LinkMissing(HostError):
    """The interface does not exist."""


def explained(what: str, code: int, words: str = "") -> HostError:
    """The HostError for an errno that the kernel answered to `what`, with its own words if any."""
    # For this number Python has two names and prefers the one that the kernel does not use.
    name = "EOPNOTSUPP" if code == errno.EOPNOTSUPP else errno.errorcode.get(code, code)
    reason = f"{os.strerror(code)} ({name})"
    error = HostError(f"{what}: {reason}: {words}" if words else f"{what}: {reason}")
    error.code = code
    return error
