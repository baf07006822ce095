"""Answers the kubelet's calls for one pool: the device plugin API v1beta1.

This module has the protocol. A `ServedPool` has the pool's devices and makes the allocations.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import grpc

from deviceplugin.api import v1beta1_pb2, v1beta1_pb2_grpc

COALESCE = 0.2  # seconds between two lists on one stream
MOST_STREAMS = 16  # open streams, each in a thread of the server; the oldest is closed first

_log = logging.getLogger(__name__)

Listing = list[tuple[str, bool, tuple[int, ...]]]


class Rejected(Exception):
    """A call fails with the gRPC status `code`. The text has the reason and the remedy."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


class ServedPool:
    """A pool as the kubelet sees it. Several threads may call its methods at the same time."""

    pre_start_required = False
    """Whether the kubelet must call `pre_start` before each start of a container."""

    def __init__(self, name: str) -> None:
        self.name = name  # the resource: "rdma/hca"
        self._listing: Listing = []

    def listing(self) -> Listing:
        """All devices: id, whether healthy, NUMA nodes. Must not block."""
        return self._listing

    def relist(self, listing: Listing) -> bool:
        """Replace the listing. Returns True if the listing has changed."""
        changed = listing != self._listing
        self._listing = listing
        return changed

    def preferred(self, available: list[str], must_include: list[str], size: int) -> list[str]:
        """Choose up to `size` available ids that fit best together.

        The choice has all of `must_include`.
        """
        raise NotImplementedError

    def allocate(self, ids: list[str]) -> v1beta1_pb2.ContainerAllocateResponse:
        """The answer for a container with these ids. Raises Rejected."""
        raise NotImplementedError

    def pre_start(self, ids: list[str]) -> None:
        """Prepare the start of a container with these ids. Raises Rejected."""


class _Stream:
    def __init__(self) -> None:
        self.opened = time.monotonic()
        self.ended = False
        self.woken = True  # the call must compare the list
        self.again = False  # the call must send the list even if it is unchanged


class Streams:
    """The streams of a pool. Calls `on_change`, without a lock, when a stream opens or closes."""

    def __init__(self) -> None:
        self.on_change: Callable[[], object] = lambda: None
        self._changed = threading.Condition()  # of a stream's state, or of the set of streams
        self._open: list[_Stream] = []  # oldest first

    def turns(self, context: grpc.ServicerContext) -> Iterator[bool]:
        """Yield at once and after each `changed`, at least COALESCE seconds apart.

        Yields True if the call must send even an unchanged list.
        """
        stream = _Stream()
        with self._changed:
            self._open.append(stream)
            self._end(self._open[:-MOST_STREAMS])
        if not context.add_callback(lambda: self._drop(stream)):
            self._drop(stream)  # the call has already ended
        self.on_change()
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: stream.woken or stream.ended)
                    if stream.ended:
                        return
                    again, stream.again, stream.woken = stream.again, False, False
                yield again
                with self._changed:
                    self._changed.wait_for(lambda: stream.ended, COALESCE)
        finally:
            self._drop(stream)

    def changed(self, *, again: bool = False) -> None:
        """Make every stream send a changed list; with `again`, also an unchanged list."""
        with self._changed:
            for stream in self._open:
                stream.woken = True
                stream.again |= again
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._end(list(self._open))
        self.on_change()

    def since(self, moment: float) -> bool:
        """Whether an open stream was opened at `moment` (time.monotonic()) or later."""
        with self._changed:
            return bool(self._open) and self._open[-1].opened >= moment

    @property
    def count(self) -> int:
        with self._changed:
            return len(self._open)

    def _drop(self, stream: _Stream) -> None:
        with self._changed:
            was_open = not stream.ended
            if was_open:
                self._end([stream])
        if was_open:
            self.on_change()

    def _end(self, streams: list[_Stream]) -> None:
        for stream in streams:
            stream.ended = True
            self._open.remove(stream)
        self._changed.notify_all()


