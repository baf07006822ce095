"""A whole node: the agent's process, a kubelet, a driver, containers with Allocate's response.

The agent and the containers are in a pid and a mount namespace that represent the host's. There,
/proc shows the driver's GPUs, and the first process sees the agent's mounts.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from base.paths import Paths
from tests.host.gpu.pods import MadeContainer
from tests.kubelet.kubelet import Kubelet
from tests.runtime import CHECKOUT
from tests.standin import build as standin
from tests.standin.driver import Driver
from tests.standin.gpus import Behaviour, Gpu, Node
from tests.unit.gpu.driver import Driver as ShownDriver
from tests.unix_http import UnixHTTPConnection
from tests.waiting import PATIENCE
from tools import build_shim

PODFABRIC = Path(sys.executable).with_name("podfabric")
LIBRARIES = "usr/lib64"

# The first process of the node ends with its input; all other processes end with it.
HOST = """
set -e
mount --bind "$1" /proc/driver
echo ready
exec cat
"""

# A runtime's work: a root for the container, here an overlay of the machine's, then the mounts.
CONTAINER = """
set -eu
cgroup=$1 room=$2 mounts=$3
shift 3
echo $$ > "$cgroup/cgroup.procs"
mkdir -p "$room"
mount -t tmpfs tmpfs "$room"
for directory in /usr/lib /usr/lib64; do
    mkdir -p "$room$directory/upper" "$room$directory/work"
    mount -t overlay overlay -o \\
        "lowerdir=$directory,upperdir=$room$directory/upper,workdir=$room$directory/work" $directory
done
mount -t tmpfs tmpfs /run
while read -r host inside access; do
    mkdir -p "${inside%/*}"
    if [ -d "$host" ]; then mkdir -p "$inside"; else touch "$inside"; fi
    mount --bind "$host" "$inside"
    [ "$access" = rw ] || mount -o remount,bind,ro "$inside"
done < "$mounts"
exec "$@"
"""


class WholeNode:
    """The node. `start_agent` and `kill_agent` may be called alternately."""

    def __init__(
        self, root: Path, driver: Node, kubelet: Kubelet, host: int, stack: ExitStack
    ) -> None:
        self.root = root
        self.paths = _paths(root)
        self.driver = driver
        self.kubelet = kubelet
        self._host = host
        self.stack = stack
        self._agent: subprocess.Popen[bytes] | None = None
        self._count = 0

    @property
    def inside(self) -> list[str]:
        """A command that runs another command on the node."""
        namespaces = Path(f"/proc/{self._host}/ns")
        pid = f"--pid={namespaces / 'pid_for_children'}"
        return ["nsenter", f"--mount={namespaces / 'mnt'}", pid]

    def configure(self, **parts: object) -> None:
        agent = {"listen": f"unix:{self.root}/http", "sweep": False}
        self.paths.config.write_text(json.dumps({"agent": agent, "pools": [], **parts}))

    @property
    def _environment(self) -> dict[str, str]:
        roots = {
            f"PODFABRIC_{name.upper()}": str(getattr(self.paths, name))
            for name in Paths.__struct_fields__
        }
        node = {"PODFABRIC_STANDIN_GPUS": str(self.driver.file)}
        return {**os.environ, **roots, **node}

    def start_agent(self, *words: str) -> None:
        (self.root / "http").unlink(missing_ok=True)
        with (self.root / "agent.log").open("ab") as log:
            self._agent = self.stack.enter_context(
                subprocess.Popen(
                    [*self.inside, PODFABRIC, "agent", *words],
                    env=self._environment,
                    cwd=CHECKOUT,
                    stdin=subprocess.DEVNULL,
                    stderr=log,
                )
            )
        self.stack.callback(self.kill_agent)

    def kill_agent(self) -> None:
        """Send SIGKILL. nsenter waits for the agent, its child in the node's pid namespace."""
        if self._agent is not None and self._agent.poll() is None:
            children = Path(f"/proc/{self._agent.pid}/task/{self._agent.pid}/children")
            for pid in children.read_text().split():
                os.kill(int(pid), 9)
            self._agent.wait(PATIENCE)

    def state(self) -> str:
        """The state that the agent reports."""
        said = (path.read_text() for path in self.paths.run.glob("agent-*.state"))
        return next(said, "").strip()

    @property
    def log(self) -> str:
        return (self.root / "agent.log").read_text()

    def values(self) -> dict[tuple[str, str], float]:
        """A scrape, by name and "pod/container" or the GPU's number."""
        connection = UnixHTTPConnection(self.root / "http")
        try:
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        except OSError:
            return {}
        finally:
            connection.close()
        found = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                of = sample.labels
                holder = f"{of['pod']}/{of['container']}" if "container" in of else ""
                name = sample.name.removeprefix("podfabric_gpu_")
                found[name, holder or of.get("gpu", "")] = sample.value
        return found

    def process(
        self,
        container: MadeContainer,
        mounts: Mapping[str, tuple[str, bool]],
        *,
        own_pids: bool = False,
    ) -> Driver:
        """A process of a container that loads libcuda wherever the loader finds it.

        With `own_pids` it is the first of a pid namespace, as in a container.
        """
        self._count += 1
        listed = self.root / f"mounts-{self._count}"
        listed.write_text(
            "".join(
                f"{host} {inside} {'ro' if read_only else 'rw'}\n"
                for inside, (host, read_only) in mounts.items()
            )
        )
        room = self.root / f"room-{self._count}"
        through = [*self.inside, "unshare", "--mount", "--propagation", "private"]
        through += ["sh", "-c", CONTAINER, "sh", str(container.directory), str(room), str(listed)]
        if own_pids:
            through += ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        # A driver knows its GPUs; the stand-in reads a variable.
        environment = {"PODFABRIC_STANDIN_GPUS": str(self.driver.file), "LD_LIBRARY_PATH": ""}
        return self.stack.enter_context(Driver(environment, "libcuda.so.1", through))

    def mounts_of_groups(self) -> list[str]:
        """The mounts below the directory of groups, as the node's first process sees them."""
        lines = Path(f"/proc/{self._host_pid()}/mountinfo").read_text().splitlines()
        root = f"{self.paths.run}/gpu/"
        points = (line.split()[4] for line in lines)
        return [point.removeprefix(root) for point in points if point.startswith(root)]

    def _host_pid(self) -> int:
        """The first process of the namespaces, a child of `unshare`."""
        children = Path(f"/proc/{self._host}/task/{self._host}/children").read_text().split()
        return int(children[0])


