"""The steps of a round, and its client, which writes only while its process leads.

A step that fails does not keep the others from being done.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from ipam.cluster.api import ApiError, Conflict, NotFound, Refused, WatchExpired
from ipam.cluster.rest_api import ClusterApi

_CHANGES = frozenset(("create", "update", "update_status", "patch", "delete"))
MOST_FAILURES = 3  # of alike steps of a round: each may take as long as a request
T = TypeVar("T")


class NotLeading(ApiError):
    """The process does not lead (any more), so it writes nothing."""


def guarded(
    api: ClusterApi, may_write: Callable[[], bool], errors: Counter[tuple[str, str]]
) -> ClusterApi:
    """The client. `may_write` is asked before each change: a report is none, as it decides nothing.
    `errors` counts failed calls by verb and kind of error."""
    return cast(ClusterApi, _Guarded(api, may_write, errors))


class _Guarded:
    def __init__(
        self, api: ClusterApi, may_write: Callable[[], bool], errors: Counter[tuple[str, str]]
    ) -> None:
        self._api = api
        self._may_write = may_write
        self._errors = errors

    def __getattr__(self, verb: str) -> Any:  # noqa: ANN401 - a method of the api
        method = getattr(self._api, verb)

        def call(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - the method's
            if verb in _CHANGES and not self._may_write():
                raise NotLeading(f"{verb}: this process does not lead")
            with self._counted(verb):
                answer = method(*arguments, **named)
            return self._items(verb, answer) if isinstance(answer, Iterator) else answer

        return call

    def _items(self, verb: str, items: Iterator[Any]) -> Iterator[Any]:
        with self._counted(verb):
            yield from items

    @contextmanager
    def _counted(self, verb: str) -> Iterator[None]:
        try:
            yield
        except WatchExpired:
            raise
        except ApiError as error:
            self._errors[verb, type(error).__name__] += 1
            raise


@contextmanager
def unless_changed(log: logging.Logger, name: str) -> Iterator[None]:
    """A change of one object. Where it has changed meanwhile, or is refused, the next round looks
    again."""
    try:
        yield
    except (Conflict, NotFound, Refused) as error:
        log.info("%s: left for the next round: %s", name, error)


class Steps:
    """Does steps, and remembers which of them failed. `progress` is called before each."""

    def __init__(self, progress: Callable[[], object] = lambda: None) -> None:
        self.progress = progress
        self._failures: dict[str, dict[str, int]] = {}  # by kind and name, one after the other
        self._errors: list[ApiError] = []

    def taken_errors(self) -> list[ApiError]:
        """What failed since the last call."""
        taken, self._errors = self._errors, []
        return taken

    def failed(self, error: ApiError) -> None:
        """Remember what went wrong in a step that goes on."""
        self._errors.append(error)

    def each(self, kind: str, named: Iterable[tuple[str, T]], step: Callable[[T], object]) -> None:
        """Do `step` for each item, first for those whose name has failed least. After MOST_FAILURES
        the rest is left for the next round. NotLeading."""
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
