"""Copies all objects of a kind from the API server, by watches or by polls.

A copy may be late. So a change names the resource version of the copy, and the API server refuses
the change if the object has another version.
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

LIST_EVERY = 600.0  # seconds; a list finds the changes that a watch has lost
LEAST_PAUSE = 0.1  # seconds between two watches
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds between two attempts after a failure
KIND_EVERY = 10.0  # seconds between two lists of a kind that is not installed
POLL_EVERY = 5.0  # seconds between two polls, or longer with many Nodes:
NODES_PER_SECOND = 100
SLOW_AFTER = 10.0  # seconds, after which a poll is logged as slow

_log = logging.getLogger(__name__)

Kept = TypeVar("Kept")
"""The part of an object that a Mirror keeps."""


class Follower(StepThread):
    """Follows the API server in a thread. `close` does not wait for a running request."""

    def __init__(self, what: str) -> None:
        super().__init__(f"following {what}", join=0.0)
        self._problems = Problems(_log)
        self._backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)

    def step(self) -> float:
        """Follow until the watch or poll ends. Returns the seconds until the next step."""
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
        """Do one watch or poll. Returns the seconds until the next one. Raises ApiError."""


class Mirror(Follower, Generic[Kept]):
    """A copy of a kind's objects. The thread calls `changed` after each change.

    `keep` returns the part of an object to keep. An object that becomes unreadable keeps its last
    state. If `may_lack`, a kind that is not installed has no objects.
    """

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
        """The kept objects. Returns `None` before the first list."""
        with self._lock:
            return None if self._objects is None else tuple(self._objects.values())

    def _follow(self) -> float:
        """List the objects, then watch their changes until LIST_EVERY has passed."""
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
        # The pause limits the requests if a server or proxy ends each watch at once.
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
        """Read all objects. Returns the version of the list."""
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
    """For `Mirror(keep=...)`: keep the whole object."""
    return found


def _key(found: Resource | Unreadable) -> tuple[str, str]:
    return found.metadata.namespace, found.metadata.name


class Polled(NamedTuple):
    """The Nodes that a poll read between `began` and `ended`."""

    nodes: tuple[Node, ...]
    began: float
    ended: float


def all_nodes(api: ClusterApi) -> tuple[Node, ...]:
    """All Node objects. An unreadable Node counts as a Node that is not ready."""
    listing = api.list(Node)
    unreadable = (Node(metadata=each.metadata) for each in listing.unreadable)
    return (*listing.items, *unreadable)


class NodePoll(Follower):
    """Reads all Nodes repeatedly. A watch would cost more, because Nodes change often."""

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
