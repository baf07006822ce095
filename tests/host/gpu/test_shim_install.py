"""`podfabric install --gpu`: files that containers have mounted stay, while new files are added."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cli.setup import shim_files
from cli.setup.shim_files import FILES
from tests.plugins import CHECKOUT
from tools import build_shim

NAMES = sorted(FILES)
COMMANDS = """
import json, os, signal, sys

from cli.setup import shim_files
from cli.commands import run
from pathlib import Path

root, left = sys.argv[1], 0

def step():
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

def hook(event, arguments):
    if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"):
        if root in str(arguments[0]):
            step()

def fsync(descriptor, real=os.fsync):
    step()
    real(descriptor)

os.fsync = fsync
sys.addaudithook(hook)
for line in sys.stdin:
    kill_at, source, words = json.loads(line)
    child = os.fork()
    if child == 0:
        left = kill_at
        shim_files.BUILT = Path(source)
        os.dup2(2, 1)
        os._exit(run(words))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Runs commands of podfabric, each in a process of its own, and prints how each ended. A command
can be killed before its n-th step on a file below the root."""


class Host:
    """A host's directories, and libraries of several versions to install there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.bin = root / "bin"
        self.bin.mkdir()
        self.shims = root / "state/gpu/shim"
        self.launcher = root / "launcher"
        self.launcher.write_bytes(b"\x7fELF...podfabric launcher 1...")
        environ = {f"PODFABRIC_{name.upper()}": str(root / name) for name in ("state", "etc")}
        self.commands = subprocess.Popen(
            [sys.executable, "-c", COMMANDS, str(root / "state")],
            cwd=CHECKOUT,
            env={**os.environ, **environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def version(self, name: str) -> Path:
        """A directory with libraries of a version."""
        source = self.root / name
        if not source.exists():
            source.mkdir()
            for library in FILES:
                (source / library).write_bytes(b"\x7fELF" + f"{library} {name}".encode() * 5000)
        return source

    def podfabric(self, version: str, *words: str | Path, killed_at: int = 0) -> int:
        """Run a command; returns its status, or the negative signal number if it was killed."""
        assert self.commands.stdin is not None and self.commands.stdout is not None
        request = (killed_at, str(self.version(version)), [str(word) for word in words])
        self.commands.stdin.write(json.dumps(request) + "\n")
        self.commands.stdin.flush()
        return int(self.commands.stdout.readline())

    def install(self, version: str, killed_at: int = 0) -> int:
        words = ("install", "--gpu", "--bin-dir", self.bin, "--launcher", self.launcher)
        return self.podfabric(version, *words, killed_at=killed_at)

    def uninstall(self, killed_at: int = 0) -> int:
        return self.podfabric("none", "uninstall", "--bin-dir", self.bin, killed_at=killed_at)

    def installed(self) -> dict[str, str]:
        """The version of each installed library; checks that each is complete."""
        found = {}
        for name in FILES:
            path = self.shims / name
            if path.exists():
                content = path.read_bytes()
                (found[name],) = (
                    source.name
                    for source in self.root.iterdir()
                    if (source / name).exists() and (source / name).read_bytes() == content
                )
        return found

    @contextmanager
    def container(self) -> Iterator[subprocess.Popen[str]]:
        """A mount namespace that sees the libraries as a container does, each file mounted."""
        target = self.root / "container"
        target.mkdir(exist_ok=True)
        script = (
            'for f in "$@"; do touch "$0/$f"; mount --bind "$SHIMS/$f" "$0/$f"; done; '
            'echo mounted; read -r line; cd "$0" && cat "$@"'
        )
        command = ["unshare", "--mount", "--propagation", "private", "sh", "-ec", script]
        with subprocess.Popen(
            [*command, str(target), *FILES],
            env={**os.environ, "SHIMS": str(self.shims)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "mounted\n"
            yield process
            process.kill()


def _seen(container: "subprocess.Popen[str]") -> str:
    """The versions of the libraries in a container."""
    assert container.stdin is not None and container.stdout is not None
    container.stdin.write("\n")
    container.stdin.flush()
    return container.stdout.read()


def _content(source: Path) -> str:
    return "".join((source / name).read_text() for name in FILES)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    yield made
    made.commands.kill()
    made.commands.communicate()


def test_libraries_of_make_gpu_are_installed_for_every_user_to_read(
    tmp_path: Path, host: Host
) -> None:
    built = build_shim.build(directory=tmp_path / "built")
    assert sorted(path.name for path in built) == NAMES
    list(shim_files.install(shim_files.read(tmp_path / "built"), host.shims))
    for path in built:
        installed = host.shims / path.name
        assert installed.read_bytes() == path.read_bytes()
        assert installed.stat().st_mode & 0o555 == 0o555


def test_nothing_is_installed_without_being_asked_for(host: Host) -> None:
    words = ("install", "--bin-dir", host.bin, "--launcher", host.launcher)
    assert host.podfabric("one", *words) == 0
    assert not host.shims.exists()


def test_container_keeps_the_libraries_that_it_began_with(host: Host) -> None:
    assert host.install("one") == 0
    with host.container() as first, host.container() as second:
        assert host.install("two") == 0
        assert host.installed() == dict.fromkeys(NAMES, "two")
        assert _seen(first) == _content(host.version("one"))
        assert host.uninstall() == 0
        assert not (host.root / "state/gpu").exists()
        assert _seen(second) == _content(host.version("one"))


def test_library_that_is_there_already_stays_and_a_damaged_one_is_replaced(host: Host) -> None:
    assert host.install("one") == 0
    whole, damaged = (host.shims / name for name in FILES)
    before = whole.stat().st_ino
    os.truncate(damaged, 100)
    assert host.install("one") == 0
    assert whole.stat().st_ino == before
    assert host.installed() == dict.fromkeys(NAMES, "one")


def test_install_after_a_kill_at_any_step_is_whole(host: Host) -> None:
    step, present = 1, ""
    while (status := host.install(f"killed-{step}", killed_at=step)) != 0:
        assert status == -9
        assert set(host.installed().values()) <= {present, f"killed-{step}"}
        present = f"after-{step}"
        assert host.install(present) == 0
        assert host.installed() == dict.fromkeys(NAMES, present)
        assert sorted(path.name for path in host.shims.iterdir()) == NAMES  # no temporary file
        step += 1
    assert step > 8  # opening, writing and renaming each, and the directory


def test_uninstall_after_a_kill_at_any_step_removes_everything(host: Host) -> None:
    step = 1
    assert host.install("one") == 0
    while (status := host.uninstall(killed_at=step)) != 0:
        assert status == -9
        assert host.uninstall() == 0
        assert not (host.root / "state/gpu").exists()
        assert host.install("one") == 0
        step += 1
    assert not (host.root / "state/gpu").exists()
    assert step > 3


def test_missing_or_invalid_library_is_refused_and_nothing_changes(host: Host) -> None:
    (host.version("bad") / FILES[0]).write_text("no library")
    assert host.install("bad") == 1
    (host.version("bad") / FILES[0]).unlink()
    assert host.install("bad") == 1
    assert list(host.bin.iterdir()) == []
    assert not host.shims.exists()
