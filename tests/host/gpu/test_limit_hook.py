"""Limits that the driver keeps are set by a runtime's hook, before a container's first program.

The runtime is runc, the driver the stand-in's NVML, whose cgroups are a tree beside the kernel's.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from base.paths import Paths
from deviceplugin.gpus import slot_files
from gpu import kernel_tier, limit_hook, nvml
from gpu.group_limits import Limit
from gpu.groups import Groups
from gpu.limit_hook import LimitHook
from gpu.nvml import Nvml
from tests.host.gpu.driver_root import installed
from tests.host.gpu.pods import cgroup_root, removed
from tests.host.gpu.test_doctor import R580, R615
from tests.standin.gpus import GIB, Behaviour, Failure, Node, gpus
from tests.unit.gpu.groups import PlainRooms
from tests.waiting import until
from tools import build_hook

TWO = gpus(2, bytes=16 * GIB)
FIRST, SECOND = (gpu.uuid for gpu in TWO)
GROUP = "podfabric.io-gpu-10g-25.00000000.10g-25.0"
# As the kernel makes a cgroup, for the tree of the stand-in.
SAME_CGROUP = """#!/bin/sh
pid=$(sed -n 's/.*"pid": *\\([0-9]*\\).*/\\1/p')
mkdir -p "$1$(sed -n 's/^0:://p' "/proc/$pid/cgroup")"
"""
# crun refuses a machine with cgroups of both versions: it sees those of version 2 alone.
ALONE = 'mount --bind "$0" /sys/fs/cgroup && exec "$@"'


class Runtime:
    """runc, with containers whose CDI device names the hook, and the agent's part of it."""

    def __init__(self, directory: Path, node: Node, driver: Nvml) -> None:
        self.directory = directory
        self.node = node
        self.cgroups = directory / "cgroup"
        self.socket = directory / "gpu-limit.sock"
        self.groups = Groups(directory / "gpu", rooms=PlainRooms())
        self.groups.make(GROUP, [Limit(FIRST, 2 * GIB, 1.0), Limit(SECOND, 3 * GIB, 1.0)])
        self.driver: Nvml | None = driver
        self.program = directory / "same-cgroup"
        self.program.write_text(SAME_CGROUP)
        self.program.chmod(0o755)
        self.started = directory / "root/started"  # which the container's first program makes
        self.agent = self.new_agent()

    def new_agent(self) -> LimitHook:
        agent = LimitHook(self.socket, self.groups, lambda: self.driver, self.cgroups)
        agent.start()
        return agent

    def run(
        self, *, group: str = GROUP, cgroup: str = "", by: str = "runc", container: str = ""
    ) -> "subprocess.CompletedProcess[str]":
        """Start a container, whose first program makes `started`, and wait for its end."""
        root = self.directory / "root"
        (root / "bin").mkdir(parents=True, exist_ok=True)
        shutil.copy(str(shutil.which("busybox")), root / "bin/sh")
        self.started.unlink(missing_ok=True)
        pod, name = uuid.uuid4(), os.urandom(32).hex()
        edits = self._edits(group)
        same = {"path": str(self.program), "args": ["same-cgroup", str(self.cgroups)]}
        spec = {
            "ociVersion": "1.0.2",
            "process": {
                "user": {"uid": 0, "gid": 0},
                "args": ["/bin/sh", "-c", "echo > /started"],
                "env": ["PATH=/bin"],
                "cwd": "/",
            },
            "root": {"path": str(root)},
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
            ],
            "hooks": {"createRuntime": [same, *edits]},
            "linux": {
                "cgroupsPath": cgroup or f"/kubepods/burstable/pod{pod}/{name}",
                "namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount")],
            },
        }
        bundle = self.directory / f"bundle-{name[:8]}"
        bundle.mkdir()
        (bundle / "config.json").write_text(json.dumps(spec))
        return subprocess.run(
            [*self._seeing(by), by, "run", "--bundle", str(bundle), container or name],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    def _seeing(self, by: str) -> list[str]:
        """A command that runs another one with the cgroups that a runtime supports."""
        if by == "runc":
            return []
        if shutil.which(by) is None:  # it is not installed for this: podman would take it then
            pytest.skip(f"this machine has no {by}")
        return ["unshare", "--mount", "sh", "-c", ALONE, str(cgroup_root(2))]

    def _edits(self, group: str) -> list[dict[str, object]]:
        """The hooks createRuntime of the container's CDI device, as a runtime reads them."""
        paths = Paths(cdi=self.directory / "cdi")
        hook = limit_hook.hook(build_hook.build(), self.socket, group)
        slot_files.write(paths, group, (), hooks=[hook])
        document = json.loads(slot_files.path(paths, group).read_text())
        (device,) = document["devices"]
        hooks = device["containerEdits"]["hooks"]
        assert {each.pop("hookName") for each in hooks} == {"createRuntime"}
        return list(hooks)


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Callable[..., Runtime]]:
    cgroup_root(2)
    with ExitStack() as stack:

        def made(driver: str = R615, failures: tuple[Failure, ...] = ()) -> Runtime:
            cgroups = tmp_path / "cgroup"
            cgroups.mkdir()
            (cgroups / "cgroup.controllers").touch()
            behaviour = Behaviour(driver=driver, cgroups=str(cgroups), failures=failures)
            node = stack.enter_context(installed(tmp_path / "driver", TWO, behaviour))
            opened = nvml.open_driver(node.file.parent)
            stack.callback(opened.close)
            runtime = Runtime(tmp_path, node, opened)
            stack.callback(lambda: runtime.agent.close())
            return runtime

        yield made


