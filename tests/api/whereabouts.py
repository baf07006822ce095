"""whereabouts' kinds and objects on a real API server, and the nodes that look at them."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import yaml
from msgspec.structs import replace

from ipam.cluster.api import ApiError
from ipam.cluster.kubernetes_api import KubernetesApi
from ipam.cluster.lessee import Lessee
from ipam.cluster.names import pool_name, space_name
from ipam.cluster.objects import (
    AddressBlock,
    AddressPool,
    Compat,
    Meta,
    PoolSpec,
    PoolStatus,
    Resource,
)
from ipam.cluster.whereabouts.objects import IPPool, OverlappingRangeIPReservation
from ipam.store_files import StoreFiles
from tests.api.server import ApiServer, Document
from tests.unit.ipam.cluster.nodes import READY, Clock, ClusterNode
from tests.waiting import until
from tools import manifests

GROUP = "whereabouts.cni.cncf.io"
NAMESPACE = "kube-system"
TEXT: Document = {"type": "string"}


def _fields(required: list[str], **properties: object) -> Document:
    return {"type": "object", "required": required, "properties": properties}


_ALLOCATION = _fields(["id", "podref"], id=TEXT, podref=TEXT, ifname=TEXT)
_SPECS: Mapping[str, Document] = {
    "IPPool": _fields(
        ["allocations", "range"],
        range=TEXT,
        allocations={"type": "object", "additionalProperties": _ALLOCATION},
    ),
    "OverlappingRangeIPReservation": _fields(
        ["podref"], podref=TEXT, containerid=TEXT, ifname=TEXT
    ),
    "NodeSlicePool": _fields(["range", "sliceSize"], range=TEXT, sliceSize=TEXT),
}


def install_kinds(server: ApiServer) -> None:
    """whereabouts' three kinds, as its version 0.9 has them, and an agent's right to them."""
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    for kind, spec in _SPECS.items():
        plural = f"{kind.lower()}s"
        parts = {"spec": spec}
        if kind == "NodeSlicePool":
            slices = _fields(["nodeName", "sliceRange"], nodeName=TEXT, sliceRange=TEXT)
            parts["status"] = _fields(
                ["allocations"], allocations={"type": "array", "items": slices}
            )
        schema = {"type": "object", "properties": parts}
        names = {
            "kind": kind,
            "plural": plural,
            "singular": kind.lower(),
            "listKind": f"{kind}List",
        }
        version = {"name": "v1alpha1", "served": True, "storage": True}
        definition = {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {"name": f"{plural}.{GROUP}"},
            "spec": {
                "group": GROUP,
                "scope": "Namespaced",
                "names": names,
                "versions": [{**version, "schema": {"openAPIV3Schema": schema}}],
            },
        }
        code, answer = server.send("POST", path, definition)
        assert code in (201, 409), answer
        server.kubectl(
            "wait", "--for=condition=Established", "--timeout=120s", f"crd/{plural}.{GROUP}"
        )
        served = f"/apis/{GROUP}/v1alpha1/{plural}"
        until(partial(_is_served, server, served), what=f"kind {kind}")
    allow(server)


def allow(server: ApiServer) -> None:
    """What the chart gives agents where `ipam.compat` is Coexist."""
    where = ("--show-only", "templates/cluster-addresses/agent.yaml")
    chart = yaml.safe_load_all(manifests.template("--set", "ipam.compat=Coexist", *where))
    rbac = "/apis/rbac.authorization.k8s.io/v1"
    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": "podfabric-agent-compat"},
        "rules": next(each["rules"] for each in chart if each and each["kind"] == "ClusterRole"),
    }
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": "podfabric-agent-compat"},
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "ClusterRole",
            "name": "podfabric-agent-compat",
        },
        "subjects": [{"kind": "ServiceAccount", "name": "podfabric", "namespace": "podfabric"}],
    }
    for path, body in ((f"{rbac}/clusterroles", role), (f"{rbac}/clusterrolebindings", binding)):
        code, answer = server.send("POST", path, body)
        assert code in (201, 409), answer


def _is_served(server: ApiServer, path: str) -> bool:
    return server.send("GET", path)[0] == 200


@contextmanager
def in_pod(
    server: ApiServer, root: Path, executable: Path, log: Path, **environ: str
) -> Iterator[None]:
    """A program that runs below `root` with the files and variables that it finds in its pod."""
    account = root / "var/run/secrets/kubernetes.io/serviceaccount"
    account.mkdir(parents=True)
    shutil.copy(executable, root / executable.name)
    admin = json.loads(server.plane.kubeconfig("admin").read_text())
    (account / "token").write_text(admin["users"][0]["user"]["token"])
    (account / "namespace").write_text(NAMESPACE)
    shutil.copy(server.plane.directory / "ca.crt", account / "ca.crt")
    host = {
        "KUBERNETES_SERVICE_HOST": "127.0.0.1",
        "KUBERNETES_SERVICE_PORT": str(server.plane.port),
    }
    with log.open("wb") as file:
        process = subprocess.Popen(
            ["chroot", str(root), f"/{executable.name}"],
            env={"PATH": os.environ["PATH"], **host, **environ},
            stdout=file,
            stderr=file,
        )
        try:
            yield
        finally:
            process.kill()
            process.wait()


@contextmanager
def ready_pool(
    server: ApiServer, range_: str, size: int, compat: Compat, name: str = ""
) -> Iterator[AddressPool]:
    """A pool as the controller leaves it; it and its blocks are gone afterwards."""
    made = server.admin.create(
        AddressPool(
            metadata=Meta(name=pool_name(name, range_)),
            spec=PoolSpec(range=range_, network_name=name, compat=compat),
        )
    )
    ready = replace(READY, last_transition_time="2026-01-01T00:00:00Z")
    status = PoolStatus(space=space_name(name, range_), block_size=size, conditions=(ready,))
    yield server.admin.update_status(replace(made, status=status))
    for block in server.admin.list(AddressBlock, {"spec.pool": made.metadata.name}).items:
        server.admin.delete(block)
    server.admin.delete(server.admin.get(AddressPool, made.metadata.name))
    for kind in (IPPool, OverlappingRangeIPReservation):
        until(lambda kind=kind: _is_empty(server, kind), 600.0, f"end of all {kind.KIND}")  # type: ignore[misc]


def _is_empty(server: ApiServer, kind: type[Resource]) -> bool:
    """Delete all objects of the kind; whether there were none. A large one takes long."""
    try:
        found = server.admin.list(kind).items
        for each in found:
            server.admin.delete(each)
    except ApiError:
        return False
    return not found


class MovingNode(ClusterNode):
    """A node of a real API server whose pods whereabouts may have set up."""

    def __init__(
        self, client: KubernetesApi, directory: Path, name: str, compat: Compat = "Read"
    ) -> None:
        self.client = client
        self.directory = directory
        self.name = name
        self.clock = Clock()
        self.boot = "boot-1"
        self.compat = compat
        self.files = StoreFiles(directory)
        self.restart()

    def restart(self, boot: str = "") -> None:
        self.boot = boot or self.boot
        self.close()
        self.files = StoreFiles(self.directory, report=lambda text: None)
        self.lessee = Lessee(
            self.client, self.files, self.name, self.boot, clock=self.clock, compat=True
        )
