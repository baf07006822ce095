"""What can go wrong below: one exception with a text that stands alone."""

import errno
import os


class HostError(Exception):
    """The kernel refused, or something is not there. The text says what, on what, and why.

    `code` is the kernel's errno, 0 if it did not say one.
    """

    code = 0


class NamespaceGone(HostError):
    """The network namespace cannot be entered: the path is gone, or is no namespace any more."""


class LinkMissing(HostError):
    """No such interface."""


def explained(what: str, code: int, words: str = "") -> HostError:
    """The HostError for an errno, and words of its own, that the kernel answered to `what`."""
    # Of two names for one number, Python has the one that the kernel does not use.
    name = "EOPNOTSUPP" if code == errno.EOPNOTSUPP else errno.errorcode.get(code, code)
    reason = f"{os.strerror(code)} ({name})"
    error = HostError(f"{what}: {reason}: {words}" if words else f"{what}: {reason}")
    error.code = code
    return error
