"""A client of the API server whose calls can be ended: much may be left to do of one step."""

import threading
from typing import Any

from ipam.cluster.api import ClusterApi, Unavailable

_CHANGES = frozenset(("create", "update", "update_status", "patch", "delete", "write_lease"))


class UntilClosed:
    """A ClusterApi whose calls fail once it is closed. Threads may share it.

    A change that is under way then ends as it does, and its answer counts. A read fails when it
    ends: so a thread that is in one does nothing more, and need not be waited for.
    """

    def __init__(self, api: ClusterApi) -> None:
        self._api = api
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

    def __getattr__(self, verb: str) -> Any:  # noqa: ANN401 - a method of the api
        method = getattr(self._api, verb)

        def call(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - the method's
            is_read = verb not in _CHANGES
            thread = threading.get_ident()
            with self._lock:
                self._require_open()
                if is_read:
                    self._reading.add(thread)
            try:
                answer = method(*arguments, **named)
            finally:
                with self._lock:
                    self._reading.discard(thread)
            if is_read:
                self._require_open()
            return answer

        return call

    def _require_open(self) -> None:
        if self._closed:
            raise Unavailable("not asked, since this agent is being replaced")
