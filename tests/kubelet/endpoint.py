"""The kubelet's connection to a device plugin."""

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

import grpc

from deviceplugin.api import v1beta1_pb2, v1beta1_pb2_grpc
from deviceplugin.kubelet.pod_resources import open_channel
from tests.waiting import PATIENCE

CONNECT = 10.0  # seconds

Devices = dict[str, tuple[bool, tuple[int, ...]]]  # id: healthy, NUMA nodes
Record = Callable[..., None]


class Endpoint:
    """One registered socket of a plugin: its calls, and its list in a thread."""

    def __init__(self, resource: str, socket: Path, record: Record, connect: float) -> None:
        """Connect and request the options. Raises grpc errors."""
        self.resource = resource
        self.socket = socket
        self.stopped = False
        self.lists: list[Devices] = []
        self._record = record
        self._channel = open_channel(socket)
        try:
            grpc.channel_ready_future(self._channel).result(timeout=connect)
            self._stub = v1beta1_pb2_grpc.DevicePluginStub(self._channel)  # type: ignore[no-untyped-call]
            self.options = self._stub.GetDevicePluginOptions(v1beta1_pb2.Empty())
        except BaseException:
            self._channel.close()
            raise
        record("GetDevicePluginOptions", resource)
        self._beginning = threading.Lock()  # `watch` and `close` come from different threads
        self._closed = False
        self._thread: threading.Thread | None = None
        self._watching: grpc.Call | None = None

    def watch(
        self,
        update: Callable[["Endpoint", Devices], None],
        lost: Callable[["Endpoint"], None],
    ) -> None:
        """Read the list in a thread: `update` for each message, `lost` at the end."""

        def read(watching: Iterable[v1beta1_pb2.ListAndWatchResponse]) -> None:
            try:
                for message in watching:
                    devices = {
                        device.ID: (
                            device.health == "Healthy",
                            tuple(node.ID for node in device.topology.nodes),
                        )
                        for device in message.devices
                    }
                    self.lists.append(devices)
                    update(self, devices)
            except grpc.RpcError:  # ended
                pass
            lost(self)

        with self._beginning:
            if not self._closed:
                self._record("ListAndWatch", self.resource)
                watching = self._watching = self._stub.ListAndWatch(v1beta1_pb2.Empty())
                self._thread = threading.Thread(
                    target=read, args=(watching,), name="kubelet-stand-in", daemon=True
                )
                self._thread.start()
                return
        lost(self)

    def preferred(
        self, available: Collection[str], must_include: Collection[str], size: int
    ) -> list[str]:
        """The preferred ids; empty if the plugin does not offer this call. Raises RpcError."""
        if not self.options.get_preferred_allocation_available:
            return []
        self._record("GetPreferredAllocation", self.resource, sorted(available), size)
        answer = self._stub.GetPreferredAllocation(
            v1beta1_pb2.PreferredAllocationRequest(
                container_requests=[
                    v1beta1_pb2.ContainerPreferredAllocationRequest(
                        available_deviceIDs=available,
                        must_include_deviceIDs=must_include,
                        allocation_size=size,
                    )
                ]
            )
        )
        responses = answer.container_responses
        return list(responses[0].deviceIDs) if responses else []

    def allocate(self, ids: Sequence[str]) -> v1beta1_pb2.ContainerAllocateResponse:
        """The response to a single container request. Raises RpcError or LookupError."""
        if self.stopped:
            raise LookupError(f"endpoint {self.socket} has been stopped")
        self._record("Allocate", self.resource, sorted(ids))
        answer = self._stub.Allocate(
            v1beta1_pb2.AllocateRequest(
                container_requests=[v1beta1_pb2.ContainerAllocateRequest(devices_ids=ids)]
            )
        )
        if not answer.container_responses:
            raise LookupError("no containers return in allocation response")
        response: v1beta1_pb2.ContainerAllocateResponse = answer.container_responses[0]
        return response

    def pre_start(self, ids: Sequence[str], timeout: float) -> None:
        """Call PreStartContainer if the plugin requires it. Raises RpcError."""
        self._record("PreStartContainer", self.resource, sorted(ids))
        request = v1beta1_pb2.PreStartContainerRequest(devices_ids=ids)
        self._stub.PreStartContainer(request, timeout=timeout)

    def close(self) -> None:
        """Close the connection, after its calls: gRPC 1.85 may crash otherwise."""
        with self._beginning:
            self._closed = True
        if self._watching is not None:
            self._watching.cancel()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(PATIENCE)
        self._channel.close()
