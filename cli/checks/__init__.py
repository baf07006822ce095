"""The checks of `podfabric doctor`: functions that take the node and yield outcomes."""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import msgspec

from node.state import ThisNode

Status = Literal["ok", "warning", "failed", "not applicable"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    check: str
    status: Status
    seen: str
    remedy: str = ""


Outcome = tuple[Status, str, str]  # the fields status, seen and remedy of a Finding
Check = Callable[[ThisNode], Iterator[Outcome]]


def some(names: Sequence[str], most: int = 4) -> str:
    """The first `most` names, and the number of further names."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def ok(seen: str) -> Outcome:
    return "ok", seen, ""


def warning(seen: str, remedy: str) -> Outcome:
    """A finding that may be intended, or that is a problem for some pods."""
    return "warning", seen, remedy


def failed(seen: str, remedy: str) -> Outcome:
    """A finding that prevents pods from working."""
    return "failed", seen, remedy


def not_applicable(why: str) -> Outcome:
    return "not applicable", why, ""
