"""CNI errors: codes, and the one exception that becomes the error document.

Codes below 100 are the specification's (SPEC.md "Error"), 8 is the reference's skel package's.
Codes from 100 on are ours; docs/errors.md lists them for users, and a test compares the two.
"""

import enum

from base.text import line


class Code(enum.IntEnum):
    """The `code` of an error document."""

    INCOMPATIBLE_VERSION = 1
    UNSUPPORTED_FIELD = 2
    UNKNOWN_CONTAINER = 3
    INVALID_ENVIRONMENT = 4
    IO_FAILURE = 5
    DECODING_FAILURE = 6
    INVALID_CONFIG = 7
    INVALID_NETNS = 8
    TRY_AGAIN = 11
    UNAVAILABLE = 50
    LIMITED = 51

    KERNEL = 100
    DELEGATE = 101
    CHECK_FAILED = 102
    ALREADY_ATTACHED = 103
    CLEANUP_INCOMPLETE = 104
    NO_FREE_ADDRESS = 110
    ADDRESS_TAKEN = 111
    STORE_DAMAGED = 112
    JOURNAL_DAMAGED = 113
    OTHER_STATE = 114
    DEVICE_MISMATCH = 120
    NOT_ALLOWED = 121

    INTERNAL = 999


class CNIError(Exception):
    """An error that a runtime sees.

    `message` stands alone: Multus drops code and details on ADD. It says what was tried, on
    what, what the system answered and what to do. Both texts become one line each, cut where
    they are very long: they quote what a tenant wrote, and end up in events and on terminals.
    """

    def __init__(self, code: int, message: str, details: str = "") -> None:
        self.code = int(code)
        self.message = line(message)
        self.details = line(details)
        super().__init__(self.message)


def invalid_config(message: str, details: str = "") -> CNIError:
    """The most frequent error: a configuration that cannot work, with the key it is about."""
    return CNIError(Code.INVALID_CONFIG, message, details)
