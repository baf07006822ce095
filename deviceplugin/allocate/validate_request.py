"""Whether a GetPreferredAllocation makes sense. It is answered in any case (preferred.py)."""

from collections.abc import Sequence

_SHOWN = 4  # ids of those that are wrong


def nonsense(available: Sequence[str], must_include: Sequence[str], size: int) -> str:
    """What is wrong with the question, for the log; "" if nothing is.

    An id that the pool does not have is none: the kubelet may not have read its last list yet.
    """
    free, must = set(available), set(must_include)
    problems = []
    if size < 1:
        problems.append(f"{size} ids are asked for")
    elif size > len(free):
        problems.append(f"{size} ids are asked for, and {len(free)} are available")
    if missing := sorted(must - free):
        problems.append(f"must include {_some(missing)}, which is not available")
    if 0 < size < len(must):
        problems.append(f"must include {len(must)} ids in {size}")
    return "; ".join(problems)


def _some(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - _SHOWN} more" if len(ids) > _SHOWN else ""
    return f"{', '.join(ids[:_SHOWN])}{more}"
