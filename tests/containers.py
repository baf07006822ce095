"""A container as a pod that is not privileged has it, started by runc.

Its root file system is this machine's, read-only; the directories that runc makes there for mounts
go to a layer of the test. The working directory is mounted too: it may be on another file system,
or below /tmp. The container has the host's network, namespaces of its own for processes, mounts,
host name and IPC, the paths that a runtime hides or protects, and what a test names.
"""

import json
import os
import subprocess
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.waiting import PATIENCE, until

# As containerd's and CRI-O's defaults (oci/spec.go, Kubernetes' DefaultProcMount).
MASKED = (
    *("/proc/acpi", "/proc/asound", "/proc/kcore", "/proc/keys", "/proc/latency_stats"),
    *("/proc/timer_list", "/proc/timer_stats", "/proc/sched_debug", "/proc/scsi"),
    *("/sys/firmware", "/sys/devices/virtual/powercap"),
)
PROTECTED = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
SHIELDED = ["nosuid", "noexec", "nodev"]


class HostPath(NamedTuple):
    """A directory of the host in the container. `propagation` is Kubernetes' name for it."""

    source: Path
    destination: str
    writable: bool = False
    propagation: str = "None"


_PROPAGATIONS = {"None": "rprivate", "HostToContainer": "rslave"}


class Container(NamedTuple):
    """A running container, and the pid of its first process as the host sees it."""

    name: str
    pid: int

    def run(self, *command: str) -> "subprocess.CompletedProcess[str]":
        """Another process in the container, as a kubelet's exec probe starts one."""
        return _runc("exec", self.name, *command)

    def stop(self) -> None:
        """SIGTERM, and wait until it has ended."""
        _runc("kill", self.name, "TERM")
        until(lambda: not Path(f"/proc/{self.pid}").exists(), what=f"end of {self.name}")


@contextmanager
def container(
    directory: Path,
    command: Sequence[str],
    capabilities: Sequence[str],
    mounts: Sequence[HostPath],
    environ: Mapping[str, str],
    cwd: Path,
) -> Iterator[Container]:
    """Run a command until the end of the block. Its output is in `directory`."""
    name = f"agent-{uuid.uuid4().hex[:8]}"
    root, upper, work = (directory / name for name in ("root", "upper", "work"))
    for layer in (root, upper, work):
        layer.mkdir(parents=True)
    layers = f"lowerdir=/,upperdir={upper},workdir={work}"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", layers, str(root)], check=True)
    try:
        spec = _spec(root, command, capabilities, mounts, environ, cwd)
        (directory / "config.json").write_text(json.dumps(spec))
        pid_file = directory / "pid"
        with (directory / "log").open("ab") as log:
            subprocess.run(
                [
                    *("runc", "run", "--detach", "--bundle", str(directory)),
                    *("--pid-file", str(pid_file), name),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                check=True,
                timeout=PATIENCE,
            )
        yield Container(name, int(pid_file.read_text()))
    finally:
        _runc("delete", "--force", name)
        subprocess.run(["umount", str(root)], check=True)


def _runc(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["runc", *words], capture_output=True, text=True, check=False, timeout=PATIENCE
    )


def _spec(
    root: Path,
    command: Sequence[str],
    capabilities: Sequence[str],
    mounts: Sequence[HostPath],
    environ: Mapping[str, str],
    cwd: Path,
) -> dict[str, object]:
    sets = ("bounding", "effective", "permitted")
    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "args": list(command),
            "env": [
                f"{key}={value}" for key, value in {"PATH": os.environ["PATH"], **environ}.items()
            ],
            "cwd": str(cwd),
            "capabilities": {which: list(capabilities) for which in sets},
            "noNewPrivileges": True,
        },
        "root": {"path": str(root), "readonly": True},
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc", "options": SHIELDED},
            {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": SHIELDED},
            *(
                {
                    "destination": one.destination,
                    "type": "bind",
                    "source": str(one.source),
                    "options": [
                        "rbind",
                        "rw" if one.writable else "ro",
                        _PROPAGATIONS[one.propagation],
                    ],
                }
                for one in (*mounts, HostPath(cwd, str(cwd)))
            ),
        ],
        "linux": {
            "namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount")],
            "maskedPaths": list(MASKED),
            "readonlyPaths": list(PROTECTED),
            "rootfsPropagation": "rslave",
        },
    }
