"""The kubelet's PodResources API, v1."""

from typing import TYPE_CHECKING

import grpc

from deviceplugin.api import podresources_pb2 as api
from deviceplugin.api import podresources_pb2_grpc
from tests.kubelet.devices import Held

if TYPE_CHECKING:
    from tests.kubelet.kubelet import Kubelet, Pod


class PodResources(podresources_pb2_grpc.PodResourcesListerServicer):
    """The devices of pods, one entry per device. Old kubelets omit init containers."""

    def __init__(self, kubelet: "Kubelet", init_containers: bool) -> None:
        self._kubelet = kubelet
        self._init_containers = init_containers

    def List(
        self, request: api.ListPodResourcesRequest, context: grpc.ServicerContext
    ) -> api.ListPodResourcesResponse:
        with self._kubelet.changed:
            self._kubelet.held()
            return api.ListPodResourcesResponse(
                pod_resources=[self._pod(pod) for pod in self._kubelet.pods.values()]
            )

    def Get(
        self, request: api.GetPodResourcesRequest, context: grpc.ServicerContext
    ) -> api.GetPodResourcesResponse:
        wanted = request.pod_namespace, request.pod_name
        with self._kubelet.changed:
            for pod in self._kubelet.pods.values():
                if (pod.namespace, pod.name) == wanted:
                    return api.GetPodResourcesResponse(pod_resources=self._pod(pod))
        context.abort(
            grpc.StatusCode.UNKNOWN, f"pod {wanted[1]} in namespace {wanted[0]} not found"
        )
        raise AssertionError  # abort has raised

    def GetAllocatableResources(
        self, request: api.AllocatableResourcesRequest, context: grpc.ServicerContext
    ) -> api.AllocatableResourcesResponse:
        return api.AllocatableResourcesResponse(
            devices=[
                _entry(resource, device_id, numa)
                for resource in self._kubelet.resources()
                for device_id, (healthy, numa) in self._kubelet.devices(resource).items()
                if healthy
            ]
        )

    def _pod(self, pod: "Pod") -> api.PodResources:
        holders: dict[str, list[Held]] = {}
        for held in self._kubelet.held():
            if held.uid == pod.uid:
                holders.setdefault(held.container, []).append(held)
        return api.PodResources(
            name=pod.name,
            namespace=pod.namespace,
            containers=[
                api.ContainerResources(
                    name=request.name,
                    devices=[
                        _entry(held.resource, device_id, numa)
                        for held in holders.get(request.name, ())
                        for device_id, numa in held.devices.items()
                    ],
                )
                for request in pod.requests
                if self._init_containers or request.restartable or not request.init
            ],
        )


def _entry(resource: str, device_id: str, numa: tuple[int, ...]) -> api.ContainerDevices:
    topology = api.TopologyInfo(nodes=[api.NUMANode(ID=node) for node in numa]) if numa else None
    return api.ContainerDevices(resource_name=resource, device_ids=[device_id], topology=topology)
