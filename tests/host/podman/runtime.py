"""podman with its CNI backend, in a separate machine."""

import json
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.host.podman.machine import Machine

BUSYBOX = Path("/bin/busybox")  # Debian's busybox-static
NETWORK = "fabric"
PATH = "/usr/sbin:/usr/bin:/sbin:/bin"

CONTAINERS_CONF = """\
[containers]
cgroups = "no-conmon"
default_ulimits = ["nofile=1024:1024", "nproc=1000:1000"] # raising limits may not be permitted

[engine]
cgroup_manager = "cgroupfs"
events_logger = "none"
lock_type = "file"

[network]
network_backend = "cni"
cni_plugin_dirs = ["{plugins}"]
network_config_dir = "{networks}"
"""

STORAGE_CONF = """\
[storage]
driver = "vfs"
graphroot = "/var/lib/containers/storage"
runroot = "/run/containers/storage"
"""


def reason_to_skip() -> str:
    """Why this Debian's podman calls no CNI plugin; "" if it does, or if it is missing."""
    if shutil.which("podman") is None:
        return ""
    done = subprocess.run(["podman", "--version"], check=True, capture_output=True, text=True)
    major = int(done.stdout.split()[-1].partition(".")[0])
    return "podman of this Debian has no CNI backend" if major >= 5 else ""


@dataclass(frozen=True)
class Podman:
    """The command in `machine`, with a network whose bridge plugin calls podfabric-ipam."""

    machine: Machine
    root: Path

    def __call__(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return self.machine.run("podman", *arguments)

    def succeed(self, *arguments: str) -> str:
        """Standard output of a command that must succeed."""
        done = self(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def network(self, **ipam: object) -> None:
        """Define the network; `ipam` are options of podfabric-ipam."""
        bridge = {
            "type": "bridge",
            "bridge": NETWORK,
            "isGateway": True,
            "ipMasq": False,
            "capabilities": {"ips": True},
            "ipam": {"type": "podfabric-ipam", **ipam},
        }
        conflist = {"cniVersion": "1.0.0", "name": NETWORK, "plugins": [bridge]}
        (self.root / "networks" / f"{NETWORK}.conflist").write_text(json.dumps(conflist))

    def start(self, name: str, *options: str) -> "subprocess.CompletedProcess[str]":
        """Try to start a container of this name that keeps running."""
        where = ("--runtime", "runc", "run", "--detach", "--cgroup-parent", self.machine.cgroup)
        what = ("--name", name, "--network", NETWORK, *options)
        return self(*where, *what, "--rootfs", str(self.root / "rootfs"), "/bin/sleep", "600")

    def run(self, name: str, *options: str) -> "Container":
        """A container that must start."""
        done = self.start(name, *options)
        assert done.returncode == 0, done.stderr
        return Container(self, name, done.stdout.strip())


@dataclass(frozen=True)
class Container:
    """A container that was started."""

    podman: Podman
    name: str
    id: str

    def execute(self, *command: str) -> "subprocess.CompletedProcess[str]":
        """A command inside."""
        return self.podman("exec", self.name, *command)

    def addresses(self) -> list[str]:
        """The global addresses of eth0, seen from inside, as CIDR."""
        shown = self.podman.succeed("exec", self.name, "ip", "addr", "show", "dev", "eth0")
        lines = [line.split() for line in shown.splitlines() if " scope global" in line]
        return [fields[1] for fields in lines]

    def reserved(self) -> list[str]:
        """The addresses that `podfabric ipam list` shows for this container."""
        everything = self.podman.machine.reservations()
        return [
            reservation.address for reservation in everything if reservation.container_id == self.id
        ]


def root_file_system(target: Path) -> None:
    """A root directory for containers: busybox, under the names that tests call."""
    assert BUSYBOX.exists(), f"{BUSYBOX} is missing: tools/setup.sh test"
    for directory in ("bin", "dev", "etc", "proc", "run", "sys", "tmp"):
        (target / directory).mkdir(parents=True)
    shutil.copy(BUSYBOX, target / "bin")
    for applet in ("ip", "ping", "sleep"):
        (target / "bin" / applet).symlink_to("busybox")


def configured(root: Path, plugins: Path) -> Mapping[str, str]:
    """Write podman's configuration below `root`; the environment that selects it."""
    (root / "networks").mkdir()
    settings = CONTAINERS_CONF.format(plugins=plugins, networks=root / "networks")
    (root / "containers.conf").write_text(settings)
    (root / "storage.conf").write_text(STORAGE_CONF)
    return {
        "PATH": PATH,
        "HOME": str(root),
        "CONTAINERS_CONF": str(root / "containers.conf"),
        "CONTAINERS_STORAGE_CONF": str(root / "storage.conf"),
    }
