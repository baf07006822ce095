"""Another device plugin, on a socket only, with behaviour that a kubelet must tolerate."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from deviceplugin.api import v1beta1_pb2 as api
from deviceplugin.api import v1beta1_pb2_grpc
from deviceplugin.kubelet.pod_resources import open_channel
from tests.waiting import PATIENCE


class Other(v1beta1_pb2_grpc.DevicePluginServicer):
    """Attributes set its answers. It registers once, when a test calls `register`."""

    def __init__(self, directory: Path, resource: str, count: int = 4) -> None:
        self.resource = resource
        self.options = api.DevicePluginOptions()
        self.numa: dict[str, int] = {}
        self.choice: list[str] = []
        self.answer = api.ContainerAllocateResponse()
        self.fails: set[str] = set()
        self.pre_start = 0.0  # seconds that PreStartContainer takes
        self.seen: list[list[str]] = []  # ids of every Allocate
        self._kubelet = directory / "kubelet.sock"
        self._count = count
        self._socket = directory / f"other-{resource.replace('/', '-')}.sock"
        self._server = grpc.server(ThreadPoolExecutor(8))
        v1beta1_pb2_grpc.add_DevicePluginServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self._server.add_insecure_port(f"unix:{self._socket}")
        self._server.start()

    def register(self, version: str = "v1beta1") -> None:
        """Register. Raises grpc.RpcError if the kubelet refuses."""
        with open_channel(self._kubelet) as channel:
            stub = v1beta1_pb2_grpc.RegistrationStub(channel)  # type: ignore[no-untyped-call]
            stub.Register(
                api.RegisterRequest(
                    version=version, endpoint=self._socket.name, resource_name=self.resource
                ),
                timeout=PATIENCE,
            )

    def close(self) -> None:
        """Stop the server."""
        self._server.stop(0).wait()

    def GetDevicePluginOptions(
        self, request: api.Empty, context: grpc.ServicerContext
    ) -> api.DevicePluginOptions:
        return self.options

    def ListAndWatch(
        self, request: api.Empty, context: grpc.ServicerContext
    ) -> Iterator[api.ListAndWatchResponse]:
        answer = api.ListAndWatchResponse()
        for number in range(self._count):
            device = answer.devices.add(ID=str(number), health="Healthy")
            if str(number) in self.numa:
                device.topology.nodes.add(ID=self.numa[str(number)])
        yield answer
        while context.is_active():
            time.sleep(0.05)

    def GetPreferredAllocation(
        self, request: api.PreferredAllocationRequest, context: grpc.ServicerContext
    ) -> api.PreferredAllocationResponse:
        self._perhaps_fail("GetPreferredAllocation", context)
        return api.PreferredAllocationResponse(
            container_responses=[api.ContainerPreferredAllocationResponse(deviceIDs=self.choice)]
        )

    def Allocate(
        self, request: api.AllocateRequest, context: grpc.ServicerContext
    ) -> api.AllocateResponse:
        self._perhaps_fail("Allocate", context)
        self.seen.extend(
            list(request_of_container.devices_ids)
            for request_of_container in request.container_requests
        )
        return api.AllocateResponse(container_responses=[self.answer])

    def PreStartContainer(
        self, request: api.PreStartContainerRequest, context: grpc.ServicerContext
    ) -> api.PreStartContainerResponse:
        end = time.monotonic() + self.pre_start
        while time.monotonic() < end and context.is_active():
            time.sleep(0.02)
        return api.PreStartContainerResponse()

    def _perhaps_fail(self, method: str, context: grpc.ServicerContext) -> None:
        if method in self.fails:
            context.abort(grpc.StatusCode.UNKNOWN, f"{method} is broken")
