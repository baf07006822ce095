"""Events that an agent writes, each once for an object, from a background thread."""

import threading
from collections import OrderedDict, deque
from typing import Any

from base.pod import Pod
from kube.client import ClusterApi

_MOST = 1024  # events that are remembered, so that each is written once
_MOST_WAITING = 1024  # a restored etcd may lose many blocks with pods
_AT_ONCE = 4  # ADDs may wait behind them


class PendingEvents:
    """Collects events from any thread, until `send` writes them."""

    def __init__(self, api: ClusterApi) -> None:
        self._api = api
        self._lock = threading.Lock()
        self._seen: OrderedDict[tuple[str, ...], None] = OrderedDict()
        self._waiting: deque[tuple[str, str, dict[str, Any]]] = deque(maxlen=_MOST_WAITING)

    def of_pod(self, reason: str, message: str, pod: Pod, *, each_message: bool = False) -> None:
        """An event on a pod with a known name, once; with `each_message`, once for each text."""
        if pod.name and pod.namespace:
            regarding = {"apiVersion": "v1", "kind": "Pod", "namespace": pod.namespace}
            regarding |= {"name": pod.name, "uid": pod.uid}
            self.add(reason, message, regarding, message if each_message else "")

    def send(self, most: int = _AT_ONCE) -> bool:
        """Write a few pending events; returns whether more are pending. An event that cannot be
        written is dropped."""
        for _ in range(min(most, len(self._waiting))):
            self._api.report(*self._waiting.popleft())
        return bool(self._waiting)

    def add(self, reason: str, message: str, regarding: dict[str, Any], occasion: str = "") -> None:
        """An event on an object, once for each occasion."""
        key = (reason, *map(str, regarding.values()), occasion)
        with self._lock:
            if key in self._seen:
                return
            self._seen[key] = None
            if len(self._seen) > _MOST:
                self._seen.popitem(last=False)
            self._waiting.append((reason, message, regarding))
