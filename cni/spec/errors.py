"""CNI errors: their codes, and the exception that becomes the error document.

Codes below 100 are from the specification (SPEC.md "Error"), except 8, which is from the
reference's skel. Codes from 100 on are ours. docs/reference/errors.md lists all codes for users.
"""

import enum

from base.text import line


class Code(enum.IntEnum):
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
    AGENT_OWNS = 114
    DEVICE_MISMATCH = 120
    NOT_ALLOWED = 121

    INTERNAL = 999


class CNIError(Exception):
    """An error that a runtime sees. Multus passes on only `message` of a failed ADD.

    `message` names the failed step, the step's object, the system's answer and the remedy. Each
    text becomes one line of limited length, because the text may quote a tenant's input.
    """

    def __init__(self, code: int, message: str, details: str = "") -> None:
        self.code = int(code)
        self.message = line(message)
        self.details = line(details)
        super().__init__(self.message)


def invalid_config(message: str) -> CNIError:
    """The error for a configuration that cannot work. `message` names the key."""
    return CNIError(Code.INVALID_CONFIG, message)
