"""Follows the API server: a copy of all objects of a kind, a signal that others changed, and polls.

What a copy shows may be late. Whoever acts on it names the resource version, which the API server
compares.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, NamedTuple

from base import loops
from ipam.cluster.api import (
    ApiError,
    ClusterApi,
    Listing,
    Node,
    NotFound,
    Unreadable,
    WatchExpired,
)
from ipam.cluster.controller.complaints import Complaint
from ipam.cluster.objects import AnyResource, Resource

LIST_EVERY = 600.0  # seconds: an event that was lost is not missed for ever
LEAST_PAUSE, LONGEST_PAUSE = 0.1, 30.0  # seconds between two watches
KIND_EVERY = 10.0  # seconds between two looks for a kind that is not installed

SLOW_AFTER = 10.0  # seconds that a poll takes, from which on it is said

_log = logging.getLogger(__name__)


class Follower:
    """Follows something in a thread of its own, until `close`."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._closed = threading.Event()
        self._complaint = Complaint(_log, f"following {what}")

    def close(self) -> None:
        """Follow no more. The thread ends when its request does."""
        self._closed.set()

    def _start(self) -> None:
        threading.Thread(target=self._run, name=f"follow-{self._what}", daemon=True).start()

    def _run(self) -> None:
        pause = 1.0
        while not self._closed.is_set():
            try:
                self._follow()
                loops.worked(f"following {self._what}")
                pause = 1.0
                self._closed.wait(LEAST_PAUSE)
            except WatchExpired:
                self._closed.wait(LEAST_PAUSE)
            except ApiError as error:
                self._complaint.fails(error)
                self._closed.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            except Exception:  # noqa: BLE001 - the outermost edge: a defect must not end the thread
                _log.exception("following %s", self._what)
                loops.failed(f"following {self._what}")
                self._closed.wait(LONGEST_PAUSE)
        loops.worked(f"following {self._what}")

    def _follow(self) -> None:
        """One watch, from its beginning to its end. ApiError."""
        raise NotImplementedError


class Mirror(Follower, Generic[AnyResource]):
    """All objects of a kind, or those in a namespace, or with these fields. One that cannot be read
    any more stays as it was.

    `changed` is called after a change.
    """

    def __init__(
        self,
        api: ClusterApi,
        kind: type[AnyResource],
        changed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        namespace: str = "",
        fields: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(kind.PLURAL)
        self._namespace = namespace
        self._fields = fields
        self._api = api
        self._kind = kind
        self._changed = changed
        self._clock = clock
        self._lock = threading.Lock()
        self._objects: dict[tuple[str, str], AnyResource] | None = None
        self._start()

    def items(self) -> tuple[AnyResource, ...] | None:
        """All objects; None before the first list."""
        with self._lock:
            return None if self._objects is None else tuple(self._objects.values())

    def _follow(self) -> None:
        """List, and then follow the changes until it is time to list again."""
        listed_at = self._clock()
        listing = self._api.list(self._kind, self._fields, self._namespace)
        self._complaint.works()
        with self._lock:
            self._objects = self._last(listing) | {_key(each): each for each in listing.items}
        self._changed()
        version = listing.resource_version
        # The pause is for a server, or a proxy, that ends each watch at once.
        while self._clock() - listed_at < LIST_EVERY and not self._closed.wait(LEAST_PAUSE):
            for change in self._api.watch(self._kind, version, self._fields, self._namespace):
                if self._closed.is_set():
                    return
                version = change.object.metadata.resource_version
                with self._lock:
                    if change.type == "DELETED":
                        self._objects.pop(_key(change.object), None)
                    else:
                        self._objects[_key(change.object)] = change.object
                self._changed()

    def _last(self, listing: Listing[AnyResource]) -> dict[tuple[str, str], AnyResource]:
        """The objects that cannot be read now, as they were."""
        known, keys = self._objects or {}, map(_key, listing.unreadable)
        return {key: known[key] for key in keys if key in known}


def _key(found: Resource | Unreadable) -> tuple[str, str]:
    return found.metadata.namespace, found.metadata.name


class Signal(Follower):
    """Notices that definitions may have changed. `changed` is called then."""

    def __init__(self, changes: Callable[[], Iterator[None]], changed: Callable[[], None]) -> None:
        super().__init__("definitions")
        self._changes = changes
        self._changed = changed
        self._is_set = threading.Event()
        self._start()

    def taken(self) -> bool:
        """Whether something may have changed since the last call."""
        was_set = self._is_set.is_set()
        self._is_set.clear()
        return was_set

    def _follow(self) -> None:
        try:
            for _ in self._changes():
                self._complaint.works()
                if self._closed.is_set():
                    return
                self._is_set.set()
                self._changed()
        except NotFound:
            self._closed.wait(KIND_EVERY)
            self._is_set.set()  # it may have been installed with its first definitions


class Polled(NamedTuple):
    """The Nodes as of a time after `began`. The poll was over at `ended`."""

    nodes: Sequence[Node]
    began: float
    ended: float


class NodePoll(Follower):
    """All Nodes, read again and again: their objects are large and change all the time, so they
    are not watched. `changed` is called after each poll.

    A poll may take long, and nothing waits for it.
    """

    def __init__(
        self,
        api: ClusterApi,
        changed: Callable[[], None],
        pause: Callable[[int], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("nodes")
        self._api = api
        self._changed = changed
        self._pause = pause
        self._clock = clock
        self._last: Polled | None = None
        self._start()

    @property
    def last(self) -> Polled | None:
        """The last poll; None before the first one has ended."""
        return self._last

    def _follow(self) -> None:
        began = self._clock()
        nodes = self._api.nodes()
        self._complaint.works()
        self._last = Polled(nodes, began, self._clock())
        took = self._last.ended - began
        if took > SLOW_AFTER:
            _log.warning("the API server took %.0f s for a list of %d nodes", took, len(nodes))
        self._changed()
        self._closed.wait(self._pause(len(nodes)))
