"""nv-ipam's kinds on the API server, and nv-ipam's own programs if they were built."""

import json
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ipam.controller.rounds import Rounds
from ipam.nv_ipam.importing import FollowedPools
from ipam.nv_ipam.pool_import import NvCIDRPool, NvIPPool, NvPools
from ipam.nv_ipam.translate import NodePool, NodePools, read_pools
from tests.api.server import ACCOUNT, ApiServer, Document, kind_of
from tests.cluster import programs
from tests.unit.ipam.controller.cluster import read_world
from tests.unit.ipam.nv_ipam.nodes import NvNode
from tools.manifests import NAMESPACE as OURS

NAMESPACE = "nvidia-network-operator"
API = "nv-ipam.nvidia.com/v1alpha1"
PROGRAM = programs.Program(
    "nv-ipam",
    "github.com/Mellanox/nvidia-k8s-ipam",
    "3ce4a34",
    {name: f"cmd/{name}" for name in ("ipam-controller", "ipam-node", "nv-ipam")},
    archives=[("nvidia-k8s-ipam", "github.com/Mellanox/nvidia-k8s-ipam")],
)

_ROLE = f"""\
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {{name: podfabric-nv-ipam, namespace: {NAMESPACE}}}
rules:
  - {{apiGroups: [nv-ipam.nvidia.com], resources: [ippools, cidrpools], verbs: [list, watch]}}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {{name: podfabric-nv-ipam, namespace: {NAMESPACE}}}
roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: Role, name: podfabric-nv-ipam}}
subjects:
  - {{kind: ServiceAccount, name: {ACCOUNT}, namespace: {OURS}}}
"""
_ANY: Document = {
    "type": "object",
    "required": ["spec"],
    "x-kubernetes-preserve-unknown-fields": True,
}


def crds() -> list[str]:
    """nv-ipam's own kinds if its archive is available, else kinds of the same names."""
    archives = PROGRAM.archive_files()
    if archives:
        with tarfile.open(archives[0]) as archive:
            files = [
                archive.extractfile(member)
                for member in archive.getmembers()
                if "/deploy/crds/nv-ipam" in member.name
            ]
            return [file.read().decode() for file in files if file is not None]
    return [
        json.dumps(kind_of("nv-ipam.nvidia.com", kind, _ANY, status={}))
        for kind in ("IPPool", "CIDRPool")
    ]


def install(server: ApiServer) -> None:
    """Install the kinds, their namespace, and the rights that the chart gives with `nv_ipam:
    true`."""
    server.kubectl("create", "namespace", NAMESPACE)
    for document in (*crds(), _ROLE):
        server.kubectl("apply", "-f", "-", stdin=document)
    server.kubectl("wait", "--for=condition=Established", "--timeout=120s", "crd", "--all")


def put_pool(server: ApiServer, plural: str, name: str, spec: Mapping[str, Any]) -> None:
    """Create or change a pool."""
    kind = {"ippools": "IPPool", "cidrpools": "CIDRPool"}[plural]
    where = f"/apis/{API}/namespaces/{NAMESPACE}/{plural}"
    meta = {"name": name, "namespace": NAMESPACE}
    status, found = server.send("GET", f"{where}/{name}")
    if status == 200:
        status, found = server.send("PUT", f"{where}/{name}", found | {"spec": spec})
        assert status == 200, found
        return
    server.make(where, {"apiVersion": API, "kind": kind, "metadata": meta, "spec": spec})


def remove_pools(server: ApiServer) -> None:
    """Delete all pools: those of another test may have the same addresses."""
    for plural in ("ippools", "cidrpools"):
        where = f"/apis/{API}/namespaces/{NAMESPACE}/{plural}"
        for pool in server.send("GET", where)[1].get("items", ()):
            server.send("DELETE", f"{where}/{pool['metadata']['name']}")


def put_entries(server: ApiServer, plural: str, name: str, entries: list[dict[str, str]]) -> None:
    """Write the entries that nv-ipam's controller would write."""
    where = f"/apis/{API}/namespaces/{NAMESPACE}/{plural}/{name}"
    _, found = server.send("GET", where)
    found["status"] = {"allocations": entries}
    status, answer = server.send("PUT", f"{where}/status", found)
    assert status == 200, answer


