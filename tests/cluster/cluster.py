"""A cluster of one node or two, for the block, and actions of tests through the API server."""

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from kubernetes.dynamic import DynamicClient
from kubernetes.stream import stream

from tests.cluster import built_image, images, programs
from tests.cluster.control_plane import SECOND_NODE, ControlPlane, control_plane
from tests.cluster.disk import MKFS, make_disk
from tests.cluster.node import RESULTS, Node
from tests.kernel.vm import debian, layout
from tests.waiting import until

Document = dict[str, Any]
"""An object of the API server, as YAML has it."""

PACKAGES = {
    "busybox-static": str(images.BUSYBOX),
    "e2fsprogs": MKFS,
    "openssh-client": "/usr/bin/ssh-keygen",
    "openssl": "/usr/bin/openssl",
    "util-linux": "/usr/bin/setpriv",
}
WORKLOADS = (images.WORKLOAD, images.OF_EXAMPLES)
MANIFESTS = Path(__file__).parent / "manifests"
PATIENCE = 420.0  # seconds for steps that take 40 on an idle machine
STATUS_ANNOTATION = "k8s.v1.cni.cncf.io/network-status"
NETWORKS_ANNOTATION = "k8s.v1.cni.cncf.io/networks"


class CommandNotStarted(Exception):
    """The kubelet did not start a command in a pod; the text has its reason."""


@dataclass
class Cluster:
    """A running cluster."""

    plane: ControlPlane
    node: Node
    images: Sequence[Path]  # archives on the node's disk

    @cached_property
    def api(self) -> client.ApiClient:
        """The client of an administrator."""
        kubeconfig = json.loads(self.plane.kubeconfig("admin").read_text())
        return config.new_client_from_config_dict(kubeconfig)

    @cached_property
    def core(self) -> client.CoreV1Api:
        """Nodes, pods and namespaces."""
        return client.CoreV1Api(self.api)

    @cached_property
    def objects(self) -> DynamicClient:
        """Objects of any kind."""
        return DynamicClient(self.api)

    def apply(self, document: Document, namespace: str | None = None) -> None:
        """Create the object, or change it to equal `document`."""
        resource = self.objects.resources.get(
            api_version=document["apiVersion"], kind=document["kind"]
        )
        name = document["metadata"]["name"]
        resource.server_side_apply(
            body=document,
            name=name,
            namespace=namespace,
            field_manager="tests",
            force_conflicts=True,
        )

    def apply_file(self, path: Path, namespace: str | None = None) -> None:
        """Apply every object of a file."""
        for document in yaml.safe_load_all(path.read_text()):
            self.apply(document, namespace)

    def allocatable(self, resource: str) -> int:
        """The number of device ids of a resource that the node offers to pods."""
        status = self.core.read_node(self.node.name).status
        return int((status.allocatable or {}).get(resource, 0))

    def is_ready(self) -> bool:
        """Whether the node is Ready."""
        conditions = self.core.read_node(self.node.name).status.conditions or []
        return any(each.type == "Ready" and each.status == "True" for each in conditions)

    def await_node(self) -> None:
        """Wait until the kubelet has created its Node and reports it as Ready."""
        until(self._has_node, PATIENCE, "node", pause=0.5)
        self._be_its_cloud()
        until(self.is_ready, PATIENCE, "ready node", pause=0.5)

    def _has_node(self) -> bool:
        return any(each.metadata.name == self.node.name for each in self.core.list_node().items)

    def _be_its_cloud(self) -> None:
        """Write the node's addresses into its status, as a cloud provider does.

        The API server reaches the kubelet at a port of this machine's loopback.
        """
        addresses = {"InternalIP": "10.0.2.15", "ExternalIP": "127.0.0.1"}
        status = {"addresses": [{"type": each, "address": at} for each, at in addresses.items()]}
        self.core.patch_node_status(self.node.name, {"status": status})
        self.core.patch_node(self.node.name, {"spec": {"taints": None}})


