"""The node: the virtual machine with containerd, kubelet and Multus, as the tests see it."""

import json
import os
import shlex
import signal
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster import images, machine
from tests.cluster.control_plane import (
    HOST_OF_NODE,
    NODE,
    SERVICES,
    ControlPlane,
    free_port,
    node_user,
)
from tests.kernel.vm import layout, qemu
from tests.kernel.vm.qemu import GUEST_PATH, GUEST_RESULTS
from tests.waiting import until

RESULTS = layout.BUILD / "results-cluster"
"""The logs of the first machine and of its services."""
BOOT = 900.0  # seconds: twice the time of three tries of the machine
PODS = "10.88.0.0/16"
CONTAINERD_SOCKET = "/run/containerd/containerd.sock"
CNI_BIN = Path("/opt/cni/bin")
GO = "GOGC=400 GOMAXPROCS=1"
"""For programs in Go: an emulated CPU is dear, memory is there, threads that look for work cost."""
MULTUS_KUBECONFIG = "/etc/cni/net.d/multus.d/multus.kubeconfig"


class NodeError(Exception):
    """A command in the node failed; the text has its output."""


@dataclass
class Node:
    """The machine, and commands in it. `programs`: the directory of each program, by name."""

    programs: Mapping[str, Path]
    plane: ControlPlane
    disk: Path
    name: str = NODE
    machine_name: str = "-cluster"  # PODFABRIC_VM_NAME
    server_port: int = field(default_factory=free_port)
    kubelet_port: int = field(default_factory=free_port)
    _machine: subprocess.Popen[bytes] | None = None

    @property
    def results(self) -> Path:
        """The logs of the machine and of its services."""
        return layout.BUILD / f"results{self.machine_name}"

    def run(self, script: str, *, timeout: float = 300, standard_input: str = "") -> str:
        """The standard output of a shell script in the node. Raises NodeError if the script
        fails."""
        status, output, errors = self.status_of(script, timeout, standard_input)
        if status:
            raise NodeError(f"{script}\nstatus {status}\n{output}{errors}")
        return output

    def status_of(
        self, script: str, timeout: float = 300, standard_input: str = ""
    ) -> tuple[int, str, str]:
        """Status, standard output and standard error of a shell script in the node."""
        prefix = f"export PATH={GUEST_PATH}:{':'.join(map(str, self.programs.values()))}; "
        command = ["/bin/sh", "-c", prefix + script]
        request = {"command": command, "input": standard_input, "timeout": timeout}
        answer = self._ask(request, timeout + 60)
        return answer["status"], answer["stdout"], answer["stderr"]

    def write(self, path: str | Path, content: str) -> None:
        """Write a file in the node."""
        quoted = shlex.quote(str(path))
        self.run(f"mkdir -p $(dirname {quoted}); cat > {quoted}", standard_input=content)

    def start(self, service: str, command: str) -> None:
        """Start a process that keeps running; its log is among the machine's results."""
        inner = f"echo $$ > /run/node/{service}.pid; exec env {GO} {command}"
        log = GUEST_RESULTS / f"{service}.log"
        self.run(f"setsid --fork sh -c {shlex.quote(inner)} < /dev/null >> {log} 2>&1")

    def kill(self, service: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to a process that `start` has started, and wait for its end."""
        pid = f"$(cat /run/node/{service}.pid)"
        self.run(f"kill -{int(number)} {pid}; while kill -0 {pid} 2>/dev/null; do sleep 0.1; done")

    def is_running(self, service: str) -> bool:
        """Whether a process that `start` has started still runs."""
        status, _, _ = self.status_of(f"kill -0 $(cat /run/node/{service}.pid)")
        return status == 0

    # Actions of a node's administrator.

    def boot(self) -> None:
        """Start the machine and wait until its server answers."""
        environment = {**os.environ, "PODFABRIC_VM_NAME": self.machine_name}
        command = machine.arguments(self.disk, self.server_port, self.kubelet_port)
        with (layout.BUILD / f"output{self.machine_name}.log").open("ab") as log:
            self._machine = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", "--", *command],
                cwd=layout.CHECKOUT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        until(self._answers, seconds=BOOT, what="answer of the node's server", pause=0.5)

    def power_off(self) -> int:
        """End the machine; returns its status, 125 if its kernel logged a complaint."""
        assert self._machine is not None
        self._ask({"end": True}, 60)
        status, self._machine = self._machine.wait(300), None
        return status

    def pull_the_plug(self) -> None:
        """End the machine as a power cut would; its disk has all writes.

        Raises AssertionError if its kernel had logged a complaint until then.
        """
        if self._machine is not None:
            self._machine.terminate()
            self._machine.wait(60)
            self._machine = None
            console = (self.results / "console.log").read_text(errors="replace")
            assert not qemu.COMPLAINTS.search(console), f"the kernel complained; see {self.results}"

    def start_containerd(self) -> None:
        """Start containerd, with the tests' images."""
        self.write("/run/node/containerd.toml", self._containerd_configuration())
        self.start("containerd", "containerd --config /run/node/containerd.toml")
        until(
            lambda: not self.status_of(f"ctr --address {CONTAINERD_SOCKET} version", 30)[0],
            what="containerd",
            pause=0.5,
        )

    def start_kubelet(self) -> None:
        """Start the kubelet, and wait until it serves."""
        self.write("/run/node/ca.crt", self.plane.ca())
        user = node_user(self.name)
        self.write("/run/node/kubeconfig", self.plane.kubeconfig(user, HOST_OF_NODE).read_text())
        self.write("/run/node/kubelet.json", json.dumps(KUBELET | {"port": self.kubelet_port}))
        self.start(
            "kubelet",
            "kubelet --config=/run/node/kubelet.json --kubeconfig=/run/node/kubeconfig "
            f"--hostname-override={self.name} --node-ip=10.0.2.15 --cloud-provider=external "
            # No test reads containers' usage; collecting it every 10 s is a fifth of the kubelet's
            # work.
            "--root-dir=/var/lib/kubelet --housekeeping-interval=5m",
        )
        healthy = "busybox wget -q -O - http://127.0.0.1:10248/healthz"
        until(lambda: not self.status_of(healthy, 30)[0], BOOT, "healthy kubelet", pause=0.5)

    def start_api_service(self) -> None:
        """Make the service `kubernetes` reachable, for the agent and for pods."""
        script = layout.CHECKOUT / "tests/cluster/service_proxy.py"
        self.start("api-service", f"{layout.PYTHON} {script} {HOST_OF_NODE} {self.plane.port}")

    def install_multus(self) -> None:
        """Install the CNI plugins of the cluster's own network, and Multus in front of them."""
        for program in ("cni-plugins", "multus"):
            self.run(f"cp {self.programs[program]}/* {CNI_BIN}")
        kubeconfig = self.plane.kubeconfig("multus", HOST_OF_NODE).read_text()
        self.write(MULTUS_KUBECONFIG, kubeconfig)
        self.write("/etc/cni/net.d/00-multus.conf", json.dumps(MULTUS))

    def _answers(self) -> bool:
        assert self._machine is not None
        if (status := self._machine.poll()) is not None:
            raise AssertionError(f"the machine ended with {status}; see {self.results}")
        try:
            return self.status_of("true", 10)[0] == 0
        except (OSError, ValueError):
            return False

    def _ask(self, request: Mapping[str, object], timeout: float) -> dict[str, Any]:
        with socket.create_connection(("127.0.0.1", self.server_port), timeout=timeout) as peer:
            peer.sendall(json.dumps(request).encode() + b"\n")
            with peer.makefile("rb") as answers:
                answer: dict[str, Any] = json.loads(answers.readline())
                return answer

    def _containerd_configuration(self) -> str:
        """A configuration without the metrics that containerd collects from all containers every
        second."""
        return f"""
version = 3
root = "/var/lib/containerd"
state = "/run/containerd"
[grpc]
address = "{CONTAINERD_SOCKET}"
[plugins."io.containerd.cri.v1.images"]
stats_collect_period = 3600
[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "{images.WORKLOAD}"
[plugins."io.containerd.cri.v1.runtime"]
stats_collect_period = "1h"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
BinaryName = "{self.programs["runc"]}/runc"
SystemdCgroup = false
"""


KUBELET = {
    "apiVersion": "kubelet.config.k8s.io/v1beta1",
    "kind": "KubeletConfiguration",
    "authentication": {
        "anonymous": {"enabled": False},
        "webhook": {"enabled": True},
        "x509": {"clientCAFile": "/run/node/ca.crt"},
    },
    "authorization": {"mode": "AlwaysAllow"},
    "cgroupDriver": "cgroupfs",
    "clusterDNS": ["10.96.0.10"],  # no pod uses it; without it each pod gets an event
    "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
    "enforceNodeAllocatable": ["none"],
    "failSwapOn": False,
    "imageGCHighThresholdPercent": 100,  # images cannot be pulled again
    # No pod is evicted, so the kubelet does not collect every container's usage all the time.
    "evictionHard": {"memory.available": "0%"},
    "localStorageCapacityIsolation": False,
    "maxPods": 250,
    "resolvConf": "",
    "syncFrequency": "10s",  # a changed ConfigMap is written within this time
}

MULTUS = {
    "cniVersion": "1.0.0",
    "name": "multus",
    "type": "multus",
    "kubeconfig": MULTUS_KUBECONFIG,
    "delegates": [
        {
            "cniVersion": "1.0.0",
            "name": "pods",
            "type": "bridge",
            "bridge": "pods0",
            "isGateway": True,
            "ipam": {
                "type": "host-local",
                "ranges": [[{"subnet": PODS}]],
                "routes": [{"dst": SERVICES}],
            },
        }
    ],
}
