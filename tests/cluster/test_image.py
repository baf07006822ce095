"""The image: its contents, and that it runs in the chart's pod. No cluster is needed."""

import json
import os
import platform
import re
import shutil
import socket
import stat
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli.setup import shim_files
from deploy.assemble import ONLY_FOR_ASYNCIO
from tests.cluster.built_image import (
    SBOM,
    Container,
    RunningContainer,
    built,
    configuration,
    unpack,
)
from tests.netns import namespace
from tests.plugins.service import install_launchers
from tests.runtime import CHECKOUT, Runtime
from tests.waiting import until
from tools import manifests

MOST_BYTES = 150_000_000  # unpacked
MACHINES = {"launcher-x86_64": 62, "launcher-aarch64": 183}  # e_machine of elf(5)
PT_INTERP = 3  # names a dynamic linker
COMPILERS = re.compile(r"(.*-)?(cc|gcc|g\+\+|c\+\+|clang|ld|as|cpp|make)(-\d+)?")
SHELLS = {"sh", "bash", "dash", "ash", "busybox", "zsh", "apt", "apt-get", "dpkg", "pip", "pip3"}


@pytest.fixture(scope="session")
def rootfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The image's files."""
    directory = tmp_path_factory.mktemp("image")
    unpack(directory)
    yield directory
    shutil.rmtree(directory)


def _executables(rootfs: Path) -> list[Path]:
    return [
        path
        for path in rootfs.rglob("*")
        if path.is_file() and not path.is_symlink() and path.stat().st_mode & 0o111
    ]


def _segments(elf: bytes) -> set[int]:
    """The types of an executable's program headers (elf(5), 64 bits)."""
    offset = int.from_bytes(elf[32:40], "little")
    size, count = (int.from_bytes(elf[at : at + 2], "little") for at in (54, 56))
    starts = range(offset, offset + size * count, size)
    return {int.from_bytes(elf[start : start + 4], "little") for start in starts}


