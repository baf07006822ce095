"""The control plane, natively on this machine's loopback: etcd, API server, controllers, scheduler.

Each control plane has its own ports, so several may run at once. All of its processes end with the
process that starts them, even if that is killed.
"""

import base64
import json
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from base.files import write_atomically
from tests.waiting import until

HOST_OF_NODE = "10.0.2.2"
"""This machine's loopback, as the node sees it through QEMU's network."""
NODE, SECOND_NODE = "node-1", "node-2"
SERVICES = "10.96.0.0/16"
SERVED_NAMES = (
    f"IP:127.0.0.1,IP:{HOST_OF_NODE},IP:10.96.0.1,DNS:localhost,DNS:kubernetes.default.svc"
)
USERS: Mapping[str, str] = {
    "admin": "system:masters",
    "system:kube-controller-manager": "",
    "system:kube-scheduler": "",
    "multus": "",
}
"""User: its groups. `node_user` adds the nodes."""


def node_user(node: str) -> str:
    """The user name of a node's kubelet."""
    return f"system:node:{node}"


def free_port() -> int:
    """A free port of the loopback."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@dataclass
class ControlPlane:
    """A running control plane, and the files that its clients need."""

    directory: Path
    programs: Path
    etcd_program: Path
    node: str = NODE
    port: int = field(default_factory=free_port)
    etcd_port: int = field(default_factory=free_port)
    _secret: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    _running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def kubeconfig(self, user: str, host: str = "127.0.0.1") -> Path:
        """The configuration of a client that is `user` and reaches the API server at `host`."""
        path = self.directory / f"{user.replace(':', '-')}@{host}.kubeconfig"
        cluster = {
            "server": f"https://{host}:{self.port}",
            "certificate-authority-data": base64.b64encode(self.ca().encode()).decode(),
        }
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": user, "user": {"token": self._token(user)}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": user}}],
        }
        # A program that has just started may read the file, so it must be complete at any time.
        write_atomically(path, json.dumps(document).encode(), 0o644, durable=False)
        return path

    def ca(self) -> str:
        """The certificate that signs the API server's and its clients' certificates."""
        return (self.directory / "ca.crt").read_text()

    def start(self, controllers: bool = True) -> None:
        """Start all of it and wait until the API server is ready."""
        self._make_certificates()
        nodes = dict.fromkeys(map(node_user, (self.node, SECOND_NODE)), "system:nodes")
        rows = [
            f'{self._token(user)},{user},{user},"{groups}"'
            for user, groups in {**USERS, **nodes}.items()
        ]
        (self.directory / "tokens.csv").write_text("\n".join(rows) + "\n")
        self._start_etcd()
        self.start_api_server()
        if controllers:
            for name in ("kube-controller-manager", "kube-scheduler"):
                self._start_controllers(name)

    def start_api_server(self) -> None:
        """Start the API server and wait until it is ready."""
        at = self.directory
        self._start(
            self.programs / "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{self.etcd_port}",
            f"--secure-port={self.port}",
            "--bind-address=127.0.0.1",
            f"--advertise-address={HOST_OF_NODE}",
            "--endpoint-reconciler-type=none",
            f"--cert-dir={at}",
            f"--tls-cert-file={at}/server.crt",
            f"--tls-private-key-file={at}/server.key",
            f"--client-ca-file={at}/ca.crt",
            f"--kubelet-client-certificate={at}/kubelet-client.crt",
            f"--kubelet-client-key={at}/kubelet-client.key",
            # The node is behind QEMU's network; this machine forwards a port to its kubelet.
            "--kubelet-preferred-address-types=ExternalIP,InternalIP",
            f"--token-auth-file={at}/tokens.csv",
            "--authorization-mode=Node,RBAC",
            "--allow-privileged=true",
            f"--service-cluster-ip-range={SERVICES}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={at}/accounts.key",
            f"--service-account-signing-key-file={at}/accounts.key",
        )
        until(self.is_ready, what=f"ready API server; its log is in {self.directory}")

    def stop_api_server(self) -> None:
        """Kill the API server. It answers again after the next start."""
        self._kill("kube-apiserver")

    def save_etcd(self, copy: Path) -> None:
        """Stop etcd, copy its data, and start it again."""
        self._stop_store()
        shutil.copytree(self.directory / "etcd", copy)
        self._start_store()

    def restore_etcd(self, copy: Path) -> None:
        """Restore etcd from that copy, as from a backup."""
        self._stop_store()
        shutil.rmtree(self.directory / "etcd")
        shutil.copytree(copy, self.directory / "etcd")
        self._start_store()

    def _stop_store(self) -> None:
        self._kill("kube-apiserver")
        self._kill("etcd")

    def _start_store(self) -> None:
        self._start_etcd()
        self.start_api_server()

    def send_signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a component."""
        self._running[name].send_signal(number)

    def pids(self) -> dict[str, int]:
        """The processes of the running components, by name."""
        return {name: process.pid for name, process in self._running.items()}

    def is_ready(self) -> bool:
        """Whether the API server reports that it is ready."""
        trust = ssl.create_default_context(cafile=str(self.directory / "ca.crt"))
        request = urllib.request.Request(
            f"https://127.0.0.1:{self.port}/readyz",
            headers={"Authorization": f"Bearer {self._token('admin')}"},
        )
        try:
            with urllib.request.urlopen(request, context=trust, timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            process = self._running["kube-apiserver"]
            assert process.poll() is None, self.log("kube-apiserver")
            return False

    def log(self, name: str) -> str:
        """The end of a component's log."""
        return (self.directory / f"{name}.log").read_text(errors="replace")[-4000:]

    def stop(self) -> None:
        """End all of it immediately; the state is thrown away."""
        for name in list(self._running):
            self._kill(name)

    def _token(self, user: str) -> str:
        return f"{self._secret}-{user.replace(':', '-')}"

    def _start_etcd(self) -> None:
        peer, client = (f"http://127.0.0.1:{port}" for port in (free_port(), self.etcd_port))
        self._start(
            self.etcd_program,
            f"--data-dir={self.directory}/etcd",
            "--unsafe-no-fsync",
            "--log-level=warn",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
        )

    def _start_controllers(self, name: str) -> None:
        arguments = [
            f"--kubeconfig={self.kubeconfig(f'system:{name}')}",
            "--leader-elect=false",
            "--secure-port=0"
            if name == "kube-controller-manager"
            else f"--secure-port={free_port()}",
        ]
        if name == "kube-controller-manager":
            arguments += [
                f"--service-account-private-key-file={self.directory}/accounts.key",
                f"--root-ca-file={self.directory}/ca.crt",
                "--use-service-account-credentials=true",
                # An emulated node needs minutes to restart.
                "--node-monitor-grace-period=400s",
            ]
        self._start(self.programs / name, *arguments)

    def _start(self, program: Path, *arguments: str) -> None:
        command = ["setpriv", "--pdeathsig", "KILL", "--", str(program), *arguments]
        with (self.directory / f"{program.name}.log").open("ab") as log:
            self._running[program.name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _kill(self, name: str) -> None:
        process = self._running.pop(name, None)
        if process is not None:
            process.send_signal(signal.SIGKILL)
            process.wait()

    def _make_certificates(self) -> None:
        own = "-subj /CN=test-ca -keyout ca.key -out ca.crt"
        _openssl(self.directory, f"req -x509 -newkey rsa:2048 -nodes -days 3650 {own}")
        self._certificate("server", "/CN=kube-apiserver", f"subjectAltName={SERVED_NAMES}")
        self._certificate(
            "kubelet-client", "/O=system:masters/CN=kube-apiserver", "extendedKeyUsage=clientAuth"
        )
        _openssl(self.directory, "genrsa -out accounts.key 2048")

    def _certificate(self, name: str, subject: str, extension: str) -> None:
        (self.directory / f"{name}.extension").write_text(f"{extension}\n")
        request = f"-subj {subject} -keyout {name}.key -out {name}.request"
        _openssl(self.directory, f"req -newkey rsa:2048 -nodes {request}")
        signed = f"-CA ca.crt -CAkey ca.key -CAcreateserial -extfile {name}.extension"
        _openssl(
            self.directory, f"x509 -req -in {name}.request {signed} -days 3650 -out {name}.crt"
        )


@contextmanager
def control_plane(
    programs: Path, etcd: Path, logs: Path, controllers: bool = True
) -> Iterator[ControlPlane]:
    """A control plane for the block. Afterwards `logs` has the logs of its components."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="podfabric-")))
        plane = ControlPlane(directory, programs, etcd / "etcd")
        stack.callback(_keep_logs, directory, logs)
        stack.callback(plane.stop)
        plane.start(controllers)
        yield plane


def _keep_logs(directory: Path, logs: Path) -> None:
    logs.mkdir(parents=True, exist_ok=True)
    for log in directory.glob("*.log"):
        shutil.copy(log, logs)


def _openssl(directory: Path, arguments: str) -> None:
    subprocess.run(["openssl", *arguments.split()], cwd=directory, check=True, capture_output=True)
