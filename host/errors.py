"""The exceptions of this package. Each text can be understood without its context."""

import errno
import os


class HostError(Exception):
    """The kernel refused a request, or an object is missing. The text names object and reason."""

    code = 0  # the kernel's errno, or 0


class NamespaceGone(HostError):
    """The network namespace has gone: its path does not exist or leads to another file."""


class LinkMissing(HostError):
    """The interface does not exist."""


def explained(what: str, code: int, words: str = "") -> HostError:
    """The HostError for an errno of the kernel. `what` names the request, `words` the reason."""
    # Python has two names for this number, and prefers the name that the kernel does not use.
    name = "EOPNOTSUPP" if code == errno.EOPNOTSUPP else errno.errorcode.get(code, code)
    reason = f"{os.strerror(code)} ({name})"
    error = HostError(f"{what}: {reason}: {words}" if words else f"{what}: {reason}")
    error.code = code
    return error
