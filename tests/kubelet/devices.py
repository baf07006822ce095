"""The kubelet's device manager: the devices, their holders, and their selection.

After pkg/kubelet/cm/devicemanager/manager.go and pod_devices.go of Kubernetes 1.33.
"""

import random
import threading
from collections.abc import Collection, MutableSequence
from typing import Any

import grpc
import msgspec

from deviceplugin.api import v1beta1_pb2
from tests.kubelet.endpoint import Devices, Endpoint

Response = v1beta1_pb2.ContainerAllocateResponse


class PodRejected(Exception):
    """Admission failed for good: `UnexpectedAdmissionError` of the pod's status."""

    reason = "UnexpectedAdmissionError"


class NotStarted(Exception):
    """A container of an admitted pod could not be started; the kubelet would try again."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A container of a pod."""

    name: str
    limits: dict[str, int] = {}
    init: bool = False
    restartable: bool = False  # an init container that keeps running: a sidecar


class Held(msgspec.Struct, kw_only=True):
    """The devices of one container for one resource."""

    uid: str
    container: str
    resource: str
    devices: dict[str, tuple[int, ...]]  # id: NUMA nodes
    response: Response


class Given(msgspec.Struct, kw_only=True):
    """The merged responses for all resources of a container."""

    env: dict[str, str] = {}
    devices: dict[str, tuple[str, str]] = {}  # path in the container: path on the host, rights
    mounts: dict[str, tuple[str, bool]] = {}  # path in the container: path on the host, read only
    annotations: dict[str, str] = {}
    cdi: list[str] = []
    ids: dict[str, list[str]] = {}  # by resource, sorted
    conflicts: list[str] = []  # values in which two resources differ; the first one is used


class FirstOne(random.Random):
    """A kubelet's choice of an order in which this resource comes first."""

    def __init__(self, first: str) -> None:
        super().__init__(0)
        self._first = first

    def shuffle(self, x: MutableSequence[Any]) -> None:
        super().shuffle(x)
        x[:] = sorted(x, key=lambda item: item != self._first)