@dataclass
class Namespace:
    """A namespace of the cluster, and its pods."""

    cluster: Cluster
    name: str

    def apply(self, document: Document) -> None:
        """Create or change an object here."""
        self.cluster.apply(document, self.name)

    def network(self, name: str, configuration: Document, resource: str = "") -> None:
        """Create an attachment definition."""
        self.apply(network(name, configuration, resource))

    def pod(self, name: str, **options: Any) -> None:  # noqa: ANN401 - as `pod` takes them
        """Create a pod."""
        self.apply(pod(name, **options))

    def read(self, name: str) -> client.V1Pod:
        """A pod, read from the API server."""
        return self.cluster.core.read_namespaced_pod(name, self.name)

    def pods(self) -> list[client.V1Pod]:
        """All pods here."""
        items: list[client.V1Pod] = self.cluster.core.list_namespaced_pod(self.name).items
        return items

    def running(self, *names: str, patience: float = PATIENCE) -> list[client.V1Pod]:
        """Wait until these pods run and are ready."""
        try:
            until(
                lambda: all(is_ready(self.read(name)) for name in names),
                patience,
                f"running pods {', '.join(names)}",
                pause=0.5,
            )
        except AssertionError as error:
            said = "\n".join(f"{name}: {self.events(name)}" for name in names)
            raise AssertionError(f"{error}\n{said}") from None
        return [self.read(name) for name in names]

    def events(self, name: str) -> list[str]:
        """The events of a pod."""
        events = self.cluster.core.list_namespaced_event(
            self.name, field_selector=f"involvedObject.name={name}"
        ).items
        return [f"{each.reason}: {each.message}" for each in events]

    def run(self, pod: str, *command: str, container: str = "") -> str:
        """The standard output of a command in a pod.

        Raises AssertionError if it fails, CommandNotStarted if the kubelet could not start it.
        """
        options = {"container": container} if container else {}
        try:
            peer = stream(
                self.cluster.core.connect_get_namespaced_pod_exec,
                pod,
                self.name,
                command=list(command),
                stdout=True,
                stderr=True,
                _preload_content=False,
                **options,
            )
        except ApiException as error:
            raise CommandNotStarted(f"{command}: {error.reason}") from None
        peer.run_forever(timeout=PATIENCE)
        output, errors = peer.read_stdout(), peer.read_stderr()
        try:
            status = peer.returncode
        except ValueError as error:  # the client expects a number in place of the kubelet's reason
            raise CommandNotStarted(f"{command}: {error}") from None
        assert status == 0, f"{command}: {status}: {output}{errors}"
        return str(output)

    def await_commands(self, pod: str) -> None:
        """Wait until the kubelet can run commands in a pod, through the container runtime."""

        def can_run() -> bool:
            try:
                self.run(pod, "true")
            except CommandNotStarted:
                return False
            return True

        until(can_run, PATIENCE, f"command in {pod}", pause=1)

    def networks(self, pod: str) -> dict[str, Document]:
        """The interfaces of a pod in Multus' annotation, by their names."""
        annotation = self.read(pod).metadata.annotations[STATUS_ANNOTATION]
        return {each["interface"]: each for each in json.loads(annotation)}

    def address(self, pod: str, interface: str = "net1") -> str:
        """The first address of one of a pod's interfaces."""
        address: str = self.networks(pod)[interface]["ips"][0]
        return address

    def delete(self, *names: str, grace: int | None = None) -> None:
        """Delete pods and wait until they are gone."""
        for name in names:
            self.cluster.core.delete_namespaced_pod(name, self.name, grace_period_seconds=grace)
        until(
            lambda: not any(self.exists(name) for name in names),
            PATIENCE,
            f"end of {', '.join(names)}",
            pause=0.5,
        )

    def exists(self, name: str) -> bool:
        """Whether a pod of that name exists."""
        try:
            self.read(name)
        except ApiException as error:
            if error.status == 404:
                return False
            raise
        return True


@contextmanager
def namespaces(cluster: Cluster, names: Sequence[str]) -> Iterator[list[Namespace]]:
    """Namespaces for the block, in which pods can be created. Deleted afterwards."""
    for name in names:
        cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    for name in names:
        account = f"service account of {name}"
        until(lambda name=name: _has_account(cluster, name), what=account, pause=0.2)  # type: ignore[misc]
    yield [Namespace(cluster, name) for name in names]
    for name in names:
        cluster.core.delete_namespace(name)
    for name in names:
        end = f"end of namespace {name}"
        until(lambda name=name: not _exists(cluster, name), PATIENCE, end, pause=1)  # type: ignore[misc]


def _has_account(cluster: Cluster, namespace: str) -> bool:
    accounts = cluster.core.list_namespaced_service_account(namespace).items
    return any(each.metadata.name == "default" for each in accounts)


