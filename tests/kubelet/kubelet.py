"""The kubelet's sockets, and pods that come and go."""

import random
import re
import stat
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import msgspec

from deviceplugin.api import podresources_pb2_grpc, v1beta1_pb2, v1beta1_pb2_grpc
from tests.kubelet import checkpoint
from tests.kubelet.devices import Given, Held, Manager, NotStarted, PodRejected, Request
from tests.kubelet.endpoint import CONNECT, Devices, Endpoint
from tests.kubelet.podresources import PodResources
from tests.waiting import PATIENCE

PRE_START = 30.0  # seconds


class Pod(msgspec.Struct, kw_only=True):
    """An admitted pod; `containers` by name, as they were started."""

    name: str
    namespace: str
    uid: str
    requests: list[Request]
    containers: dict[str, Given] = {}


class Call(msgspec.Struct, frozen=True):
    """A call between kubelet and plugin."""

    method: str
    resource: str
    ids: tuple[str, ...] = ()
    size: int = 0


class Kubelet:
    """A kubelet on a root directory (/var/lib/kubelet), from `start` until `stop`.

    `seed` decides the kubelet's random choices. An `old` kubelet drops a resource when any of its
    plugins hangs up. `refuse` gives, by resource, the error with which Register ends.
    `before_watch` is called within Register, before the kubelet requests the list; if it returns
    False, the kubelet never does.
    """

    def __init__(
        self,
        root: Path,
        *,
        seed: int = 0,
        old: bool = False,
        boot_id: str = "",
        init_containers_listed: bool = False,
        pre_start_timeout: float = PRE_START,
        connect_timeout: float = CONNECT,
    ) -> None:
        self.root = root
        self.directory = root / "device-plugins"
        self.socket = self.directory / "kubelet.sock"
        self.checkpoint = self.directory / "kubelet_internal_checkpoint"
        self.pods: dict[str, Pod] = {}
        self.calls: list[Call] = []
        self.refuse: dict[str, str] = {}
        self.before_watch: Callable[[Endpoint], Any] = lambda _: True
        self.pre_start_timeout = pre_start_timeout
        self.changed = threading.Condition(threading.RLock())
        self._admission = threading.Lock()
        self._choice = random.Random(seed)
        self._old = old
        self._boot_id = boot_id
        self._connect = connect_timeout
        self._manager = Manager(self._choice, old)
        self._endpoints: list[Endpoint] = []
        self._servers: list[grpc.Server] = []
        self._pod_resources = PodResources(self, init_containers_listed)
        self._up = False
        self._starts = 0

    def __enter__(self) -> "Kubelet":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # Start and stop.

    def start(self) -> None:
        """Remove old sockets, read the checkpoint, and make its own sockets."""
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.root / "pod-resources").mkdir(exist_ok=True)
        for path in self.directory.iterdir():
            with suppress(FileNotFoundError):  # a plugin has renamed or removed its socket
                if stat.S_ISSOCK(path.lstat().st_mode):
                    path.unlink()
        with self.changed:
            self._manager = Manager(self._choice, self._old)
            self._manager.held, registered = checkpoint.read(self.checkpoint)
            for resource in {*registered, *(held.resource for held in self._manager.held)}:
                self._manager.endpoints[resource] = None
                self._manager.devices[resource] = {}
            self._up = True
            self._starts += 1
        self._serve(self.root / "pod-resources/kubelet.sock", self._add_pod_resources)
        self._serve(self.socket, self._add_registration)

    def stop(self) -> None:
        """Stop and close every connection. May be called again."""
        with self.changed:
            self._up = False
            endpoints, self._endpoints = self._endpoints, []
            servers, self._servers = self._servers, []
        for server in servers:
            server.stop(0).wait()
        for endpoint in endpoints:
            endpoint.close()

    def restart(self) -> None:
        """Stop and start again; pods keep running."""
        self.stop()
        self.start()

    def wait(self, condition: Callable[[], Any], timeout: float = PATIENCE) -> Any:  # noqa: ANN401
        """Wait until the condition is true; returns its value. Raises AssertionError after
        `timeout`."""
        end = time.monotonic() + timeout
        with self.changed:
            while not (found := condition()):
                left = end - time.monotonic()
                if left <= 0:
                    raise AssertionError(f"not within {timeout} s; {self.calls[-8:]}")
                # The condition may depend on something other than this kubelet.
                self.changed.wait(min(left, 0.05))
            return found

    # Its state.

    def capacity(self, resource: str) -> int:
        """The capacity in the node's status: every device, healthy or not."""
        with self.changed:
            return len(self._manager.devices.get(resource, {}))

    def allocatable(self, resource: str) -> int:
        """The allocatable devices in the node's status: the healthy ones, held or not."""
        with self.changed:
            return len(self._manager.healthy(resource))

    def devices(self, resource: str) -> Devices:
        """The current list: id -> healthy, NUMA nodes."""
        with self.changed:
            return dict(self._manager.devices.get(resource, {}))

    def resources(self) -> list[str]:
        """The resources that have ever been registered."""
        with self.changed:
            return sorted(self._manager.endpoints)

    def endpoint(self, resource: str) -> Endpoint | None:
        """The plugin that serves the resource."""
        with self.changed:
            return self._manager.endpoints.get(resource)

    def held(self) -> list[Held]:
        """The ids that containers hold; frees those of deleted pods first."""
        with self.changed:
            self._manager.forget_all_but(self.pods)
            return list(self._manager.held)

    def count(self, method: str, resource: str) -> int:
        """How often a method was called."""
        with self.changed:
            return sum((call.method, call.resource) == (method, resource) for call in self.calls)

    # Pods.

    def admit(
        self,
        name: str,
        containers: Sequence[Request | Mapping[str, Any]],
        *,
        namespace: str = "default",
        uid: str = "",
        numa: Collection[int] | None = None,
        start: bool = True,
    ) -> Pod:
        """Admit a pod and start its containers. Raises PodRejected or NotStarted.

        Init containers come first. A rejected pod is not retried; its devices are freed with the
        next allocation. `numa` is the topology manager's choice, if any.
        """
        requests = [
            container if isinstance(container, Request) else msgspec.convert(container, Request)
            for container in containers
        ]
        requests.sort(key=lambda container: not container.init)
        pod = Pod(
            name=name,
            namespace=namespace,
            uid=uid or f"uid-of-{namespace}-{name}",
            requests=requests,
        )
        with self._admission:
            with self.changed:
                self._manager.forget_all_but(self.pods)
                self.pods[pod.uid] = pod
            try:
                for request in requests:
                    if self._manager.allocate(pod.uid, request, numa):
                        self._write()
            except PodRejected:
                self.remove(pod)
                raise
        if start:
            self.run(pod)
        return pod

    def readmit(self, pod: Pod) -> None:
        """Admit an existing pod again, as the kubelet does after a restart."""
        self.pods[pod.uid] = pod
        with self._admission:
            for request in pod.requests:
                self._manager.allocate(pod.uid, request, None)

    def run(self, pod: Pod) -> None:
        """Start the pod's containers. Raises NotStarted."""
        for request in pod.requests:
            pod.containers[request.name] = self._manager.start(
                pod.uid, request, self.pre_start_timeout
            )

    def remove(self, pod: Pod) -> None:
        """Remove a pod. Its devices are freed with the next allocation or List."""
        with self.changed:
            self.pods.pop(pod.uid, None)
            self.changed.notify_all()

    # Called by plugins and the registry.

    def register(self, resource: str, socket: Path) -> None:
        """Register a plugin. Raises grpc errors and ValueError."""
        if not is_extended_resource_name(resource):
            raise ValueError(f'the ResourceName "{resource}" is invalid')
        if resource in self.refuse:
            raise ValueError(self.refuse[resource])
        starts = self._starts
        endpoint = Endpoint(resource, socket, self.record, self._connect)
        with self.changed:
            same = self._up and self._starts == starts
            if same:
                self._manager.connected(endpoint)
                self._endpoints.append(endpoint)
        if not same:  # the next kubelet does not know this call
            endpoint.close()
            raise ValueError("the kubelet ends")
        if self.before_watch(endpoint):
            endpoint.watch(self._updated, self._lost)

    def record(self, method: str, resource: str, ids: Collection[str] = (), size: int = 0) -> None:
        """Record a call."""
        with self.changed:
            self.calls.append(Call(method, resource, tuple(ids), size))
            self.changed.notify_all()

    def hold(self, held: Sequence[Held], pods: Mapping[str, "Pod"]) -> None:
        """Let these pods, by UID, hold these devices, as if they had been admitted."""
        with self.changed:
            self._manager.held = list(held)
            self.pods.update(pods)
            self._write()

    def _updated(self, endpoint: Endpoint, devices: Devices) -> None:
        with self.changed:
            if not self._up:
                return
            self._manager.update(endpoint, devices)
            self._write()
            self.changed.notify_all()

    def _lost(self, endpoint: Endpoint) -> None:
        with self.changed:
            if self._up:
                self._manager.lost(endpoint)
            if endpoint in self._endpoints:
                self._endpoints.remove(endpoint)
            self.changed.notify_all()

    def _write(self) -> None:
        manager = self._manager
        # A test may have removed the directory.
        with self.changed, suppress(FileNotFoundError):
            registered = {name: sorted(manager.healthy(name)) for name in manager.devices}
            checkpoint.write(self.checkpoint, manager.held, registered, self._boot_id)

    def _serve(self, socket: Path, add: Callable[[grpc.Server], None]) -> None:
        server = grpc.server(ThreadPoolExecutor(8), options=(("grpc.so_reuseport", 0),))
        add(server)
        server.add_insecure_port(f"unix:{socket}")
        server.start()
        self._servers.append(server)

    def _add_registration(self, server: grpc.Server) -> None:
        v1beta1_pb2_grpc.add_RegistrationServicer_to_server(_Registration(self), server)  # type: ignore[no-untyped-call]

    def _add_pod_resources(self, server: grpc.Server) -> None:
        podresources_pb2_grpc.add_PodResourcesListerServicer_to_server(self._pod_resources, server)  # type: ignore[no-untyped-call]


