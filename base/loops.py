"""The loops of this process that go on after an unexpected error.

One defect must not end a loop. But a loop that does nothing any more except to fail must show: the
health of the process asks `failing`.
"""

from collections import Counter

MOST_FAILURES = 5  # in a row, until a loop counts as failing

_failures: Counter[str] = Counter()


def failed(loop: str) -> None:
    """Count that the loop has failed. Who calls this has logged why."""
    _failures[loop] += 1


def worked(loop: str) -> None:
    """Forget the failures of the loop: it has done its work, or is over."""
    _failures.pop(loop, None)


def failing() -> str:
    """Which loops fail again and again, "" if none does."""
    named = sorted(loop for loop, count in _failures.copy().items() if count >= MOST_FAILURES)
    return f"failed {MOST_FAILURES} times or more in a row: {', '.join(named)}" if named else ""