def _exists(cluster: Cluster, namespace: str) -> bool:
    try:
        cluster.core.read_namespace(namespace)
    except ApiException as error:
        if error.status == 404:
            return False
        raise
    return True


def is_ready(pod: client.V1Pod) -> bool:
    """Whether the pod runs and its containers are ready."""
    statuses = pod.status.container_statuses or []
    return pod.status.phase == "Running" and bool(statuses) and all(it.ready for it in statuses)


def network(name: str, configuration: Document, resource: str = "") -> Document:
    """An attachment definition."""
    metadata: Document = {"name": name}
    if resource:
        metadata["annotations"] = {"k8s.v1.cni.cncf.io/resourceName": resource}
    full = {"cniVersion": "1.0.0", "name": name, **configuration}
    return {
        "apiVersion": "k8s.cni.cncf.io/v1",
        "kind": "NetworkAttachmentDefinition",
        "metadata": metadata,
        "spec": {"config": json.dumps(full)},
    }


def pod(
    name: str,
    networks: str | Sequence[Mapping[str, object]] = "",
    devices: Mapping[str, int] | None = None,
) -> Document:
    """A pod that only sleeps, with these networks, and devices by their resources."""
    asked = networks if isinstance(networks, str) else json.dumps(networks)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": {"app": "test"},
            "annotations": {NETWORKS_ANNOTATION: asked} if asked else {},
        },
        "spec": pod_spec(devices),
    }


def pod_spec(devices: Mapping[str, int] | None = None) -> Document:
    """The spec of a pod that only sleeps."""
    container: Document = {"name": "main", "image": images.WORKLOAD}
    if devices:
        container["resources"] = {"limits": {name: str(n) for name, n in devices.items()}}
    return {
        "containers": [container],
        "terminationGracePeriodSeconds": 2,
        "automountServiceAccountToken": False,
    }


@contextmanager
def cluster(kubernetes: str) -> Iterator[Cluster]:
    """A cluster of this version of Kubernetes, with Multus, for the block.

    Its node has the images of podfabric and of the tests.
    """
    debian.install(PACKAGES)
    wanted = programs.programs(kubernetes)
    programs.build(wanted)
    directories = {each.name: each.directory() for each in wanted}
    shutil.rmtree(RESULTS, ignore_errors=True)
    layout.BUILD.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        plane = stack.enter_context(
            control_plane(directories["kubernetes"], directories["etcd"], RESULTS / "control-plane")
        )
        files = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=layout.BUILD)))
        archives = {name: files / f"workload-{n}.tar" for n, name in enumerate(WORKLOADS)}
        for name, archive in archives.items():
            images.write_workload(archive, name)
        writers = (images.write_for_gpus, images.write_for_verbs, images.write_for_jobs)
        others = {write: files / f"other-{n}.tar" for n, write in enumerate(writers)}
        for write, archive in others.items():
            write(archive)
        disk = files / "disk"
        every = [built_image.built(), *archives.values(), *others.values()]
        make_disk(disk, directories["containerd"], every)
        node = Node(directories, plane, disk)
        stack.callback(node.pull_the_plug)
        whole = Cluster(plane, node, every)
        node.boot()
        start_services(whole)
        for manifest in sorted(MANIFESTS.glob("*.yaml")):
            whole.apply_file(manifest)
        node.install_multus()
        whole.await_node()
        yield whole
        assert node.power_off() == 0, f"the node's kernel complained; see {RESULTS}"


@contextmanager
def second_node(first: Cluster) -> Iterator[Cluster]:
    """The cluster with another node for the block, and as that node sees it."""
    with tempfile.TemporaryDirectory(dir=layout.BUILD) as files:
        programs, disk = first.node.programs, Path(files) / "disk"
        make_disk(disk, programs["containerd"], first.images)
        node = Node(programs, first.plane, disk, SECOND_NODE, "-cluster-2")
        whole = Cluster(first.plane, node, first.images)
        try:
            node.boot()
            start_services(whole)
            node.install_multus()
            whole.await_node()
            yield whole
        finally:
            node.pull_the_plug()
            whole.core.delete_node(node.name)


def start_services(cluster: Cluster) -> None:
    """Start the services that a node's init starts."""
    cluster.node.start_containerd()
    cluster.node.start_kubelet()
    cluster.node.start_api_service()
