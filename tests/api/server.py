"""A real API server with podfabric's objects, and clients of each kind that podfabric has."""

import json
import os
import subprocess
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from ssl import create_default_context
from typing import Any

from kube.requests import Pace
from kube.resources import Refused
from kube.transport import KubernetesApi
from tests.cluster import programs
from tests.cluster.control_plane import ControlPlane, control_plane
from tests.kernel.vm import layout
from tests.unit.kube.contract import block
from tests.waiting import until
from tools.manifests import KUSTOMIZE, NAMESPACE

Document = dict[str, Any]
ACCOUNT = "podfabric"
OURS = "/apis/ipam.podfabric.io/v1alpha1"
A_DAY = 86400  # seconds
_KINDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


def kind_of(
    group: str,
    kind: str,
    schema: Document,
    *,
    plural: str = "",
    version: str = "v1alpha1",
    **subresources: Document,
) -> Document:
    """A CustomResourceDefinition of another project, of objects in namespaces."""
    plural = plural or f"{kind.lower()}s"
    served = {"name": version, "served": True, "storage": True, "subresources": subresources}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": plural,
                "singular": plural.removesuffix("s"),
            },
            "versions": [{**served, "schema": {"openAPIV3Schema": schema}}],
        },
    }


_CONFIG = {"type": "object", "properties": {"config": {"type": "string"}}}
DEFINITIONS = kind_of(
    "k8s.cni.cncf.io",
    "NetworkAttachmentDefinition",
    {"type": "object", "properties": {"spec": _CONFIG}},
    plural="network-attachment-definitions",
    version="v1",
)


def definitions_of(namespace: str) -> str:
    """The path of the namespace's definitions."""
    return f"/apis/k8s.cni.cncf.io/v1/namespaces/{namespace}/network-attachment-definitions"


