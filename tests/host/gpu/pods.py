"""Processes in the cgroups of made-up pods, as a kubelet and a runtime make them on this kernel."""

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType

import pytest

from gpu.processes import Container
from tests.waiting import until

# Each line of the input is a slot: registers there, and says what was answered.
CLIENT = """
import socket, struct, sys
for line in sys.stdin:
    version, slot = map(int, line.split())
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.settimeout(60)
        client.connect(sys.argv[1])
        client.send(struct.pack("<II", version, slot))
        content = client.recv(64)
    print(*(struct.unpack("<IIQ", content) if content else ()), flush=True)
"""


def cgroup_root(version: int) -> Path:
    """Where this machine has a hierarchy of that version; skips the test if nowhere."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, kind, options, *_ = line.split()
        if (version == 2 and kind == "cgroup2") or (
            version == 1 and kind == "cgroup" and "memory" in options.split(",")
        ):
            return Path(point)
    pytest.skip(f"this machine has no cgroups of version {version}")


class MadeContainer:
    """The cgroup of a container of a pod."""

    def __init__(self, directory: Path, container: Container) -> None:
        self.directory = directory
        self.container = container

    def take(self, pid: int) -> None:
        (self.directory / "cgroup.procs").write_text(f"{pid}\n")

    def client(self, socket: Path) -> "RegisteringProcess":
        """A process in it that registers at a socket."""
        return RegisteringProcess(self, socket)


@contextmanager
def made_container(version: int = 2, pod_uid: str = "") -> Iterator[MadeContainer]:
    """A container of a new pod, or of one that exists."""
    container = Container(pod_uid or str(uuid.uuid4()), os.urandom(32).hex())
    root = cgroup_root(version)
    pod = root / "kubepods" / "burstable" / f"pod{container.pod_uid}"
    directory = pod / container.id
    directory.mkdir(parents=True)
    try:
        yield MadeContainer(directory, container)
    finally:
        until(lambda: _removed(directory), what="end of the container's processes")
        for empty in (pod, pod.parent, pod.parent.parent):
            with suppress(OSError):  # others use it
                empty.rmdir()


def _removed(directory: Path) -> bool:
    try:
        directory.rmdir()
    except OSError:
        return False
    return True


class RegisteringProcess:
    """A process of a container, without a shim."""

    def __init__(self, container: MadeContainer, socket: Path) -> None:
        self._stack = ExitStack()
        self.process = self._stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", CLIENT, socket],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        )
        self.pid = self.process.pid
        container.take(self.pid)

    def register(self, slot: int, version: int = 1) -> list[int]:
        """Status, host pid and registration; [] if it was not answered."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{version} {slot}\n")
        self.process.stdin.flush()
        return [int(word) for word in self.process.stdout.readline().split()]

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.wait()

    def __enter__(self) -> "RegisteringProcess":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self._stack.close()