@contextmanager
def whole_node(root: Path, gpus: tuple[Gpu, ...]) -> Iterator[WholeNode]:
    """A node below `root`, which must be short, for sockets. Its agent is not started."""
    paths = _paths(root)
    with ExitStack() as stack:
        for directory in (paths.sys, paths.dev, paths.etc, paths.kubelet, root / "proc/driver"):
            directory.mkdir(parents=True)
        _show(root, gpus)
        behaviour = Behaviour()
        node = stack.enter_context(Node(root, gpus, behaviour))
        _install(root / "driver" / LIBRARIES, behaviour.driver)
        paths.shims.mkdir(parents=True)
        for built in build_shim.build():
            shutil.copy(built, paths.shims)
        command = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
        holder = stack.enter_context(
            subprocess.Popen(
                [
                    *command,
                    "--propagation",
                    "private",
                    "sh",
                    "-c",
                    HOST,
                    "sh",
                    root / "proc/driver",
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        )
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"ready\n", "no namespaces"
        kubelet = stack.enter_context(Kubelet(paths.kubelet))
        yield WholeNode(root, node, kubelet, holder.pid, stack)


def _paths(root: Path) -> Paths:
    names = ("sys", "dev", "run", "state", "etc", "cdi", "devinfo", "kubelet", "cni_bin")
    return Paths(proc=Path("/proc"), **{name: root / name for name in names})


def _show(root: Path, gpus: tuple[Gpu, ...]) -> None:
    """Make the driver's entries in /proc and /dev."""
    shown = ShownDriver(Paths(proc=root / "proc", dev=root / "dev"))
    shown.nodes(range(len(gpus)))
    for gpu in gpus:
        address = gpu.pci.lower().removeprefix("0000")
        listed = root / "proc/driver/nvidia/gpus" / address
        listed.mkdir(parents=True)
        (listed / "information").write_text(
            f"Model: \t\t {gpu.name}\nGPU UUID: \t {gpu.uuid}\n"
            f"Bus Location: \t {address}\nDevice Minor: \t {gpu.minor}\n"
        )


def _install(libraries: Path, version: str) -> None:
    """Install the driver's libraries with their links, as its installer does."""
    libraries.mkdir(parents=True)
    for name in ("libcuda.so", "libnvidia-ml.so"):
        shutil.copy(standin.libraries() / f"{name}.1", libraries / f"{name}.{version}")
        (libraries / f"{name}.1").symlink_to(f"{name}.{version}")
    (libraries / "libcuda.so").symlink_to("libcuda.so.1")
