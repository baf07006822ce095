"""Decodes the objects of an answer one by one, so that an unreadable one hides no other.

The log names an unreadable object at once, a metric counts it while it exists, and the controller
writes an event.
"""

import logging
import threading
from collections import Counter
from collections.abc import Iterable
from itertools import chain

import msgspec
from prometheus_client.metrics_core import Metric

from base.scrape import gauge
from base.text import printable
from kube import encoding
from kube.resources import AnyResource, Resource, ServerMeta, Unreadable

Query = tuple[str, str]
"""A list and its watch: the path and the selector."""

_log = logging.getLogger(__name__)


class ObjectReader:
    """Remembers unreadable objects. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._noted: dict[Query, dict[tuple[str, str], Unreadable]] = {}

    def unreadable(self) -> tuple[Unreadable, ...]:
        """The unreadable objects of the last lists and since then, each once."""
        with self._lock:
            noted = list(chain.from_iterable(each.values() for each in self._noted.values()))
        return tuple({(each.kind, *_key(each.metadata)): each for each in noted}.values())

    def read(
        self, kind: type[AnyResource], document: msgspec.Raw
    ) -> tuple[AnyResource | None, Unreadable | None]:
        """The object, or `None` if it is unreadable; and the problem, if there is one."""
        try:
            bounded = encoding.bounded(document, kind.MOST_METADATA)
            found = encoding.decode(bounded, kind)
        except msgspec.MsgspecError as error:
            return None, _unreadable(kind, document, str(error))
        if bounded is document:
            return found, None
        why = (
            f"its metadata has more than {kind.MOST_METADATA} bytes: its labels, annotations, "
            "finalizers and owners are not read, and are removed with the next change"
        )
        return found, _unreadable(kind, document, why)

    def listed(self, query: Query, mistakes: Iterable[Unreadable]) -> None:
        """Replace a query's problems by those of a new list."""
        by_key = {_key(each.metadata): each for each in mistakes}
        with self._lock:
            before = self._noted.pop(query, {})
            if by_key:
                self._noted[query] = by_key
        for key, each in by_key.items():
            _log_once(each, before.get(key))

    def changed(self, query: Query, meta: ServerMeta, mistake: Unreadable | None) -> None:
        """Record a watch event of one object."""
        if mistake is None and query not in self._noted:
            return
        with self._lock:
            noted = self._noted.setdefault(query, {})
            before = noted.pop(_key(meta), None)
            if mistake is not None:
                noted[_key(meta)] = mistake
        if mistake is not None:
            _log_once(mistake, before)


def _unreadable(kind: type[Resource], document: msgspec.Raw, why: str) -> Unreadable:
    return Unreadable(kind.API, kind.KIND, encoding.server_meta(document), printable(why))


def unreadable_family(found: Iterable[Unreadable]) -> Metric:
    """The number of unreadable objects of each kind, for a scrape."""
    return gauge(
        "podfabric_unreadable_objects",
        "Objects on the API server that cannot be read, or not all of them.",
        ("kind",),
        Counter((each.kind,) for each in found),
    )


def _key(meta: ServerMeta) -> tuple[str, str]:
    return meta.namespace, meta.name


def _log_once(found: Unreadable, before: Unreadable | None) -> None:
    if before is None or before.why != found.why:
        name = "/".join(filter(None, _key(found.metadata)))
        _log.warning("%s %s cannot be read: %s", found.kind, name, found.why)
