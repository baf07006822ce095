"""Holds the FabricNodes that the page shows, and wakes the readers of the page after a change."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence

from kube.client import ClusterApi
from kube.informer import Mirror, same
from node.fabric_node import FabricNode, FabricNodeStatus

Nodes = Sequence[tuple[str, FabricNodeStatus]]  # with the node's name

HEARTBEAT = 15.0  # seconds; also finds clients that have gone
_FIRST_LIST = 5.0  # seconds for which the first reader waits


class Feed:
    """`nodes` returns the present FabricNodes. Whoever changes them calls `changed`.

    `pause` is the time in seconds from a change to its event, for a page that costs much to draw.
    """

    def __init__(self, nodes: Callable[[], Nodes]) -> None:
        self.nodes = nodes
        self.version = 0
        self.pause = 0.0
        self._condition = threading.Condition()

    def changed(self) -> None:
        with self._condition:
            self.version += 1
            self._condition.notify_all()

    def wait(self, version: int, seconds: float) -> int:
        """Wait until the feed has another version, at most `seconds`. Returns its version."""
        with self._condition:
            self._condition.wait_for(lambda: self.version != version, seconds)
            return self.version

    def events(self, ended: Callable[[], bool]) -> Iterator[bytes]:
        """Yields a server-sent event after changes, at most one a second, until `ended`."""
        told, quiet = self.version, 0.0
        yield b"retry: 2000\n\n"
        while not ended():
            version = self.wait(told, 1.0)
            if version != told:
                time.sleep(self.pause)
                told, quiet = self.version, 0.0
                yield b"data: %d\n\n" % told
                time.sleep(1.0)
            elif (quiet := quiet + 1.0) >= HEARTBEAT:
                yield b":\n\n"
                quiet = 0.0


class ClusterFeed(Feed):
    """The FabricNodes of all nodes. The first reader starts the watch of the API server."""

    def __init__(self, api: ClusterApi) -> None:
        super().__init__(self._followed)
        self._api = api
        self._lock = threading.Lock()
        self._mirror: Mirror[FabricNode] | None = None

    def _followed(self) -> Nodes:
        with self._lock:
            if self._mirror is None:
                self._mirror = Mirror(self._api, FabricNode, same, self.changed, may_lack=True)
                self.wait(self.version, _FIRST_LIST)
        found = self._mirror.items() or ()
        return sorted((node.metadata.name, node.status) for node in found)

    def close(self) -> None:
        if self._mirror is not None:
            self._mirror.close()
