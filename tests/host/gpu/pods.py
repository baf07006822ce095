"""Processes in the cgroups of simulated pods, in the form that a kubelet and a runtime use here."""

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from ctypes import sizeof
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from base.pod import Pod
from gpu.limits import layout, processes
from gpu.limits.groups import Groups
from gpu.limits.limits_file import Limit, LimitsFile
from gpu.limits.process_registration import Refusal, Refusals, Registrar
from gpu.limits.processes import Container
from gpu.limits.tenants import Tenant, Tenants
from tests.unit.gpu.groups import PlainRegions
from tests.waiting import until

GPU = "GPU-00000000-0000-0000-0000-00000000000a"
LIMIT = Limit(GPU, 1 << 30, 1.0)

# Each line of input is a slot: the client registers there, and prints the answer.
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
    """The root of this machine's cgroup hierarchy of that version; skips the test if there is
    none."""
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
        """A process in the container that registers at a socket."""
        return RegisteringProcess(self, socket)


@contextmanager
def made_container(version: int = 2, pod_uid: str = "") -> Iterator[MadeContainer]:
    """A container of a new pod, or of an existing one."""
    container = Container(pod_uid or str(uuid.uuid4()), os.urandom(32).hex())
    root = cgroup_root(version)
    pod = root / "kubepods" / "burstable" / f"pod{container.pod_uid}"
    directory = pod / container.id
    directory.mkdir(parents=True)
    try:
        yield MadeContainer(directory, container)
    finally:
        until(lambda: removed(directory), what="end of the container's processes")
        for empty in (pod, pod.parent, pod.parent.parent):
            with suppress(OSError):  # other tests use it
                empty.rmdir()


def removed(directory: Path) -> bool:
    """Remove a cgroup; returns False while a process is in it."""
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
        """Status, host pid and registration; [] if there was no answer."""
        self.ask(slot, version)
        return [int(word) for word in self.answer().split()]

    def ask(self, slot: int, version: int = 1) -> None:
        """Request a slot."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{version} {slot}\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        """The answer: status, host pid and registration."""
        assert self.process.stdout is not None
        return self.process.stdout.readline()

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


class GroupsNode:
    """Groups, their tenants, and a registrar that can be restarted."""

    def __init__(self, root: Path) -> None:
        self.groups = Groups(root, regions=PlainRegions())
        self.tenants: list[Tenant] = []
        self.refusals: list[Refusal] = []
        self.told = Refusals(self.refusals.append)
        self.stack = ExitStack()
        self.registrar = self._registrar()
        self.registrar.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()
        self.registrar.close()

    def _registrar(self) -> Registrar:
        tenants = Tenants(lambda: self.tenants, self.groups.root)
        return Registrar(self.groups, tenants, self.told)

    def restart(self) -> None:
        self.registrar.close()
        self.registrar = self._registrar()
        self.registrar.start()

    def container(
        self,
        group: str,
        version: int = 2,
        pod_uid: str = "",
        limit: Limit = LIMIT,
    ) -> MadeContainer:
        """A container that holds the group."""
        container = self.stack.enter_context(made_container(version, pod_uid))
        pod = Pod("default", f"pod-of-{group}", container.container.pod_uid)
        self.tenants.append(Tenant(group=group, pod=pod, container="main"))
        self.groups.make(group, limit)
        return container

    def socket(self, group: str) -> Path:
        return self.groups.root / group / "agent/agent.sock"

    def registered(self, group: str, slot: int, pid: int) -> None:
        """Register a process that has no shim, as an earlier agent did."""
        self.groups.register(group, slot, pid, processes.start_time(pid) or 0)
        self.restart()

    def claim(self, group: str, slot: int, data: int = 0, context: int = 0) -> None:
        """Write a shim's data: a slot of the process that was registered in it; bytes."""
        content = layout.PfSlot()
        content.state = layout.SLOT_USED
        content.registration = self.groups.read(group).processes[slot].registration
        content.data_bytes, content.context_bytes = data, context
        with (self.groups.root / group / "region").open("r+b") as region:
            region.seek(layout.SLOT_AT + slot * sizeof(layout.PfSlot))
            region.write(bytes(content))

    def refused(self) -> list[tuple[str, str]]:
        """The pods that got messages about processes without a GPU, with the messages."""
        return [(refusal.tenant.group, refusal.text) for refusal in self.refusals]

    def alive(self, group: str) -> dict[int, int]:
        """The pids of living processes, by slot. Like a shim, it never sees part of a change."""
        alive: dict[int, int] = {}

        def is_whole() -> bool:
            nonlocal alive
            with LimitsFile(self.groups.root / group / "limits") as limits:
                before = limits.header().sequence
                known = limits.processes()
                alive = {slot: each.host_pid for slot, each in known.items() if each.alive}
                return bool(before % 2 == 0 and limits.header().sequence == before)

        until(is_whole, pause=0.0005)
        return alive
