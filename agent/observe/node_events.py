"""Events that an agent writes beside those of leases and policies: on its Node, and on pods.

They need the Kubernetes API; without it the log alone has them. Its client is loaded for the first
of them: it costs 20 MB, and most agents never need it.
"""

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent import leasing
from base import decoding
from base.loop import StepThread

if TYPE_CHECKING:
    from gpu.limits.process_registration import Refusal
    from gpu.watch.enforcement import OverUse
    from kube.client import ClusterApi
    from kube.events import PendingEvents

OVER, KILLED = "GpuMemoryOverUse", "GpuMemoryOverUseKilled"
REFUSED = "GpuRefused"
IN_CLUSTER = "KUBERNETES_SERVICE_HOST"  # a kubelet sets it in each container
TOKEN = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
_MOST_WAITING = 256
_FOR_LONG = 3600.0  # seconds; the next event wakes the thread

_log = logging.getLogger(__name__)

Write = Callable[["PendingEvents"], object]


class AgentEvents(StepThread):
    """Writes events, each once, in a thread that begins with the first. Any thread may use it.

    `api` makes the client; None without an API server.
    """

    def __init__(
        self,
        environ: Mapping[str, str] = os.environ,
        api: "Callable[[Mapping[str, str]], ClusterApi | None]" = lambda environ: leasing.api_of(
            environ, "an event is to be written", "no event is written"
        ),
    ) -> None:
        super().__init__("events")
        self._environ = environ
        self._api = api
        self._waiting: deque[Write] = deque()
        self._lock = threading.Lock()  # of the thread's start
        self._events: PendingEvents | None = None

    def of_gpu(self, told: "OverUse | Refusal") -> None:
        """On a pod that uses more of a GPU than it may, or whose processes get none.

        A pod has one of over-use, one when its processes are killed, and one for each reason for
        which its processes were refused.
        """

        def write(events: "PendingEvents") -> None:
            from gpu.limits.process_registration import Refusal

            container = f"container {told.tenant.container} " if told.tenant.container else ""
            if isinstance(told, Refusal):
                reason, text = REFUSED, told.text
            else:
                reason, text = KILLED if told.killed else OVER, str(told)
            is_refusal = reason == REFUSED
            events.of_pod(reason, f"{container}{text}", told.tenant.pod, each_message=is_refusal)

        self._put(write)

    def of_node(self, reason: str, message: str) -> None:
        """On this node. Where the agent has no token, nothing is written."""
        name = self._environ.get(leasing.NODE_NAME, "")
        if not name or (leasing.KUBECONFIG not in self._environ and not TOKEN.exists()):
            return
        # A kubelet's events have the node's name as its uid, and `kubectl describe` looks for it.
        node: dict[str, Any] = {"apiVersion": "v1", "kind": "Node", "name": name, "uid": name}
        self._put(lambda events: events.add(reason, message, node, message))

    def _run(self) -> None:
        super()._run()
        self.step()  # what came just before the end

    def step(self) -> float:
        """Write the events that wait."""
        if self._events is None:
            api = self._api(self._environ)
            if api is None:
                self._environ = {}  # the log has said why
                self._waiting.clear()
                return _FOR_LONG
            from kube.events import PendingEvents

            decoding.build_decoders()  # of the modules that were imported just now
            self._events = PendingEvents(api)
        while self._waiting:
            self._waiting.popleft()(self._events)
            self._events.send()
        return _FOR_LONG

    def _put(self, write: Write) -> None:
        if IN_CLUSTER not in self._environ and leasing.KUBECONFIG not in self._environ:
            return
        if len(self._waiting) >= _MOST_WAITING:
            _log.warning("too many events wait: one is not written")
            return
        self._waiting.append(write)
        with self._lock:
            if self._thread is None:
                self.start()
        self.wake()
