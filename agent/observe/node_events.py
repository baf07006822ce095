"""Writes events of an agent on its Node and on pods. Leases and policies write their own events.

The client of the API server costs 20 MB, so only the first event loads the client.
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
from base.pod import Pod

if TYPE_CHECKING:
    from gpu.limits.process_registration import Refusal
    from gpu.watch.enforcement import OverUse
    from kube.client import ClusterApi, PendingEvents

OVER, KILLED = "GpuMemoryOverUse", "GpuMemoryOverUseKilled"
REFUSED = "GpuRefused"
IN_CLUSTER = "KUBERNETES_SERVICE_HOST"  # a kubelet sets it in each container
TOKEN = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
_MOST_WAITING = 256
_FOR_LONG = 3600.0  # seconds; the next event wakes the thread

_log = logging.getLogger(__name__)

Write = Callable[["PendingEvents"], object]


class AgentEvents(StepThread):
    """Writes each event once, in a thread that the first event starts. Any thread may use it.

    `api` returns a client, or `None` without an API server.
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
        self._lock = threading.Lock()  # held while the thread is started
        self._events: PendingEvents | None = None

    def of_gpu(self, incident: "OverUse | Refusal") -> None:
        """Write an event on a pod: it uses too much memory of a GPU, or one of its processes could
        not register.

        A pod gets one event for over-use, one for killed processes, and one for each refusal text.
        """

        def write(events: "PendingEvents") -> None:
            from gpu.limits.process_registration import Refusal

            tenant = incident.tenant
            container = f"container {tenant.container} " if tenant.container else ""
            if isinstance(incident, Refusal):
                reason, text = REFUSED, incident.text
            else:
                reason, text = KILLED if incident.killed else OVER, str(incident)
            is_refusal = reason == REFUSED
            events.of_pod(reason, f"{container}{text}", tenant.pod, each_message=is_refusal)

        self._put(write)

    def of_pod(self, reason: str, message: str, pod: Pod) -> None:
        """Write an event on a pod, once for each text."""
        self._put(lambda events: events.of_pod(reason, message, pod, each_message=True))

    def of_node(self, reason: str, message: str) -> None:
        """Write an event on this node, if there is a kubeconfig or a service account's token."""
        name = self._environ.get(leasing.NODE_NAME, "")
        if not name or (leasing.KUBECONFIG not in self._environ and not TOKEN.exists()):
            return
        # The kubelet writes the node's name as the uid, and `kubectl describe` searches for it.
        node: dict[str, Any] = {"apiVersion": "v1", "kind": "Node", "name": name, "uid": name}
        self._put(lambda events: events.add(reason, message, node, message))

    def _run(self) -> None:
        super()._run()
        self.step()  # the last events before the end

    def step(self) -> float:
        if self._events is None:
            api = self._api(self._environ)
            if api is None:
                self._environ = {}  # the log has the reason
                self._waiting.clear()
                return _FOR_LONG
            from kube.client import PendingEvents

            decoding.build_decoders()  # of the modules imported above
            self._events = PendingEvents(api)
        while self._waiting:
            self._waiting.popleft()(self._events)
            self._events.send()
        return _FOR_LONG

    def _put(self, write: Write) -> None:
        if IN_CLUSTER not in self._environ and leasing.KUBECONFIG not in self._environ:
            return
        if len(self._waiting) >= _MOST_WAITING:
            _log.warning("too many events wait: the newest event is not written")
            return
        self._waiting.append(write)
        with self._lock:
            if self._thread is None:
                self.start()
        self.wake()
