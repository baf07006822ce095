"""Events on pods that use more of a GPU than they may, and on those whose processes get none.

They need the Kubernetes API; without it the log alone has them. Its client is loaded for the first
of them: it costs 35 MB, and most agents never need it.
"""

import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from agent import cluster_addresses
from base import msgspec_warmup

if TYPE_CHECKING:
    from gpu.enforcement import OverUse
    from gpu.refusals import Refusal
    from ipam.cluster.api import ClusterApi

OVER, KILLED = "GpuMemoryOverUse", "GpuMemoryOverUseKilled"
REFUSED = "GpuRefused"
IN_CLUSTER = "KUBERNETES_SERVICE_HOST"  # a kubelet sets it in each container
_MOST_WAITING = 256
_PATIENCE = 2.0  # seconds that a close waits

_log = logging.getLogger(__name__)


class GpuEvents:
    """Writes events on pods, each once.

    A pod has one of over-use, one when its processes are killed, and one for each reason for which
    its processes were refused. `api` makes the client; None without an API server.
    """

    def __init__(
        self,
        environ: Mapping[str, str] = os.environ,
        api: "Callable[[Mapping[str, str]], ClusterApi | None]" = lambda environ: (
            cluster_addresses.api_of(environ, "a pod is to be told of its GPU", "no event tells it")
        ),
    ) -> None:
        self._environ = environ
        self._api = api
        self._waiting: queue.Queue[OverUse | Refusal | None] = queue.Queue(_MOST_WAITING)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def tell(self, told: "OverUse | Refusal") -> None:
        """Have an event written. Returns at once; any thread may call it."""
        if IN_CLUSTER not in self._environ and cluster_addresses.KUBECONFIG not in self._environ:
            return
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._write, name="gpu-events", daemon=True)
                self._thread.start()
        try:
            self._waiting.put_nowait(told)
        except queue.Full:
            _log.warning("GPUs: too many events wait: pod %s is not told", told.tenant.pod)

    def close(self) -> None:
        """Write no more."""
        if self._thread is not None:
            try:
                self._waiting.put_nowait(None)
            except queue.Full:
                return
            self._thread.join(_PATIENCE)

    def _write(self) -> None:
        api = self._api(self._environ)
        if api is None:
            self._environ = {}  # the log has said why
            return
        from gpu.refusals import Refusal
        from ipam.cluster.events import PendingEvents

        msgspec_warmup.build()  # of the modules that were imported just now
        events = PendingEvents(api)
        while (told := self._waiting.get()) is not None:
            container = f"container {told.tenant.container} " if told.tenant.container else ""
            if isinstance(told, Refusal):
                reason, text = REFUSED, told.text
            else:
                reason, text = KILLED if told.killed else OVER, str(told)
            is_refusal = reason == REFUSED
            events.of_pod(reason, f"{container}{text}", told.tenant.pod, each_message=is_refusal)
            events.send()
