"""The checks of `podfabric doctor`: functions that take the node and return outcomes."""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import msgspec

from cli.node.state import ThisNode

Status = Literal["ok", "warning", "failed", "not applicable"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A result of a check."""

    check: str
    status: Status
    seen: str
    remedy: str = ""  # what to do, if anything


Outcome = tuple[Status, str, str]
"""Status, observation, and what to do: a Finding without its check's name."""

Check = Callable[[ThisNode], Iterator[Outcome]]


_SHOWN = 4  # names in a text


def some(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


def ok(seen: str) -> Outcome:
    """No problem."""
    return "ok", seen, ""


def warning(seen: str, remedy: str) -> Outcome:
    """Possibly intended, or a problem for some pods."""
    return "warning", seen, remedy


def failed(seen: str, remedy: str) -> Outcome:
    """A problem that keeps pods from working."""
    return "failed", seen, remedy


def not_applicable(why: str) -> Outcome:
    """Nothing to check."""
    return "not applicable", why, ""
