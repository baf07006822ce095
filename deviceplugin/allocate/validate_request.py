"""Validates a GetPreferredAllocation request. It is answered in any case (preferred.py)."""

from collections.abc import Sequence

_SHOWN = 4  # ids in a text


def problem_of(available: Sequence[str], must_include: Sequence[str], size: int) -> str | None:
    """What is wrong with a request, for the log; None if nothing is.

    An unknown id is not a problem: the kubelet may not have read the pool's last list yet.
    """
    free, must = set(available), set(must_include)
    problems = []
    if size < 1:
        problems.append(f"{size} ids are asked for")
    elif size > len(free):
        problems.append(f"{size} ids are asked for, and only {len(free)} are available")
    if missing := sorted(must - free):
        problems.append(f"it must include {_some(missing)}, which is not available")
    if 0 < size < len(must):
        problems.append(f"it must include {len(must)} ids, and {size} are asked for")
    return "; ".join(problems) or None


def _some(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - _SHOWN} more" if len(ids) > _SHOWN else ""
    return f"{', '.join(ids[:_SHOWN])}{more}"
