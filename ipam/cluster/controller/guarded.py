"""A client that writes only while its process leads, and counts what goes wrong."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ipam.cluster.api import (
    ApiError,
    Change,
    ClusterApi,
    Lease,
    Listing,
    NetworkDefinition,
    Node,
    Unreadable,
    WatchExpired,
)
from ipam.cluster.objects import AnyResource, Resource


class NotLeading(ApiError):
    """The process does not lead (any more), so it writes nothing."""


class GuardedApi:
    """`ClusterApi` over another one. `may_write` is asked before each change.

    `errors` counts failed requests by verb and kind of error. A report is not a change: it decides
    nothing.
    """

    def __init__(
        self, api: ClusterApi, may_write: Callable[[], bool], errors: Counter[tuple[str, str]]
    ) -> None:
        self._api = api
        self._may_write = may_write
        self._errors = errors

    def get(self, kind: type[AnyResource], name: str, namespace: str = "") -> AnyResource:
        with self._counted("get"):
            return self._api.get(kind, name, namespace)

    def list(
        self,
        kind: type[AnyResource],
        fields: Mapping[str, str] | None = None,
        namespace: str = "",
        most: int = 0,
    ) -> Listing[AnyResource]:
        with self._counted("list"):
            return self._api.list(kind, fields, namespace, most)

    def create(self, new: AnyResource) -> AnyResource:
        with self._change("create"):
            return self._api.create(new)

    def update(self, changed: AnyResource) -> AnyResource:
        with self._change("update"):
            return self._api.update(changed)

    def update_status(self, changed: AnyResource) -> AnyResource:
        with self._change("update"):
            return self._api.update_status(changed)

    def patch(self, last: Resource, operations: Sequence[Mapping[str, Any]]) -> None:
        with self._change("patch"):
            self._api.patch(last, operations)

    def delete(self, last: AnyResource) -> None:
        with self._change("delete"):
            self._api.delete(last)

    def watch(
        self,
        kind: type[AnyResource],
        resource_version: str,
        fields: Mapping[str, str] | None = None,
        namespace: str = "",
    ) -> Iterator[Change[AnyResource]]:
        with self._counted("watch"):
            yield from self._api.watch(kind, resource_version, fields, namespace)

    def node(self, name: str) -> Node:
        with self._counted("get"):
            return self._api.node(name)

    def nodes(self, *, labels: bool = False) -> Sequence[Node]:
        with self._counted("list"):
            return self._api.nodes(labels=labels)

    def has_pods(self, node: str) -> bool:
        with self._counted("list"):
            return self._api.has_pods(node)

    def network_definitions(self) -> Iterator[NetworkDefinition]:
        with self._counted("list"):
            yield from self._api.network_definitions()

    def definition_changes(self) -> Iterator[None]:
        with self._counted("watch"):
            yield from self._api.definition_changes()

    def lease(self, namespace: str, name: str) -> Lease:
        with self._counted("get"):
            return self._api.lease(namespace, name)

    def write_lease(self, changed: Lease) -> Lease:
        with self._counted("update"):
            return self._api.write_lease(changed)

    def unreadable(self) -> Sequence[Unreadable]:
        return self._api.unreadable()

    def report(self, reason: str, message: str, regarding: Mapping[str, Any]) -> None:
        self._api.report(reason, message, regarding)

    @contextmanager
    def _change(self, verb: str) -> Iterator[None]:
        if not self._may_write():
            raise NotLeading(f"{verb}: this process does not lead")
        with self._counted(verb):
            yield

    @contextmanager
    def _counted(self, verb: str) -> Iterator[None]:
        try:
            yield
        except WatchExpired:
            raise
        except ApiError as error:
            self._errors[verb, type(error).__name__] += 1
            raise
