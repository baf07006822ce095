"""Clients of the API server that let some calls pass only."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from ipam.cluster.api import Unavailable
from ipam.cluster.rest_api import ClusterApi

CHANGES = frozenset(("create", "update", "update_status", "patch", "delete"))


class WrappedApi:
    """A ClusterApi whose calls are made within `around(verb)`, which may raise ApiError."""

    def __init__(
        self, api: ClusterApi, around: Callable[[str], AbstractContextManager[None]]
    ) -> None:
        self._api = api
        self._around = around

    def __getattr__(self, verb: str) -> Any:  # noqa: ANN401 - a method of the api
        method = getattr(self._api, verb)

        def call(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - the method's
            with self._around(verb):
                answer = method(*arguments, **named)
            return self._items(verb, answer) if isinstance(answer, Iterator) else answer

        return call

    def _items(self, verb: str, items: Iterator[Any]) -> Iterator[Any]:
        with self._around(verb):
            yield from items


class UntilClosed(WrappedApi):
    """A ClusterApi whose calls fail once it is closed. Threads may share it.

    A change that is under way then ends as it does, and its answer counts. A read fails when it
    ends: so a thread that is in one does nothing more, and need not be waited for.
    """

    def __init__(self, api: ClusterApi) -> None:
        super().__init__(api, self._while_open)
        self._lock = threading.Lock()
        self._closed = False
        self._reading: set[int | None] = set()  # threads, by their ident

    def close(self) -> None:
        """No call begins any more."""
        with self._lock:
            self._closed = True

    def is_read_by(self, thread: threading.Thread) -> bool:
        """Whether the thread waits for an answer to a read."""
        with self._lock:
            return thread.ident in self._reading

    @contextmanager
    def _while_open(self, verb: str) -> Iterator[None]:
        is_read = verb not in CHANGES
        thread = threading.get_ident()
        with self._lock:
            self._require_open()
            if is_read:
                self._reading.add(thread)
        try:
            yield
        finally:
            with self._lock:
                self._reading.discard(thread)
        if is_read:
            self._require_open()

    def _require_open(self) -> None:
        if self._closed:
            raise Unavailable("not asked, since this agent is being replaced")