class Manager:
    """The devices of every resource and their holders. One pod is admitted at a time.

    A plugin may call PodResources during its own call, so no lock is held then: each value is
    replaced as a whole.
    """

    def __init__(self, choice: random.Random, old: bool) -> None:
        self._lock = threading.Lock()
        self.devices: dict[str, Devices] = {}  # by resource
        self.endpoints: dict[str, Endpoint | None] = {}  # `None`: known from before a restart
        self.held: list[Held] = []
        self._choice = choice
        self._old = old
        self._reusable: dict[str, dict[str, set[str]]] = {}  # by pod, by resource

    def connected(self, endpoint: Endpoint) -> None:
        """Register a plugin: the newest one serves the resource."""
        self.endpoints[endpoint.resource] = endpoint

    def update(self, endpoint: Endpoint, devices: Devices) -> None:
        """Replace the whole list by a plugin's message."""
        if self._old or self.endpoints.get(endpoint.resource) is endpoint:
            self.devices[endpoint.resource] = dict(devices)

    def lost(self, endpoint: Endpoint) -> None:
        """A plugin's list has ended: nothing of the resource is healthy any more.

        Old kubelets drop the resource even if another endpoint serves it (kubernetes issue 121994).
        """
        current = self.endpoints.get(endpoint.resource)
        if current is None or not (self._old or current is endpoint):
            return
        current.stopped = True
        known = self.devices.get(endpoint.resource, {})
        self.devices[endpoint.resource] = {
            device_id: (False, numa) for device_id, (_, numa) in known.items()
        }

    def healthy(self, resource: str) -> set[str]:
        """The healthy ids, held or not."""
        return {
            device_id
            for device_id, (healthy, _) in self.devices.get(resource, {}).items()
            if healthy
        }

    def in_use(self, resource: str) -> set[str]:
        """The ids that containers hold."""
        return {
            device_id
            for held in self.held
            if held.resource == resource
            for device_id in held.devices
        }

    def forget_all_but(self, uids: Collection[str]) -> None:
        """Free the devices of pods that are gone, before an allocation or a List."""
        with self._lock:
            self.held = [held for held in self.held if held.uid in uids]

    def allocate(self, uid: str, request: Request, numa: Collection[int] | None) -> bool:
        """Give a container its devices; returns True if anything changed. Raises PodRejected."""
        for other in set(self._reusable) - {uid}:
            del self._reusable[other]
        reusable = self._reusable.setdefault(uid, {})
        changed = False
        resources = [name for name in request.limits if name in self.endpoints]
        self._choice.shuffle(resources)
        for resource in resources:
            changed |= self._allocate_one(uid, request, resource, reusable, numa)
        for held in self._of(uid, request.name):
            free = reusable.setdefault(held.resource, set())
            if request.init and not request.restartable:
                free |= set(held.devices)
            else:
                free -= set(held.devices)
        return changed

    def _allocate_one(
        self,
        uid: str,
        request: Request,
        resource: str,
        reusable: dict[str, set[str]],
        numa: Collection[int] | None,
    ) -> bool:
        needed = request.limits[resource]
        mine = [held for held in self._of(uid, request.name) if held.resource == resource]
        has = {device_id for held in mine for device_id in held.devices}
        if mine and len(has) != needed:
            raise PodRejected(
                f"pod {uid} container {request.name} changed request for resource {resource} from "
                f"{len(has)} to {needed}"
            )
        ids = self._choose(resource, needed, has, reusable.get(resource, set()), numa)
        if not ids:
            return False
        endpoint = self.endpoints[resource]
        if endpoint is None:
            raise PodRejected(f"endpoint of {resource} has been stopped")
        order = sorted(ids)
        self._choice.shuffle(order)
        try:
            response = endpoint.allocate(order)
        except grpc.RpcError as error:
            raise PodRejected(f"Allocate failed due to {_shown(error)}") from None
        except LookupError as error:
            raise PodRejected(f"Allocate failed due to {error}") from None
        listed = self.devices[resource]
        devices = {
            device_id: listed[device_id][1] if device_id in listed else ()
            for device_id in sorted(ids)
        }
        held = Held(
            uid=uid, container=request.name, resource=resource, devices=devices, response=response
        )
        with self._lock:
            self.held = [*self.held, held]
        return True

    def _choose(
        self,
        resource: str,
        needed: int,
        has: set[str],
        reusable: set[str],
        numa: Collection[int] | None,
    ) -> set[str]:
        """The kubelet's devicesToAllocate. Returns an empty list if nothing is needed."""
        healthy = self.healthy(resource)
        if resource not in self.devices:
            raise PodRejected(f"cannot allocate unregistered device {resource}")
        if not healthy:
            raise PodRejected(
                f"no healthy devices present; cannot allocate unhealthy devices {resource}"
            )
        if not has <= healthy:
            raise PodRejected(
                "previously allocated devices are no longer healthy; cannot allocate unhealthy "
                f"devices {resource}"
            )
        if has or needed == 0:
            return set()
        chosen: set[str] = set()

        def take(ids: Collection[str]) -> bool:
            left = sorted(set(ids) - chosen)
            self._choice.shuffle(left)
            chosen.update(left[: needed - len(chosen)])
            return len(chosen) == needed

        if take(reusable):
            return chosen
        available = healthy - self.in_use(resource)
        if len(available) < needed - len(chosen):
            raise PodRejected(
                f"requested number of devices unavailable for {resource}. Requested: "
                f"{needed - len(chosen)}, Available: {len(available)}"
            )
        aligned = self._aligned(resource, available, numa)
        if needed - len(chosen) < len(aligned):
            candidates = aligned
        else:
            if take(aligned):
                return chosen
            candidates = available
        endpoint = self.endpoints[resource]
        if endpoint is None:
            raise PodRejected(f"endpoint of {resource} has been stopped")
        try:
            preferred = endpoint.preferred(candidates | chosen, chosen, needed)
        except grpc.RpcError as error:
            raise PodRejected(f"GetPreferredAllocation failed due to {_shown(error)}") from None
        if take(candidates & set(preferred)) or take(candidates):
            return chosen
        raise PodRejected("unexpectedly allocated less resources than required")

    def _aligned(
        self, resource: str, available: set[str], numa: Collection[int] | None
    ) -> set[str]:
        if numa is None:
            return set()
        listed = self.devices[resource]
        return {device_id for device_id in available if set(listed[device_id][1]) & set(numa)}

    def start(self, uid: str, request: Request, timeout: float) -> Given:
        """The container's merged responses, after PreStartContainer. Raises NotStarted."""
        given = Given()
        holding = self._of(uid, request.name)
        self._choice.shuffle(holding)
        for held in holding:
            endpoint = self.endpoints.get(held.resource)
            if endpoint is not None and endpoint.options.pre_start_required:
                try:
                    endpoint.pre_start(list(held.devices), timeout)
                except grpc.RpcError as error:
                    text = f"device plugin PreStartContainer rpc failed with err: {_shown(error)}"
                    raise NotStarted(text) from None
            _merge(given, held)
        return given

    def _of(self, uid: str, container: str) -> list[Held]:
        return [held for held in self.held if (held.uid, held.container) == (uid, container)]


def _merge(given: Given, held: Held) -> None:
    response = held.response

    def put(into: dict, key: str, value: object) -> None:  # type: ignore[type-arg]
        if into.setdefault(key, value) != value:
            given.conflicts.append(f"{held.resource}: {key}: {value} is left out: {into[key]}")

    for key, text in response.envs.items():
        put(given.env, key, text)
    for device in response.devices:
        put(given.devices, device.container_path, (device.host_path, device.permissions))
    for mount in response.mounts:
        put(given.mounts, mount.container_path, (mount.host_path, mount.read_only))
    for key, text in response.annotations.items():
        put(given.annotations, key, text)
    given.cdi.extend(device.name for device in response.cdi_devices)
    given.ids[held.resource] = sorted(held.devices)


def _shown(error: grpc.RpcError) -> str:
    code = getattr(error, "code", lambda: None)()
    details = getattr(error, "details", lambda: str(error))()
    return f"rpc error: code = {getattr(code, 'name', '?')} desc = {details}"
