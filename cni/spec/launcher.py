"""What a launcher tells the fallback that it becomes, as arguments (cni/launcher/launcher.c)."""

from collections.abc import Sequence
from typing import NamedTuple

_SOCKET = "--socket="
_UNANSWERED = "--unanswered-since="


class Told(NamedTuple):
    """`socket` is where the launcher looked for an agent; "" where no launcher was started.

    An agent that died may have done the call since `unanswered_since`, seconds since 1970. None:
    no agent has begun it.
    """

    socket: str = ""
    unanswered_since: int | None = None


def read(arguments: Sequence[str]) -> Told:
    """What the arguments of a process say. Others are ignored: a runtime gives none."""
    told = Told()
    for argument in arguments:
        if argument.startswith(_SOCKET):
            told = told._replace(socket=argument.removeprefix(_SOCKET))
        elif (seconds := argument.removeprefix(_UNANSWERED)) != argument and seconds.isdecimal():
            told = told._replace(unanswered_since=int(seconds))
    return told