@pytest.mark.parametrize("by", ["runc", "crun"])
def test_the_limit_is_set_softly_by_nothing_before_the_first_program_runs(
    runtime: Callable[..., Runtime], monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    here = runtime()
    seen: list[tuple[bool, Path]] = []
    real = kernel_tier.limit

    def limit(driver: Nvml, cgroup: Path, limits: tuple[Limit, ...]) -> str:
        backend = real(driver, cgroup, limits)
        seen.append((here.started.exists(), cgroup))
        return backend

    monkeypatch.setattr(kernel_tier, "limit", limit)
    done = here.run(by=by)
    assert (done.returncode, done.stderr) == (0, "")
    assert here.started.exists()
    [(had_started, cgroup)] = seen
    assert not had_started
    assert cgroup.is_relative_to(here.cgroups / "kubepods")
    held = {(each.gpu, each.soft, each.hard) for each in here.node.read().limits}
    assert held == {(0, 0, 2 * GIB), (1, 0, 3 * GIB)}


def test_each_start_of_a_container_sets_the_limits_of_its_new_cgroup(
    runtime: Callable[..., Runtime],
) -> None:
    here = runtime()
    assert here.run().returncode == 0
    here.groups.change(GROUP, [Limit(FIRST, GIB, 1.0), Limit(SECOND, 3 * GIB, 1.0)])
    assert here.run().returncode == 0
    limits = here.node.read().limits
    assert len({each.cgroup for each in limits}) == 2
    assert {each.hard for each in limits if each.gpu == 0} == {2 * GIB, GIB}


def _refused(here: Runtime, *words: str, **of_run: str) -> None:
    """The container does not start, and its runtime says why."""
    done = here.run(**of_run)
    assert done.returncode != 0
    assert not here.started.exists(), "no program of the container may run"
    for word in words:
        assert word in done.stderr


@pytest.mark.parametrize("call", ["nvmlDeviceSetMemoryLimits_v1", "nvmlDeviceGetMemoryLimits_v1"])
def test_a_failure_of_the_driver_fails_the_start(
    runtime: Callable[..., Runtime], call: str
) -> None:
    _refused(runtime(failures=(Failure(call, 2, 999),)), f"group {GROUP}", SECOND)


def test_crun_lets_no_container_start_either_and_the_agents_log_says_why(
    runtime: Callable[..., Runtime], caplog: pytest.LogCaptureFixture
) -> None:
    here = runtime(failures=(Failure("nvmlDeviceSetMemoryLimits_v1", 2, 999),))
    _refused(here, "error executing hook", by="crun")
    assert f"a container does not start: group {GROUP}" in caplog.text
    assert SECOND in caplog.text


def test_a_driver_without_such_limits_fails_the_start(runtime: Callable[..., Runtime]) -> None:
    _refused(runtime(R580), "this driver has no memory limits of cgroups (R615 has)")


def test_another_limit_than_was_set_fails_the_start(
    runtime: Callable[..., Runtime], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = runtime()
    monkeypatch.setattr(Nvml, "set_cgroup_limit", lambda self, uuid, cgroup, hard: None)
    _refused(here, FIRST)


def test_a_driver_that_does_not_answer_fails_the_start(runtime: Callable[..., Runtime]) -> None:
    here = runtime()
    here.driver = None
    _refused(here, "NVIDIA's driver does not answer the agent")


def test_a_group_without_limits_fails_the_start(runtime: Callable[..., Runtime]) -> None:
    _refused(runtime(), "group other: has no limits", group="other")


def test_a_cgroup_that_is_no_containers_is_not_limited(runtime: Callable[..., Runtime]) -> None:
    """A runtime that starts hooks too early would have its own cgroup limited."""
    here = runtime()
    _refused(here, "which is not container", cgroup=f"/system.slice/pf-{uuid.uuid4().hex[:8]}")
    assert here.node.read().limits == ()


def test_a_cgroup_of_another_container_is_not_limited(runtime: Callable[..., Runtime]) -> None:
    """The number of a process that has ended may be that of one in another container."""
    here = runtime()
    _refused(here, "which is not container pf-other's", container="pf-other")
    assert here.node.read().limits == ()


@pytest.mark.parametrize("is_killed", [True, False])
def test_without_an_agent_no_container_starts(
    runtime: Callable[..., Runtime], is_killed: bool
) -> None:
    here = runtime()
    here.agent.close()
    if is_killed:  # which leaves the socket's file
        _refused(here, "gpu-limit.sock: Connection refused", "must not start without limits")
    else:
        here.socket.unlink()
        _refused(here, "gpu-limit.sock: No such file", "must not start without limits")


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_start_waits_for_an_agent_that_comes_at_once(
    runtime: Callable[..., Runtime], is_killed: bool
) -> None:
    here = runtime()
    here.agent.close()
    if not is_killed:
        here.socket.unlink()
    with ThreadPoolExecutor() as starting:
        container = starting.submit(here.run)
        until(_is_waiting, what="the hook")
        here.agent = here.new_agent()
        assert container.result().returncode == 0


def _is_waiting() -> bool:
    for path in Path("/proc").glob("[0-9]*/comm"):
        with suppress(OSError):  # it has ended
            if path.read_text() == "gpu-limit\n":
                return True
    return False


def test_an_agent_that_ends_without_an_answer_fails_the_start(
    runtime: Callable[..., Runtime],
) -> None:
    here = runtime()
    here.agent.close()
    here.socket.unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(here.socket))
        listener.listen()
        child = os.fork()
        if child == 0:
            listener.accept()[0].recv(65536)
            os._exit(0)
        _refused(here, "must not start without limits")
        os.waitpid(child, 0)


ASK = """
import os, socket, sys
os.setuid(int(sys.argv[2]))
with socket.socket(socket.AF_UNIX) as client:
    client.connect(sys.argv[1])
    client.sendall(sys.stdin.buffer.read())
    client.shutdown(socket.SHUT_WR)
    print(client.makefile().read(), end="")
"""


def _asked(here: Runtime, request: bytes, uid: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-c", ASK, str(here.socket), str(uid)],
        input=request,
        capture_output=True,
        check=False,
    )
    return done.stdout.decode() or done.stderr.decode()


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (b"", "the runtime's state of the container"),
        (b"a\n{", "the runtime's state of the container"),
        (b"a\n\xff\xfe", "the runtime's state of the container"),
        (
            b'a\n{"id": "a", "status": "creating", "pid": "7"}',
            "the runtime's state of the container",
        ),
        (b'a\n{"id": "a", "status": "running", "pid": 7}', "is running with process 7"),
        (b'a\n{"id": "a", "status": "creating", "pid": 0}', "with process 0"),
        (b'../../etc\n{"id": "a", "status": "creating", "pid": 1}', "has no limits"),
        (b"a\n" + b" " * (2 << 20), ""),  # it is not read to its end
    ],
    ids=range(8),
)
def test_what_is_no_request_is_refused_and_the_next_one_is_served(
    runtime: Callable[..., Runtime], request_: bytes, words: str
) -> None:
    here = runtime()
    assert words in _asked(here, request_)
    assert here.run().returncode == 0


