"""A separate machine for each test: namespaces in which a runtime finds none of our files."""

import contextlib
import os
import subprocess
import sys
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ipam.store import Reservation
from tests.waiting import PATIENCE

CGROUPS = Path("/sys/fs/cgroup")
PODFABRIC = Path(sys.prefix) / "bin" / "podfabric"

# podman, libcni and podfabric keep their files at the usual places: the process that conmon starts
# when a container ends gets only PATH, HOME and CONTAINERS_CONF.
PRIVATE = """\
set -e
mount -t tmpfs tmpfs /run
mkdir /run/upper /run/work
mount -t overlay -o lowerdir=/var/lib,upperdir=/run/upper,workdir=/run/work overlay /var/lib
for directory in cni containers podfabric; do
    mkdir -p /var/lib/$directory
    mount -t tmpfs tmpfs /var/lib/$directory
done
ip link set lo up
echo ready
exec cat
"""


@dataclass(frozen=True)
class Machine:
    """Network, mount and process namespaces: those of process `pid` and its child."""

    pid: int
    cgroup: str
    environ: Mapping[str, str]

    def run(self, *command: str | Path) -> "subprocess.CompletedProcess[str]":
        """Run a command in the machine until it ends."""
        namespaces = Path(f"/proc/{self.pid}/ns")
        enter = (
            "nsenter",
            f"--net={namespaces / 'net'}",
            f"--mount={namespaces / 'mnt'}",
            f"--pid={namespaces / 'pid_for_children'}",
        )
        return subprocess.run(
            [*enter, *map(str, command)],
            env=self.environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )

    def reservations(self) -> list[Reservation]:
        """The answer of `podfabric ipam list` in the machine."""
        done = self.run(PODFABRIC, "ipam", "list", "-o", "json")
        assert done.returncode == 0, done.stderr
        return msgspec.json.decode(done.stdout, type=list[Reservation])


@contextlib.contextmanager
def machine(environ: Mapping[str, str]) -> Iterator[Machine]:
    """A machine whose commands have this environment. Its processes end with it or with us."""
    command = ("unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
    holder = subprocess.Popen(
        [*command, "--propagation", "private", "sh", "-c", PRIVATE],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert holder.stdout is not None
    assert holder.stderr is not None
    made = Machine(holder.pid, f"/podfabric-test-{uuid.uuid4().hex[:10]}", environ)
    # The first process of the machine ends at the end of its input, and all others with it.
    with holder:
        ready = holder.stdout.readline()
        assert ready == b"ready\n", f"no namespaces: {holder.stderr.read().decode()}"
        yield made
    _remove(CGROUPS.glob(f"*{made.cgroup}"))
    _remove(CGROUPS.glob(made.cgroup[1:]))


def _remove(groups: Iterable[Path]) -> None:
    """Remove control groups, from the leaves up: no namespace contains them, so they would stay."""
    for group in groups:
        for directory, _, _ in os.walk(group, topdown=False):
            Path(directory).rmdir()


def links(target: Path, executables: Sequence[Path]) -> Path:
    """A directory with these executables, for CNI_PATH."""
    target.mkdir()
    for executable in executables:
        assert executable.exists(), f"{executable} is missing: make cni"
        (target / executable.name).symlink_to(executable)
    return target