def _pod(*arguments: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The chart's pod, and the data of its ConfigMap."""
    text = manifests.template("--no-hooks", *arguments)
    objects = {one["kind"]: one for one in yaml.safe_load_all(text) if one}
    return objects["DaemonSet"]["spec"]["template"]["spec"], objects["ConfigMap"]["data"]


def _container(
    rootfs: Path,
    tmp_path: Path,
    which: dict[str, Any],
    volumes: Sequence[dict[str, Any]] = (),
    config_map: dict[str, str] | None = None,
) -> Container:
    return Container(
        rootfs, tmp_path / which["name"], tmp_path / "host", which, volumes, config_map or {}
    )


def test_image_is_small(rootfs: Path) -> None:
    files = (path for path in rootfs.rglob("*") if not path.is_symlink() and path.is_file())
    assert sum(path.stat().st_size for path in files) < MOST_BYTES


def test_image_has_no_compiler_no_shell_and_no_package_manager(rootfs: Path) -> None:
    names = {path.name for path in _executables(rootfs)}
    assert {name for name in names if COMPILERS.fullmatch(name)} == set()
    assert names & SHELLS == set()
    assert not (rootfs / "bin/sh").exists()


def test_no_executable_needs_an_interpreter_that_is_not_there(rootfs: Path) -> None:
    for path in _executables(rootfs):
        with path.open("rb") as file:
            line = file.readline(200)
        if line.startswith(b"#!") and path.parent.name == "bin":
            interpreter = line[2:].split()[0].decode()
            assert os.path.lexists(rootfs / interpreter.lstrip("/")), (path, interpreter)


def test_nothing_in_the_image_gives_rights_away(rootfs: Path) -> None:
    for path in rootfs.rglob("*"):
        mode = path.lstat().st_mode
        assert not mode & (stat.S_ISUID | stat.S_ISGID), path
        writable = bool(mode & 0o002) and not stat.S_ISLNK(mode)
        assert not writable or path == rootfs / "tmp", path


def test_interpreter_is_the_one_that_the_code_is_tested_on(rootfs: Path) -> None:
    done = subprocess.run(
        ["chroot", rootfs, "/opt/podfabric/bin/python3", "-V"],
        capture_output=True,
        text=True,
        check=True,
    )
    major, minor, _ = platform.python_version_tuple()
    assert done.stdout.startswith(f"Python {major}.{minor}.")


def test_launchers_of_both_architectures_are_there_and_need_no_library(rootfs: Path) -> None:
    directory = rootfs / "opt/podfabric/lib/podfabric"
    assert {path.name for path in directory.iterdir() if path.is_file()} == MACHINES.keys()
    for name, machine in MACHINES.items():
        content = (directory / name).read_bytes()
        assert content[:5] == b"\x7fELF\x02"
        assert int.from_bytes(content[18:20], "little") == machine
        assert b"podfabric launcher 1" in content
        assert PT_INTERP not in _segments(content)


def test_programs_for_gpus_of_both_architectures_are_there(rootfs: Path) -> None:
    directory = rootfs / "opt/podfabric/lib/podfabric"
    for name, machine in MACHINES.items():
        programs = directory / name.replace("launcher", "gpu")
        assert {path.name for path in programs.iterdir()} == {
            *("libpfcuda.so", "libpfnvml.so"),  # the shims
        }
        for path in programs.iterdir():
            content = path.read_bytes()
            assert content[:5] == b"\x7fELF\x02"
            assert int.from_bytes(content[18:20], "little") == machine


def test_bill_of_materials_lists_what_is_there(rootfs: Path) -> None:
    inside = rootfs / "usr/share/podfabric/sbom.cdx.json"
    assert inside.read_bytes() == SBOM.read_bytes()
    bill = json.loads(inside.read_bytes())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.5")
    listed = {(one["name"], one["version"]) for one in bill["components"] if "pypi" in one["purl"]}
    locked = re.findall(
        r"^([\w.-]+)==(\S+)", (CHECKOUT / "requirements.lock").read_text(), re.MULTILINE
    )
    # Of the API server's client, the packages that only asyncio needs are left out.
    wanted = {(name, version) for name, version in locked if name not in ONLY_FOR_ASYNCIO}
    assert listed == wanted
    metadata = rootfs.glob("opt/podfabric/lib/python3*/site-packages/*.dist-info")
    assert len(list(metadata)) == len(listed) + 1  # plus podfabric
    debian = {one["name"] for one in bill["components"] if "pkg:deb" in one["purl"]}
    documented = {path.name for path in (rootfs / "usr/share/doc").iterdir()}
    assert debian == documented  # with its license, or a link to another package's


def test_a_package_with_another_hash_is_not_installed(tmp_path: Path) -> None:
    built()  # the earlier stages and the base
    for name in ("deploy", "tools", "cni", "gpu"):
        shutil.copytree(CHECKOUT / name, tmp_path / name)
    lock = (CHECKOUT / "requirements.lock").read_text()
    assert "inotify-simple==" in lock
    before, name, after = lock.partition("inotify-simple==")
    wrong = re.sub(r"sha256:\w{4}", "sha256:0000", after, count=2)
    (tmp_path / "requirements.lock").write_text(f"{before}{name}{wrong}")
    authorities = Path("/etc/ssl/certs/ca-certificates.crt")
    secret = [f"--secret=id=ca,src={authorities}"] if authorities.exists() else []
    command = ["buildah", "build", "--isolation", "chroot", "--layers", "--force-rm", *secret]
    command += ["--pull=false"]
    command += ["--build-arg", "BASE=localhost/podfabric-base:bookworm", "--target", "python"]
    done = subprocess.run(
        [*command, "--file", "deploy/Containerfile", "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stdout + done.stderr


def test_commands_run_without_rights_on_a_read_only_root(rootfs: Path, tmp_path: Path) -> None:
    assert configuration()["User"] == "65532:65532"
    done = _container(rootfs, tmp_path, {"name": "plain"}).run("--help")
    assert done.returncode == 0, done.stderr
    assert "RDMA fabrics for Kubernetes pods" in done.stdout


def test_the_client_of_the_api_server_is_whole(rootfs: Path) -> None:
    """The image leaves out models and calls; the rest must work without them."""
    code = "from kube.transport import KubernetesApi; KubernetesApi()"
    done = subprocess.run(
        ["chroot", rootfs, "/opt/podfabric/bin/python3", "-c", code],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "no API server in this pod" in done.stderr


def test_a_transfer_over_verbs_finds_its_libraries_and_drivers(rootfs: Path) -> None:
    """ib_write_bw is what `podfabric check` starts."""
    command = ["chroot", "--userspec=65532", str(rootfs), "ib_write_bw", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "Version" in done.stdout, done.stderr
    for driver in ("mlx5", "rxe"):
        assert (rootfs / f"etc/libibverbs.d/{driver}.driver").read_text() == f"driver {driver}\n"
        assert list(rootfs.glob(f"usr/lib/*/libibverbs/lib{driver}-rdmav*.so"))


def test_init_container_installs_this_machines_launchers(rootfs: Path, tmp_path: Path) -> None:
    pod, _ = _pod()
    (install,) = pod["initContainers"]
    container = _container(rootfs, tmp_path, install, pod["volumes"])
    done = container.run(*install["args"])
    assert done.returncode == 0, done.stderr
    ours = rootfs / f"opt/podfabric/lib/podfabric/launcher-{platform.machine()}"
    installed = tmp_path / "host/opt/cni/bin"
    assert {path.name for path in installed.iterdir()} == {
        *("ib-sriov", "ipoib", "podfabric-ipam", "podfabric-ipvlan", "podfabric-macvlan"),
        *("podfabric-memlock", "rdma", "sriov"),
    }
    assert all(path.read_bytes() == ours.read_bytes() for path in installed.iterdir())


def test_init_container_installs_the_libraries_for_parts_of_gpus(
    rootfs: Path, tmp_path: Path
) -> None:
    pod, _ = _pod("--set-json", 'config.gpus=[{"mode":"units"}]')
    (install,) = pod["initContainers"]
    container = _container(rootfs, tmp_path, install, pod["volumes"])
    done = container.run(*install["args"])
    assert done.returncode == 0, done.stderr
    ours = rootfs / f"opt/podfabric/lib/podfabric/gpu-{platform.machine()}"
    installed = tmp_path / "host/var/lib/podfabric/gpu/shim"
    assert sorted(path.name for path in installed.iterdir()) == sorted(shim_files.FILES)
    for path in installed.iterdir():
        assert path.read_bytes() == (ours / path.name).read_bytes()


def _answers(probe: dict[str, Any], running: RunningContainer) -> bool:
    """The kubelet's probe of a pod in the host's network."""
    assert running.process.poll() is None, "the agent's container has ended"
    connection = HTTPConnection(probe["host"], probe["port"], timeout=10)
    try:
        connection.request("GET", probe["path"])
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def test_charts_agent_serves_launchers_from_its_container(rootfs: Path, tmp_path: Path) -> None:
    """With only the capabilities, mounts and read-only root of the chart."""
    # There is no API server to read policies from.
    listen = f"config.agent.listen=127.0.0.1:{_free_port()}"
    values = f"ipam.scope=node,policy.enabled=false,{listen}"
    pod, config_map = _pod("--set", values)
    (agent,) = pod["containers"]
    container = _container(rootfs, tmp_path, agent, pod["volumes"], config_map)
    log = tmp_path / "log"
    config = {"cniVersion": "1.0.0", "name": "n", "type": "podfabric-ipam"}
    config |= {"ipam": {"type": "podfabric-ipam", "range": "10.9.0.0/24"}}  # type: ignore[dict-item]
    with container.running(log) as running, namespace() as netns:
        running.wait_for(*agent["startupProbe"]["exec"]["command"])
        until(lambda: _answers(agent["readinessProbe"]["httpGet"], running), what="readiness")
        install_launchers(tmp_path / "bin", ["podfabric-ipam"])
        runtime = Runtime(
            bin_dir=tmp_path / "bin",
            environ={
                **os.environ,
                "PODFABRIC_SOCKET": str(tmp_path / "host/run/podfabric/agent.sock"),
            },
        )
        added = runtime.call("ADD", config, container_id="c1", netns=str(netns))
        assert added.exit_code == 0, f"{added}\n{log.read_text()}"
        assert json.loads(added.stdout)["ips"][0]["address"] == "10.9.0.1/24"
        assert "10.9.0.1" in running.exec("podfabric", "ipam", "list").stdout
        deleted = runtime.call("DEL", config, container_id="c1", netns=str(netns))
        assert deleted.exit_code == 0, f"{deleted}\n{log.read_text()}"
        assert "10.9.0.1" not in running.exec("podfabric", "ipam", "list").stdout
    assert running.process.returncode == 0, log.read_text()


def test_next_agents_container_stands_by_and_serves_when_this_one_ends(
    rootfs: Path, tmp_path: Path
) -> None:
    """Kubernetes' steps in an update with `maxSurge: 1`, by the chart's probes.

    There is no API server: an agent serves without it.
    """
    pod, config_map = _pod("--set", f"config.agent.listen=127.0.0.1:{_free_port()}")
    (agent,) = pod["containers"]
    one, other = (
        Container(rootfs, tmp_path / name, tmp_path / "host", agent, pod["volumes"], config_map)
        for name in ("one", "other")
    )
    probe = agent["startupProbe"]["exec"]["command"]
    with ExitStack() as stack:
        ending = stack.enter_context(ExitStack())
        present = ending.enter_context(one.running(tmp_path / "one.log"))
        present.wait_for(*probe)
        until(lambda: "serving" in present.exec(*probe).stdout, what="agent that serves")
        following = stack.enter_context(other.running(tmp_path / "other.log"))
        following.wait_for(*probe)
        assert following.exec(*probe).stdout == "standing by\n"
        assert _answers(agent["readinessProbe"]["httpGet"], following)
        ending.close()
        assert present.process.returncode == 0
        until(lambda: "serving" in following.exec(*probe).stdout, what="next agent that serves")
        until(lambda: _answers(agent["readinessProbe"]["httpGet"], following), what="readiness")
