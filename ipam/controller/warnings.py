"""Reports each warning of the controller once, as an event. Limits the number of events."""

import logging
from collections.abc import Callable

from kube.client import ClusterApi
from kube.resources import NetworkDefinition, Resource, ServerMeta, Unreadable

MOST_EVENTS = 1000  # remembered events, and the most events in EVENTS_IN
MOST_OF_NAMESPACE = 100  # the same for a namespace: its tenants cannot suppress other events
EVENTS_IN = 3600.0  # seconds

_log = logging.getLogger(__name__)


class Reports:
    def __init__(self, api: ClusterApi, clock: Callable[[], float]) -> None:
        self._api = api
        self._clock = clock
        self._reported: dict[str, dict[tuple[str, ...], float]] = {}  # when, by namespace

    def definition(self, definition: ServerMeta, why: str) -> None:
        """Report a NetworkAttachmentDefinition without a pool."""
        message = f"this definition gets no AddressPool: {why}"
        self._report(
            "NoAddressPool", message, NetworkDefinition.API, NetworkDefinition.KIND, definition
        )

    def resource(self, reason: str, message: str, found: Resource, *, once: str = "") -> None:
        """Report one event for each value of `once`. If `once` is "", report each message once."""
        self._report(reason, message, found.API, found.KIND, found.metadata, once)

    def unreadable(self, found: Unreadable) -> None:
        self._report("Unreadable", found.why, found.api, found.kind, found.metadata)

    def _report(
        self, reason: str, message: str, api: str, kind: str, meta: ServerMeta, once: str = ""
    ) -> None:
        namespace, key = meta.namespace, (reason, kind, meta.name, meta.uid, once or message)
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
        _log.warning("%s %s: %s", kind, meta.name, message)
        regarding = {"apiVersion": api, "kind": kind, "name": meta.name, "uid": meta.uid}
        self._api.report(
            reason, message, regarding | ({"namespace": namespace} if namespace else {})
        )