def settling(server: ApiServer) -> Callable[[], None]:
    """A function that does a round of podfabric's controller."""

    def items() -> list[NvIPPool | NvCIDRPool]:
        admin = server.admin
        return [
            *admin.list(NvIPPool, namespace=NAMESPACE).items,
            *admin.list(NvCIDRPool, namespace=NAMESPACE).items,
        ]

    rounds = Rounds(server.admin, other_pools=NvPools(server.admin, items))

    def settle() -> None:
        rounds.round(read_world(server.admin, time.monotonic))
        assert not rounds.steps.taken_errors()

    return settle


class ApiNode(NvNode):
    """A node whose pools are followed by threads, and whose lessee has its own token."""

    def __init__(self, server: ApiServer, directory: Path, name: str) -> None:
        client = server.node(name, machineID=f"m-{name}", systemUUID=f"s-{name}")
        super().__init__(client, directory, name)

    def follow(self) -> FollowedPools:
        pools = FollowedPools(
            self.api, self.files, self.name, self.boot, NAMESPACE, self.daemon_store
        )
        pools.start()
        return pools

    @property
    def known(self) -> Mapping[str, NodePool]:
        """The pools that the node may use now."""
        found = read_pools(self.directory) or NodePools()
        return {key: pool for key, pool in found.pools.items() if pool.usable}


@contextmanager
def controller(server: ApiServer, executable: Path, log: Path) -> Iterator[None]:
    """nv-ipam's own controller."""
    arguments = ["--metrics-bind-address=0", "--health-probe-bind-address=0"]
    environment = {"KUBECONFIG": str(server.plane.kubeconfig("admin"))}
    with log.open("w") as written:
        process = subprocess.Popen(
            [executable, *arguments, f"--ippools-namespace={NAMESPACE}"],
            env=environment,
            stdout=written,
            stderr=written,
        )
        try:
            yield
        finally:
            process.kill()
            process.wait()


class NodeDaemon:
    """nv-ipam's node daemon and its executable, with files below `root`."""

    def __init__(self, server: ApiServer, programs_: Path, root: Path, node: str) -> None:
        self._server = server
        self._programs = programs_
        self._root = root
        self._node = node
        self.executable = programs_ / "nv-ipam"
        self.log = root / "daemon.log"

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        """Run the daemon for the block."""
        conf = self._root / "conf"
        conf.mkdir(parents=True, exist_ok=True)
        arguments = [
            "--metrics-bind-address=0",
            "--health-probe-bind-address=0",
            f"--node-name={self._node}",
            f"--ippools-namespace={NAMESPACE}",
            f"--bind-address=unix://{self._root}/daemon.sock",
            f"--store-file={self._root}/store",
            "--cni-skip-nv-ipam-binary-copy",
            f"--cni-conf-dir={conf}",
            f"--cni-daemon-socket=unix://{self._root}/daemon.sock",
            f"--cni-log-file={self._root}/shim.log",
        ]
        environment = {"KUBECONFIG": str(self._server.plane.kubeconfig("admin"))}
        with self.log.open("wb") as log:
            process = subprocess.Popen(
                [self._programs / "ipam-node", *arguments],
                env=environment,
                stdout=log,
                stderr=log,
            )
            try:
                yield process
            finally:
                process.kill()
                process.wait()

    def config(self, ipam: Mapping[str, Any], **more: object) -> bytes:
        """A definition that names the directory of this daemon's configuration."""
        keys = {"type": "nv-ipam", "confDir": str(self._root / "conf"), **ipam}
        document = {"cniVersion": "1.0.0", "name": "net", "type": "macvlan", "ipam": keys}
        return json.dumps(document | more).encode()

    def call(
        self, command: str, config: bytes, container: str, *args: str, ifname: str = "eth0"
    ) -> tuple[int, dict[str, Any]]:
        """The exit code and answer of one call."""
        done = subprocess.run(
            [self.executable],
            input=config,
            env={
                "CNI_COMMAND": command,
                "CNI_CONTAINERID": container,
                "CNI_IFNAME": ifname,
                "CNI_NETNS": "/none",
                "CNI_PATH": str(self.executable.parent),
                "CNI_ARGS": ";".join(
                    ("IgnoreUnknown=1", "K8S_POD_NAMESPACE=ns", f"K8S_POD_NAME={container}", *args)
                ),
            },
            capture_output=True,
            timeout=60,
            check=False,
        )
        return done.returncode, json.loads(done.stdout or b"{}")
