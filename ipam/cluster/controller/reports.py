"""Warning events of the controller: each is reported once, and not too many of them."""

import logging
from collections.abc import Callable
from typing import Any

from ipam.cluster.api import ClusterApi, Unreadable
from ipam.cluster.controller.definitions import UnusableDefinition
from ipam.cluster.objects import AddressPool, Resource

MOST_EVENTS = 1000  # remembered, so that each is reported once; and the most in EVENTS_IN
MOST_OF_NAMESPACE = 100  # the same, on objects of one namespace: its tenants silence nobody else's
EVENTS_IN = 3600.0  # seconds

_log = logging.getLogger(__name__)


class Reports:
    """What one leader has reported."""

    def __init__(self, api: ClusterApi, clock: Callable[[], float]) -> None:
        self._api = api
        self._clock = clock
        self._reported: dict[str, dict[tuple[str, ...], float]] = {}  # when, by namespace

    def definition(self, mistake: UnusableDefinition) -> None:
        """That a definition gets no pool."""
        definition = mistake.definition
        self._report(
            "NoAddressPool",
            f"it gets no AddressPool: {mistake.why}",
            {
                "apiVersion": "k8s.cni.cncf.io/v1",
                "kind": "NetworkAttachmentDefinition",
                "namespace": definition.namespace,
                "name": definition.name,
                "uid": definition.uid,
            },
            once=mistake.why,
        )

    def pool(self, reason: str, message: str, pool: AddressPool, *, once: str) -> None:
        """Something about a pool, once for each `once`."""
        self.resource(reason, message, pool, once=once)

    def resource(self, reason: str, message: str, found: Resource, *, once: str = "") -> None:
        """Something about any object, once for each `once`, or for each message."""
        meta = found.metadata
        regarding = {"apiVersion": found.API, "kind": found.KIND}
        if meta.namespace:
            regarding["namespace"] = meta.namespace
        regarding |= {"name": meta.name, "uid": meta.uid}
        self._report(reason, message, regarding, once=once or message)

    def unreadable(self, found: Unreadable) -> None:
        """That an object cannot be read, or not all of it."""
        meta = found.metadata
        regarding = {"apiVersion": found.api, "kind": found.kind, "namespace": meta.namespace}
        regarding |= {"name": meta.name, "uid": meta.uid}
        self._report("Unreadable", found.why, regarding, once=found.why)

    def _report(self, reason: str, message: str, regarding: dict[str, Any], *, once: str) -> None:
        key = (reason, *map(str, regarding.values()), once)
        namespace = str(regarding.get("namespace", ""))
        reported = self._reported.setdefault(namespace, {})
        if key in reported:
            return
        now = self._clock()
        if len(reported) >= (MOST_OF_NAMESPACE if namespace else MOST_EVENTS):
            oldest = next(iter(reported))
            if now - reported[oldest] < EVENTS_IN:
                return
            del reported[oldest]
        reported[key] = now
        _log.warning("%s %s: %s", regarding["kind"], regarding["name"], message)
        self._api.report(reason, message, regarding)
