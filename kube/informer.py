"""Follows the API server: copies of all objects of a kind, and polls.

A copy may be late. Changes based on it name the resource version, which the API server compares.
"""

import logging
import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from base.loop import Backoff, StepThread
from base.problems import Problems
from kube.client import ClusterApi
from kube.resources import AnyResource, ApiError, Node, NotFound, Resource, Unreadable, WatchExpired

LIST_EVERY = 600.0  # seconds: it finds lost events
LEAST_PAUSE = 0.1  # seconds between two watches
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # the same, after a failure
KIND_EVERY = 10.0  # seconds between two lists of a kind that is not installed
POLL_EVERY = 5.0  # seconds at least between two polls; more with many Nodes:
NODES_PER_SECOND = 100
SLOW_AFTER = 10.0  # seconds of a poll that is logged as slow

_log = logging.getLogger(__name__)

Kept = TypeVar("Kept")
"""The kept part of an object."""


class Follower(StepThread):
    """Follows something in a thread until `close`, which waits for no request."""

    def __init__(self, what: str) -> None:
        super().__init__(f"following {what}", join=0.0)
        self._problems = Problems(_log)
        self._backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)

    def step(self) -> float:
        """Follow until the watch or poll ends; returns the seconds to wait."""
        try:
            pause = self._follow()
        except WatchExpired:
            return LEAST_PAUSE
        except ApiError as error:
            self._problems.tell(self._name, error)
            return self._backoff.pause()
        self._backoff.reset()
        return pause

    @abstractmethod
    def _follow(self) -> float:
        """One watch or poll; returns the seconds to wait then. Raises ApiError."""


class Mirror(Follower, Generic[Kept]):
    """All objects of a kind, or of a namespace; of each the result of `keep`. One that becomes
    unreadable keeps its last state. `changed` is called after a change. `may_lack`: the kind may
    not be installed, and then there are no objects."""

    def __init__(
        self,
        api: ClusterApi,
        kind: type[AnyResource],
        keep: Callable[[AnyResource], Kept],
        changed: Callable[[], None],
        namespace: str = "",
        *,
        may_lack: bool = False,
    ) -> None:
        super().__init__(kind.PLURAL)
        self._namespace = namespace
        self._api = api
        self._kind: type[Any] = kind
        self._keep: Callable[[Any], Kept] = keep
        self._changed = changed
        self._may_lack = may_lack
        self._lock = threading.Lock()
        self._objects: dict[tuple[str, str], Kept] | None = None
        self.start()

    def items(self) -> tuple[Kept, ...] | None:
        """All objects; `None` before the first list."""
        with self._lock:
            return None if self._objects is None else tuple(self._objects.values())

    def _follow(self) -> float:
        """List, and then follow the changes until it is time to list again."""
        listed_at = time.monotonic()
        try:
            version = self._list()
        except NotFound:
            if not self._may_lack:
                raise
            self._objects = {}
            self._changed()
            return KIND_EVERY
        self._problems.tell(self._name, None)
        # The pause is for a server, or a proxy, that ends each watch at once.
        while time.monotonic() - listed_at < LIST_EVERY and not self._woken.wait(LEAST_PAUSE):
            for change in self._api.watch(self._kind, version, namespace=self._namespace):
                if self._ended.is_set():
                    return 0.0
                version = change.object.metadata.resource_version
                with self._lock:
                    assert self._objects is not None
                    if change.type == "DELETED":
                        self._objects.pop(_key(change.object), None)
                    else:
                        self._objects[_key(change.object)] = self._keep(change.object)
                self._changed()
        return LEAST_PAUSE

    def _list(self) -> str:
        """Read all objects; returns their version. Unreadable ones stay as they were."""
        known, objects, version = self._objects or {}, dict[tuple[str, str], Kept](), ""
        for page in self._api.pages(self._kind, namespace=self._namespace):
            objects |= {key: known[key] for key in map(_key, page.unreadable) if key in known}
            objects |= {_key(each): self._keep(each) for each in page.items}
            version = page.resource_version
        with self._lock:
            self._objects = objects
        self._changed()
        return version


def same(found: AnyResource) -> AnyResource:
    """Keeps the whole object, for `Mirror`."""
    return found


def _key(found: Resource | Unreadable) -> tuple[str, str]:
    return found.metadata.namespace, found.metadata.name


class Polled(NamedTuple):
    """The Nodes after `began`. The poll ended at `ended`."""

    nodes: tuple[Node, ...]
    began: float
    ended: float


def all_nodes(api: ClusterApi) -> tuple[Node, ...]:
    """All Node objects. An unreadable Node counts as a Node that is not ready."""
    listing = api.list(Node)
    unreadable = (Node(metadata=each.metadata) for each in listing.unreadable)
    return (*listing.items, *unreadable)


class NodePoll(Follower):
    """All Nodes, read repeatedly: they are large and change all the time, so they are not watched.
    `changed` is called after each poll. A poll may take long, and nothing waits for it."""

    def __init__(
        self,
        api: ClusterApi,
        changed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("nodes")
        self._api = api
        self._changed = changed
        self._clock = clock
        self.last: Polled | None = None  # before the first poll has ended
        self.start()

    def _follow(self) -> float:
        began = self._clock()
        nodes = all_nodes(self._api)
        self._problems.tell(self._name, None)
        self.last = Polled(nodes, began, self._clock())
        took = self.last.ended - began
        if took > SLOW_AFTER:
            _log.warning("the API server took %.0f s for a list of %d nodes", took, len(nodes))
        self._changed()
        return max(POLL_EVERY, len(nodes) / NODES_PER_SECOND)
