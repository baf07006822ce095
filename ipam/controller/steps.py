"""The steps of a round. A failed step does not stop the other steps."""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from kube.resources import ApiError, Conflict, NotFound, NotLeading, Refused

MOST_FAILURES = 3  # of one kind of step in a round, because a failure may take long
T = TypeVar("T")


@contextmanager
def unless_changed(log: logging.Logger, name: str) -> Iterator[None]:
    """Only log a conflict or a refusal: the next round tries again."""
    try:
        yield
    except (Conflict, NotFound, Refused) as error:
        log.info("%s: left for the next round: %s", name, error)


class Steps:
    """Does steps and counts their failures. Calls `progress` before each step."""

    def __init__(self, progress: Callable[[], object] = lambda: None) -> None:
        self.progress = progress
        self._failures: dict[str, dict[str, int]] = {}  # by kind, then by name
        self._errors: list[ApiError] = []

    def taken_errors(self) -> list[ApiError]:
        taken, self._errors = self._errors, []
        return taken

    def failed(self, error: ApiError) -> None:
        """Record an error that does not end the step."""
        self._errors.append(error)

    def each(self, kind: str, named: Iterable[tuple[str, T]], step: Callable[[T], object]) -> None:
        """Do `step` for each item. Names with the fewest failures come first. After MOST_FAILURES,
        the remaining items wait for the next round. Raises NotLeading."""
        items = tuple(named)
        counts = self._failures.get(kind, {})
        counts = self._failures[kind] = {name: counts.get(name, 0) for name, _ in items}
        left = MOST_FAILURES
        for name, item in sorted(items, key=lambda each: counts[each[0]]):
            if left == 0:
                break
            self.progress()
            try:
                step(item)
            except NotLeading:
                raise
            except ApiError as error:
                left -= 1
                counts[name] += 1
                self._errors.append(error)
            else:
                counts[name] = 0
