"""A copy of all objects of a kind, kept by one list and a watch.

What it shows may be late. Whoever acts on it names the resource version, which the API server
compares.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Generic

from ipam.cluster.api import ApiError, ClusterApi, WatchExpired
from ipam.cluster.objects import AnyResource

LIST_EVERY = 600.0  # seconds: an event that was lost is not missed for ever
LONGEST_PAUSE = 30.0

_log = logging.getLogger(__name__)


class Mirror(Generic[AnyResource]):
    """Follows a kind in a thread of its own until `close`. `changed` is called after a change."""

    def __init__(
        self,
        api: ClusterApi,
        kind: type[AnyResource],
        changed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._kind = kind
        self._changed = changed
        self._clock = clock
        self._lock = threading.Lock()
        self._objects: dict[tuple[str, str], AnyResource] | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._follow, name=f"mirror-{kind.PLURAL}", daemon=True).start()

    def items(self) -> tuple[AnyResource, ...] | None:
        """All objects; None before the first list."""
        with self._lock:
            return None if self._objects is None else tuple(self._objects.values())

    def close(self) -> None:
        """Follow no more. The thread ends when its request does."""
        self._closed.set()

    def _follow(self) -> None:
        pause = 1.0
        while not self._closed.is_set():
            try:
                self._list_and_watch()
                pause = 1.0
            except WatchExpired:
                continue
            except ApiError as error:
                _log.warning("following %s: %s", self._kind.PLURAL, error)
                self._closed.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            except Exception:  # noqa: BLE001 - the outermost edge: a defect must not end the thread
                _log.exception("following %s", self._kind.PLURAL)
                self._closed.wait(LONGEST_PAUSE)

    def _list_and_watch(self) -> None:
        """List, and then follow the changes until it is time to list again. ApiError."""
        listed_at = self._clock()
        listing = self._api.list(self._kind)
        with self._lock:
            self._objects = {_key(each): each for each in listing.items}
        self._changed()
        version = listing.resource_version
        while self._clock() - listed_at < LIST_EVERY:
            for change in self._api.watch(self._kind, version):
                if self._closed.is_set():
                    return
                version = change.object.metadata.resource_version
                with self._lock:
                    if change.type == "DELETED":
                        self._objects.pop(_key(change.object), None)
                    else:
                        self._objects[_key(change.object)] = change.object
                self._changed()


def _key(resource: AnyResource) -> tuple[str, str]:
    return resource.metadata.namespace, resource.metadata.name