class Servicer(v1beta1_pb2_grpc.DevicePluginServicer):
    """The service /v1beta1.DevicePlugin."""

    def __init__(self, resource: ServedPool, streams: Streams) -> None:
        self._resource = resource
        self._streams = streams
        self.options = v1beta1_pb2.DevicePluginOptions(
            pre_start_required=resource.pre_start_required, get_preferred_allocation_available=True
        )

    def serve(self, server: grpc.Server) -> None:
        v1beta1_pb2_grpc.add_DevicePluginServicer_to_server(self, server)  # type: ignore[no-untyped-call]

    def GetDevicePluginOptions(
        self, request: v1beta1_pb2.Empty, context: grpc.ServicerContext
    ) -> v1beta1_pb2.DevicePluginOptions:
        """Return the options.

        Must not block, because the kubelet waits for the answer during Register.
        """
        return self.options

    def ListAndWatch(
        self, request: v1beta1_pb2.Empty, context: grpc.ServicerContext
    ) -> Iterator[v1beta1_pb2.ListAndWatchResponse]:
        """Send the whole list when the call starts, after each change, and on demand."""
        sent: Listing | None = None
        for again in self._streams.turns(context):
            try:
                listing = list(self._resource.listing())
                if listing == sent and not again:
                    continue
                devices = [_device(*device) for device in listing]
            except Exception:  # noqa: BLE001 - the next change may succeed
                _log.exception("%s: cannot make the list of devices", self._resource.name)
                continue
            sent = listing
            yield v1beta1_pb2.ListAndWatchResponse(devices=devices)

    def GetPreferredAllocation(
        self, request: v1beta1_pb2.PreferredAllocationRequest, context: grpc.ServicerContext
    ) -> v1beta1_pb2.PreferredAllocationResponse:
        """Choose ids. Never fails, because the kubelet would reject the pod after an error."""
        return v1beta1_pb2.PreferredAllocationResponse(
            container_responses=[
                v1beta1_pb2.ContainerPreferredAllocationResponse(
                    deviceIDs=self._preferred(container)
                )
                for container in request.container_requests
            ]
        )

    def Allocate(
        self, request: v1beta1_pb2.AllocateRequest, context: grpc.ServicerContext
    ) -> v1beta1_pb2.AllocateResponse:
        """Return one response per container request, in order. One failure fails the whole call."""
        answers = []
        for container in request.container_requests:
            ids = list(container.devices_ids)
            try:
                answers.append(
                    self._resource.allocate(ids) if ids else v1beta1_pb2.ContainerAllocateResponse()
                )
            except Exception as error:  # noqa: BLE001 - answered as an error
                self._fail(context, f"Allocate {_shown(ids)}", error)
        return v1beta1_pb2.AllocateResponse(container_responses=answers)

    def PreStartContainer(
        self, request: v1beta1_pb2.PreStartContainerRequest, context: grpc.ServicerContext
    ) -> v1beta1_pb2.PreStartContainerResponse:
        """Prepare a container's start. The kubelet waits at most 30 s."""
        ids = list(request.devices_ids)
        try:
            self._resource.pre_start(ids)
        except Exception as error:  # noqa: BLE001 - answered as an error
            self._fail(context, f"PreStartContainer {_shown(ids)}", error)
        return v1beta1_pb2.PreStartContainerResponse()

    def _preferred(self, request: v1beta1_pb2.ContainerPreferredAllocationRequest) -> list[str]:
        available = list(request.available_deviceIDs)
        must_include = list(request.must_include_deviceIDs)
        size = request.allocation_size
        try:
            return self._resource.preferred(available, must_include, size)
        except Exception:  # noqa: BLE001 - any choice is better than a pod that fails
            _log.exception(
                "%s: GetPreferredAllocation failed: answers with the first free ids",
                self._resource.name,
            )
        free = set(available)
        ordered = dict.fromkeys(
            [device_id for device_id in must_include if device_id in free] + available
        )
        return list(ordered)[: max(size, 0)]

    def _fail(self, context: grpc.ServicerContext, what: str, error: Exception) -> NoReturn:
        if isinstance(error, Rejected):
            code, text = error.code, str(error)
            _log.warning("%s: %s: %s", self._resource.name, what, text)
        else:
            code, text = grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}"
            _log.error("%s: %s: %s", self._resource.name, what, text, exc_info=error)
        context.abort(code, f"{self._resource.name}: {text}")


def _device(device_id: str, healthy: bool, numa: Sequence[int]) -> v1beta1_pb2.Device:
    device = v1beta1_pb2.Device(ID=device_id, health="Healthy" if healthy else "Unhealthy")
    # The kubelet uses -1 for devices without a node, and does not align these devices.
    nodes = sorted({node for node in numa if node >= 0})
    if nodes:
        device.topology.nodes.extend(v1beta1_pb2.NUMANode(ID=node) for node in nodes)
    return device


def _shown(ids: Sequence[str]) -> str:
    few = ", ".join(sorted(ids)[:8])
    return few if len(ids) <= 8 else f"{few} and {len(ids) - 8} more"
