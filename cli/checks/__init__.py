"""The checks of `podfabric doctor`: each is a function of the node that answers findings."""

from collections.abc import Callable, Iterator
from typing import Literal

import msgspec

from cli.this_node import ThisNode

Status = Literal["ok", "warning", "failed", "not applicable"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What one look at one thing came to."""

    check: str
    status: Status
    seen: str
    remedy: str = ""  # what to do; "" where nothing is to be done


Outcome = tuple[Status, str, str]
"""Status, what was seen, what to do: a finding without its check's name."""

Check = Callable[[ThisNode], Iterator[Outcome]]


def ok(seen: str) -> Outcome:
    """All is as it should be."""
    return "ok", seen, ""


def warning(seen: str, remedy: str) -> Outcome:
    """It may be meant, or will hurt some pods."""
    return "warning", seen, remedy


def failed(seen: str, remedy: str) -> Outcome:
    """Pods go without because of it."""
    return "failed", seen, remedy


def not_applicable(why: str) -> Outcome:
    """There is nothing to look at."""
    return "not applicable", why, ""
