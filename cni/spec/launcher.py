"""The arguments that a launcher (cni/launcher/launcher.c) passes to the fallback that it starts."""

import re
from collections.abc import Sequence
from typing import NamedTuple

_SOCKET = "--socket="
_UNANSWERED = "--unanswered-since="
_SECONDS = re.compile("[0-9]{1,12}")


class Told(NamedTuple):
    """`socket` is where the launcher looked for an agent; "" if there was no launcher.

    An agent that died may have done the call since `unanswered_since`, in seconds since 1970. None
    if no agent has begun it.
    """

    socket: str = ""
    unanswered_since: int | None = None


def read(arguments: Sequence[str]) -> Told:
    """What the arguments of a process say. Unknown ones are ignored."""
    told = Told()
    for argument in arguments:
        if argument.startswith(_SOCKET):
            told = told._replace(socket=argument.removeprefix(_SOCKET))
        elif argument.startswith(_UNANSWERED):
            since = seconds_of(argument.removeprefix(_UNANSWERED))
            told = told._replace(unanswered_since=since)
    return told


def seconds_of(text: str) -> int | None:
    """The launcher's seconds since 1970, None for another text."""
    return int(text) if _SECONDS.fullmatch(text) else None
