"""Writes this node's FabricNode on the API server.

The agent looks every `LOOK` seconds, and writes a change at most every `PAUSE` seconds. Without an
API server, or without the kind FabricNode on it, nothing is written.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec

from agent import leasing
from agent.observe.metrics import installed_version
from agent.observe.node_events import IN_CLUSTER, TOKEN
from base import decoding
from base.loop import Backoff, StepThread
from base.paths import Paths
from base.problems import Problems
from node import fabric_node
from node.fabric_node import FabricNode, FabricNodeStatus
from node.state import ThisNode

if TYPE_CHECKING:
    from kube.client import ClusterApi

LOOK = 4.0  # seconds from one look at the node to the next
PAUSE = 10.0  # seconds between two writes
_LONGEST = 600.0  # seconds from a failed write to the next attempt

_log = logging.getLogger(__name__)


class NodeReport(StepThread):
    """Keeps the FabricNode of this node. `mistakes` returns the errors of config.yaml by section.

    `api` returns a client, or `None` without an API server.
    """

    def __init__(
        self,
        paths: Paths,
        mistakes: Callable[[], Mapping[str, str]],
        environ: Mapping[str, str] = os.environ,
        api: "Callable[[Mapping[str, str]], ClusterApi | None]" = lambda environ: leasing.api_of(
            environ, "a FabricNode is to be written", "no FabricNode shows this node"
        ),
    ) -> None:
        super().__init__("node-report")
        self._paths = paths
        self._mistakes = mistakes
        self._environ = environ
        self._make_api = api
        self._api: ClusterApi | None = None
        self._stored: FabricNode | None = None
        self._written_at = float("-inf")
        self._backoff = Backoff(PAUSE, _LONGEST)
        self._problems = Problems(_log)

    def start(self) -> None:
        """Start the thread if the environment names this node and an API server."""
        in_pod = IN_CLUSTER in self._environ and TOKEN.exists()
        if self._environ.get(leasing.NODE_NAME) and (in_pod or leasing.KUBECONFIG in self._environ):
            super().start()

    def step(self) -> float:
        from kube.resources import ApiError

        status = fabric_node.observed(
            ThisNode(self._paths, tolerant=True), self._mistakes(), installed_version()
        )
        if self._stored is not None and _same(status, self._stored.status):
            return LOOK
        pause = self._written_at + PAUSE - time.monotonic()
        if pause > 0:
            return min(pause, LOOK)
        if self._api is None:
            self._api = self._make_api(self._environ)
            if self._api is None:
                return _LONGEST
            decoding.build_decoders()  # of the modules imported above
        try:
            self._stored = self._write(self._api, status)
        except ApiError as error:
            self._stored = None
            self._problems.tell("FabricNode", error)
            return self._backoff.pause()
        self._problems.tell("FabricNode", None)
        self._backoff.reset()
        self._written_at = time.monotonic()
        return LOOK

    def _write(self, api: "ClusterApi", status: FabricNodeStatus) -> FabricNode:
        """Write the status. The Node owns the object, so both are deleted together."""
        from kube.resources import Meta, Node, NotFound

        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        name, stored = self._environ[leasing.NODE_NAME], self._stored
        if stored is None:
            try:
                stored = api.get(FabricNode, name)
            except NotFound:
                node = api.get(Node, name)
                owner = {"apiVersion": "v1", "kind": "Node", "name": name, "uid": node.uid}
                meta = Meta(name=name, owner_references=(owner,))
                stored = api.create(FabricNode(metadata=meta))
        status = msgspec.structs.replace(status, written=now)
        return api.update_status(msgspec.structs.replace(stored, status=status))


def _same(status: FabricNodeStatus, stored: FabricNodeStatus) -> bool:
    return msgspec.structs.replace(stored, written="") == status
