"""what an agent does before it serves: its place among the node's files and processes."""

import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from agent import departure, presence
from agent.presence import Presence
from base.paths import Paths


class Unable(Exception):
    """The agent cannot start. The text says why and what to do."""


def allow_descriptors() -> None:
    """Raise the limit of descriptors: a client has two or three, and the usual limit is 1024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@contextmanager
def present(run: Path) -> Iterator[Presence]:
    with ExitStack() as stack:
        try:
            told = stack.enter_context(presence.present(run, "starting"))
        except OSError as error:
            raise Unable(f"cannot use {run}: {error.strerror}: make it writable for root") from None
        yield told


def finish_removal(paths: Paths) -> None:
    """Remove the rest of the files of an installation whose removal was interrupted."""
    try:
        if departure.removal_has_begun(paths):
            departure.remove_state(paths)
    except OSError as error:
        raise Unable(
            f"cannot remove {error.filename}, of a podfabric that left this node: {error.strerror}"
        ) from None
