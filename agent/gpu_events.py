"""Events on pods that use more of a GPU than they may, where the agent has the Kubernetes API.

The client is loaded for the first of them: it costs 35 MB, and most agents never need it. Without
the API the log alone has them.
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
    from ipam.cluster.api import ClusterApi

OVER, KILLED = "GpuMemoryOverUse", "GpuMemoryOverUseKilled"
IN_CLUSTER = "KUBERNETES_SERVICE_HOST"  # a kubelet sets it in each container
_MOST_WAITING = 256
_PATIENCE = 2.0  # seconds that a close waits

_log = logging.getLogger(__name__)


class OverUseEvents:
    """Writes an event once for each pod, and once more when its processes are killed.

    `api` makes the client; None without an API server.
    """

    def __init__(
        self,
        environ: Mapping[str, str] = os.environ,
        api: "Callable[[Mapping[str, str]], ClusterApi | None]" = lambda environ: (
            cluster_addresses.api_of(environ, "a pod uses too much of a GPU", "no event tells it")
        ),
    ) -> None:
        self._environ = environ
        self._api = api
        self._waiting: queue.Queue[OverUse | None] = queue.Queue(_MOST_WAITING)
        self._thread: threading.Thread | None = None

    def tell(self, overuse: "OverUse") -> None:
        """Have an event written. Returns at once; one thread at a time may call it."""
        if IN_CLUSTER not in self._environ and cluster_addresses.KUBECONFIG not in self._environ:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, name="gpu-events", daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait(overuse)
        except queue.Full:
            _log.warning("GPUs: too many events wait: pod %s is not told", overuse.tenant.pod)

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
        from ipam.cluster.events import PendingEvents

        msgspec_warmup.build()  # of the modules that were imported just now
        events = PendingEvents(api)
        while (overuse := self._waiting.get()) is not None:
            reason = KILLED if overuse.killed else OVER
            container = f"container {overuse.tenant.container} " if overuse.tenant.container else ""
            events.of_pod(reason, f"{container}{overuse}", overuse.tenant.pod)
            events.send()