class ApiServer:
    """The server. `admin` has all rights."""

    def __init__(self, plane: ControlPlane, kubectl: Path) -> None:
        self.plane = plane
        self._kubectl = kubectl
        self._kubeconfig = plane.kubeconfig("admin")
        self._trust = create_default_context(cafile=str(plane.directory / "ca.crt"))
        user = json.loads(self._kubeconfig.read_text())["users"][0]["user"]
        self._token: str = user["token"]
        self.admin = self.client(self._kubeconfig)

    def client(self, kubeconfig: Path, timeout: float = 60.0, node: str = "") -> KubernetesApi:
        """A client that does not wait for its turn. With `node`, it is a client of that node's
        agent."""
        pace = Pace(rate=10_000, burst=10_000)
        return KubernetesApi(kubeconfig, timeout=timeout, pace=pace, node=node)

    def impatient(self, node: str) -> KubernetesApi:
        """A client of a node's agent with short timeouts, for a server that is down."""
        return self.client(self.plane.directory / f"{node}.kubeconfig", timeout=1.0, node=node)

    def kubectl(self, *words: str, stdin: str | None = None) -> str:
        """kubectl's output for the administrator."""
        done = subprocess.run(
            [str(self._kubectl), *words],
            env={**os.environ, "KUBECONFIG": str(self._kubeconfig)},
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"kubectl {words}: {done.stdout}{done.stderr}"
        return done.stdout

    def send(self, method: str, path: str, body: object = None) -> tuple[int, Document]:
        """The status and document of the answer to an administrator's request."""
        request = urllib.request.Request(
            f"https://127.0.0.1:{self.plane.port}{path}",
            method=method,
            data=body if body is None or isinstance(body, bytes) else json.dumps(body).encode(),
            headers={
                "Authorization": f"Bearer {self._token}",
                "Content-Type": "application/json",
            },
        )
        try:
            with urllib.request.urlopen(request, context=self._trust, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, _document(error.read())

    def make(self, path: str, body: object) -> Document:
        """Create an object; returns it.

        The server serves a new kind shortly after kubectl reports it as established.
        """
        status, document = 0, Document()

        def is_served() -> bool:
            nonlocal status, document
            status, document = self.send("POST", path, body)
            return status != HTTPStatus.NOT_FOUND

        until(is_served, what=f"kind at {path}")
        assert status == HTTPStatus.CREATED, document
        return document

    def install(self) -> None:
        """Apply podfabric's manifests, and wait until the kinds are served."""
        files = (KUSTOMIZE / "base/namespace.yaml", KUSTOMIZE / "base/podfabric.yaml")
        self.kubectl("apply", *(word for file in files for word in ("-f", str(file))))
        self.kubectl("wait", "--for=condition=Established", "--timeout=120s", "crd", "--all")
        until(self._serves_the_kinds, what="answer to a list of blocks")

    def install_kind(self, kind: Document) -> None:
        """Install a kind, which may exist, and wait until it is served."""
        status, answer = self.send("POST", _KINDS, kind)
        assert status in (HTTPStatus.CREATED, HTTPStatus.CONFLICT), answer
        group, names = kind["spec"]["group"], kind["spec"]["names"]
        path = f"/apis/{group}/{kind['spec']['versions'][0]['name']}/{names['plural']}"
        until(lambda: self.send("GET", path)[0] == HTTPStatus.OK, what=f"kind {names['kind']}")

    def define(self, config: object, namespace: str = "default", named: str = "") -> Document:
        """Create a NetworkAttachmentDefinition of a network configuration."""
        return self.make(
            definitions_of(namespace),
            {
                "apiVersion": "k8s.cni.cncf.io/v1",
                "kind": "NetworkAttachmentDefinition",
                "metadata": {"name": named or name("fabric")},
                "spec": {"config": json.dumps(config)},
            },
        )

    def await_policy(self, node: KubernetesApi, own: str) -> None:
        """Wait until the server applies the policies, some time after they are stored."""
        until(lambda: self._is_refused(node, own), what="policy of own blocks", pause=0.2)

    def node(self, name: str, **machine: str) -> KubernetesApi:
        """The client of an agent on a new node. Its token is bound to a pod of that node."""
        self.machine(name, **machine)
        return self.client(self._pods_kubeconfig(name), node=name)

    def machine(self, name: str, **machine: str) -> None:
        """Create a Node object, which is Ready."""
        self.make(
            "/api/v1/nodes",
            {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}},
        )
        _, node = self.send("GET", f"/api/v1/nodes/{name}")
        info = dict.fromkeys(_NODE_INFO, "") | machine
        self._set_status(name, node, {"nodeInfo": info, "conditions": [_ready("True")]})

    def silent(self, name: str) -> None:
        """Mark the Node as not ready, as if its kubelet were silent."""
        _, node = self.send("GET", f"/api/v1/nodes/{name}")
        self._set_status(name, node, {**node["status"], "conditions": [_ready("Unknown")]})

    def _set_status(self, name: str, node: Document, status: Document) -> None:
        code, answer = self.send("PUT", f"/api/v1/nodes/{name}/status", {**node, "status": status})
        assert code == 200, answer

    def remove_node(self, name: str, *, pods: bool) -> None:
        """Delete the Node, and with `pods` also its agent's pod."""
        code, answer = self.send("DELETE", f"/api/v1/nodes/{name}")
        assert code == 200, answer
        if pods:
            pod = f"/api/v1/namespaces/{NAMESPACE}/pods/agent-{name}"
            code, answer = self.send("DELETE", f"{pod}?gracePeriodSeconds=0")
            assert code == 200, answer

    def _pods_kubeconfig(self, node: str) -> Path:
        pods = f"/api/v1/namespaces/{NAMESPACE}/pods"
        pod = self.make(
            pods,
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": f"agent-{node}"},
                "spec": {
                    "nodeName": node,
                    "serviceAccountName": ACCOUNT,
                    "containers": [{"name": "agent", "image": "podfabric"}],
                },
            },
        )
        meta = pod["metadata"]
        bound = {"kind": "Pod", "apiVersion": "v1", "name": meta["name"], "uid": meta["uid"]}
        return self.kubeconfig(node, {"boundObjectRef": bound, "expirationSeconds": A_DAY})

    def kubeconfig(self, name: str, request: Document, account: str = ACCOUNT) -> Path:
        """The configuration of a client with a new token of the service account (default: the
        agents')."""
        accounts = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{account}"
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": request}
        token = self.make(f"{accounts}/token", body)["status"]["token"]
        document = json.loads(self._kubeconfig.read_text())
        document["users"][0]["user"] = {"token": token}
        path = self.plane.directory / f"{name}.kubeconfig"
        path.write_text(json.dumps(document))
        return path

    def _serves_the_kinds(self) -> bool:
        paths = ("addresspools", "addressblocks", "addressreservations")
        return all(self.send("GET", f"{OURS}/{path}")[0] == 200 for path in paths)

    def _is_refused(self, node: KubernetesApi, own: str) -> bool:
        try:
            node.delete(node.create(block(node=own)))
            other = node.create(block(node=f"not-{own}"))
        except Refused as error:
            return "may not lease for node" in str(error)
        self.admin.delete(other)
        return False


def _ready(status: str) -> Document:
    return {"type": "Ready", "status": status, "reason": "Test", "message": ""}


_NODE_INFO = (
    *("machineID", "systemUUID", "bootID", "kernelVersion", "osImage", "operatingSystem"),
    *("containerRuntimeVersion", "kubeletVersion", "kubeProxyVersion", "architecture"),
)


@contextmanager
def api_server() -> Iterator[ApiServer]:
    """A server with podfabric's objects, for the block."""
    version = os.environ.get("KUBERNETES", programs.KUBERNETES)
    wanted = {one.name: one for one in programs.programs(version)}
    both = [wanted["etcd"], wanted["kubernetes"]]
    etcd, kubernetes = programs.build(both)
    logs = layout.BUILD / "results-api"
    with control_plane(kubernetes, etcd, logs, controllers=False) as plane:
        server = ApiServer(plane, kubernetes / "kubectl")
        server.install()
        yield server


def name(prefix: str) -> str:
    """A unique name."""
    return f"{prefix}-{uuid.uuid4().hex[:8]}"


def _document(content: bytes) -> Document:
    """The answer to a failed request. It is a line of text if the kind is not served yet."""
    try:
        document: Document = json.loads(content)
    except ValueError:
        return {"message": content.decode(errors="replace")}
    return document
