"""Which container a cgroup is: version 1 and 2, both drivers, three runtimes, and what is none."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpu.limits import processes
from gpu.limits.processes import Container, container_in

UID = "0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9"
OTHER = "ffffffff-4e5f-6071-8293-a4b5c6d7e8f9"
ID = "0123456789abcdef" * 4
THEIRS = "f" * 64
SYSTEMD = UID.replace("-", "_")
OURS = Container(UID, ID)


def in_version_1(path: str) -> str:
    names = ("name=systemd", "pids", "hugetlb", "cpuset", "memory", "cpu,cpuacct", "devices")
    lines = [f"{13 - n}:{name}:{path}" for n, name in enumerate(names)]
    return "\n".join([*lines, "0::/", ""])


def in_version_2(path: str) -> str:
    return f"0::{path}\n"


K = "/kubepods.slice/kubepods"
N = "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods"
SERVICE = "/system.slice/containerd.service"
PATHS = {
    "containerd": f"{K}-besteffort.slice/kubepods-pod{SYSTEMD}.slice/cri-containerd-{ID}.scope",
    "containerd, guaranteed": f"{K}-pod{SYSTEMD}.slice/cri-containerd-{ID}.scope",
    "containerd, cgroupfs": f"/kubepods/besteffort/pod{UID}/{ID}",
    "containerd, both": f"{SERVICE}/kubepods-burstable-pod{SYSTEMD}.slice:cri-containerd:{ID}",
    "cri-o": f"{K}-besteffort.slice/kubepods-besteffort-pod{SYSTEMD}.slice/crio-{ID}.scope",
    "cri-o, crun": f"{K}-pod{SYSTEMD}.slice/crio-{ID}.scope/container",
    "cri-o, cgroupfs": f"/kubepods/burstable/pod{UID}/crio-{ID}",
    "docker": f"{K}-burstable.slice/kubepods-burstable-pod{SYSTEMD}.slice/docker-{ID}.scope",
    "docker, cgroupfs": f"/kubepods/burstable/pod{UID}/{ID}",
    "a node in a container": f"{N}-pod{SYSTEMD}.slice/cri-containerd-{ID}.scope",
    "seen from a container's cgroup": f"/../../kubepods-pod{SYSTEMD}.slice/crio-{ID}.scope",
    "a cgroup that the container made": f"/kubepods/pod{UID}/{ID}/system.slice/a.service",
    "one that looks like another pod's": f"/kubepods/pod{UID}/{ID}/kubepods/pod{OTHER}/{THEIRS}",
}
NONE = {
    "the host": "/user.slice/user-0.slice",
    "the pod itself": f"/kubepods/besteffort/pod{UID}",
    "cri-o's monitor": f"{K}-pod{SYSTEMD}.slice/crio-conmon-{ID}.scope",
    "a container of no pod": f"/system.slice/docker-{ID}.scope",
    "a pod below no pod's name": f"/kubepods/xpod{UID}/{ID}",
    "a container that is gone": f"/kubepods/pod{UID}/{ID} (deleted)",
    "a container below something else": f"/kubepods/pod{UID}/x/{ID}",
}


@pytest.mark.parametrize("version", [in_version_1, in_version_2])
@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_the_container_of_a_cgroup(path: str, version: Callable[[str], str]) -> None:
    assert container_in(version(path)) == OURS


@pytest.mark.parametrize("version", [in_version_1, in_version_2])
@pytest.mark.parametrize("path", NONE.values(), ids=NONE)
def test_a_cgroup_of_no_container(path: str, version: Callable[[str], str]) -> None:
    assert container_in(version(path)) is None


# At each of these str.splitlines splits; a name of a directory may have all but the line feed.
@pytest.mark.parametrize("end", [*"\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"], ids=ascii)
def test_a_containers_own_cgroups_cannot_be_named_so_that_it_is_another_pods(end: str) -> None:
    path = f"/kubepods/pod{UID}/{ID}/x{end}0::/kubepods/pod{OTHER}/{THEIRS}"
    assert container_in(in_version_2(path)) == OURS
    hidden = f"/kubepods/pod{UID}/{ID}/x{end}5:memory:/kubepods/pod{OTHER}/{THEIRS}"
    assert container_in(in_version_2(hidden)) == OURS


def test_a_static_pod_has_a_hash_for_its_uid() -> None:
    path = f"/kubepods/besteffort/pod{'ab' * 16}/{ID}"
    assert container_in(in_version_2(path)) == Container("ab" * 16, ID)


@pytest.mark.parametrize("text", ["", "\n", "0", "0:", "0::", ":::::", "\udcff:x:/\udcff"])
def test_text_that_is_no_cgroup_file_is_no_container(text: str) -> None:
    assert container_in(text) is None


def test_a_process_has_one_start_time_also_after_it_executed_a_program() -> None:
    script = "import os; os.read(0, 1); os.execvp('cat', ['cat'])"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        pid = process.pid
        began = processes.start_time(pid)
        process.stdin.write(b"\n")
        process.stdin.write(b"x")
        assert process.stdout.read(1) == b"x"  # it is cat now
        assert processes.start_time(pid) == began
        pidfd = processes.pidfd_of(pid)
        assert pidfd is not None and not processes.has_ended(pidfd)
        process.stdin.close()
        process.wait()
        assert processes.has_ended(pidfd)
        os.close(pidfd)
    assert processes.start_time(pid) is None
    assert processes.pidfd_of(pid) is None
    assert processes.container_of(pid) is None
    assert processes.mounted_region(pid) is None


def test_a_program_whose_name_looks_like_the_end_of_a_name(tmp_path: Path) -> None:
    program = tmp_path / "x) R 1 2"
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([program, "60"]) as process:
        assert (processes.start_time(process.pid) or 0) >= (processes.start_time(os.getpid()) or 0)
        process.kill()


def test_a_directory_is_found_in_its_file_system(tmp_path: Path) -> None:
    place = processes.place_of(tmp_path)
    assert place.path.endswith(tmp_path.name)
    device = tmp_path.stat().st_dev
    assert place.device == f"{os.major(device)}:{os.minor(device)}"