class _Registration(v1beta1_pb2_grpc.RegistrationServicer):
    def __init__(self, kubelet: Kubelet) -> None:
        self._kubelet = kubelet

    def Register(
        self, request: v1beta1_pb2.RegisterRequest, context: grpc.ServicerContext
    ) -> v1beta1_pb2.Empty:
        self._kubelet.record("Register", request.resource_name, [request.endpoint])
        if request.version != "v1beta1":
            context.abort(
                grpc.StatusCode.UNKNOWN,
                f'requested API version "{request.version}" is not supported by kubelet. '
                'Supported version is ["v1beta1"]',
            )
        try:
            self._kubelet.register(
                request.resource_name, self._kubelet.directory / request.endpoint
            )
        except (grpc.RpcError, grpc.FutureTimeoutError, ValueError) as error:
            context.abort(grpc.StatusCode.UNKNOWN, str(error) or "failed to dial device plugin")
        return v1beta1_pb2.Empty()


def is_extended_resource_name(name: str) -> bool:
    """Whether it is a qualified name outside kubernetes.io, even after "requests." (helpers.go)."""
    if "/" not in name or "kubernetes.io/" in name or name.startswith("requests."):
        return False
    domain, _, rest = f"requests.{name}".partition("/")
    label = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
    return (
        len(domain) <= 253
        and re.fullmatch(rf"{label}(\.{label})*", domain) is not None
        and 0 < len(rest) <= 63
        and re.fullmatch(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]", rest) is not None
    )


__all__ = ["Kubelet", "NotStarted", "Pod", "PodRejected", "is_extended_resource_name"]