def test_a_cgroup_whose_name_is_no_text_is_told_and_the_next_start_is_served(
    runtime: Callable[..., Runtime],
) -> None:
    here = runtime()
    own = os.fsencode(cgroup_root(2)) + b"/pf-\xff"
    Path(os.fsdecode(own)).mkdir()
    try:
        with subprocess.Popen(["sleep", "1000"]) as process:
            Path(os.fsdecode(own), "cgroup.procs").write_text(f"{process.pid}\n")
            state = json.dumps({"id": "a", "status": "creating", "pid": process.pid}).encode()
            answer = _asked(here, f"{GROUP}\n".encode() + state)
            process.kill()
        assert "pf-\\udcff" in answer
    finally:
        until(lambda: removed(Path(os.fsdecode(own))), what="end of the process")
    assert here.run().returncode == 0


def test_only_root_may_ask(runtime: Callable[..., Runtime]) -> None:
    here = runtime()
    assert here.socket.stat().st_mode & 0o777 == 0o600
    here.socket.chmod(0o666)
    for directory in (here.directory, *here.directory.parents):
        if directory.stat().st_uid == os.getuid() and directory != Path("/"):
            directory.chmod(directory.stat().st_mode | 0o011)
    state = json.dumps({"id": "a", "status": "creating", "pid": os.getpid()}).encode()
    assert "only root may" in _asked(here, f"{GROUP}\n".encode() + state, uid=65534)


def test_a_hook_that_says_nothing_keeps_no_other_waiting_for_long(
    runtime: Callable[..., Runtime], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limit_hook, "PATIENCE", 0.2)
    here = runtime()
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(here.socket))
        until(lambda: here.run().returncode == 0, what="start of a container")


def test_the_hook_refuses_a_state_that_is_too_large() -> None:
    command = [str(build_hook.build()), "none.sock", GROUP]
    done = subprocess.run(command, input=b" " * (2 << 20), capture_output=True, check=False)
    assert done.returncode == 1
    assert b"the container's state: Message too long" in done.stderr


def test_the_hook_says_how_it_is_used() -> None:
    for words in ([], ["a"], ["a", "b", "c"], ["x" * 200, "b"]):
        done = subprocess.run(
            [str(build_hook.build()), *words], capture_output=True, text=True, check=False
        )
        assert (done.returncode, "usage: gpu-limit" in done.stderr) == (2, True)
