"""The launcher's answers without an agent, compared with the same plugins in Python."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from cli.setup import executables
from cni.spec.entry import VERSIONS
from tests.host.launcher.fake import Launcher, Outcome
from tests.waiting import PATIENCE
from tools import make_cni


def _start(executable: Path, command: str | None) -> Outcome:
    environ = {} if command is None else {"CNI_COMMAND": command}
    done = subprocess.run([str(executable)], env=environ, capture_output=True, check=False)
    return Outcome(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("command", ["VERSION", "", None])
@pytest.mark.parametrize("name", [*executables.PLUGINS, "whereabouts"])
def test_launcher_and_interpreter_give_the_same_answers(
    directory: Path, built: Path, name: str, command: str | None
) -> None:
    script = directory / "script"
    script.write_bytes(make_cni.script(name))
    script.chmod(0o755)
    (directory / name).symlink_to(built)
    assert _start(directory / name, command) == _start(script, command)


@pytest.mark.parametrize(
    ("name", "about"),
    [
        ("sriov", "podfabric sriov: moves an SR-IOV virtual function into a pod"),
        ("later", "later: a podfabric CNI plugin"),
    ],
)
def test_about_of_a_name_without_a_plugin_here(
    directory: Path, built: Path, name: str, about: str
) -> None:
    (directory / name).symlink_to(built)
    versions = f"CNI protocol versions supported: {', '.join(VERSIONS)}"
    assert _start(directory / name, None) == Outcome(0, b"", f"{about}\n{versions}\n".encode())


@pytest.mark.parametrize("argv0", ["", "/", "x" * 5000, "a/b/ipoib"])
def test_any_argv_0_is_a_name(launcher: Launcher, argv0: str) -> None:
    for environ in ({}, launcher.environ()):
        done = subprocess.run(
            [argv0],
            executable=launcher.executable,
            env=environ,
            capture_output=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        outcome = Outcome(done.returncode, done.stdout, done.stderr)
        if environ:
            assert outcome.error["code"] == 11
        else:
            assert len(outcome.stderr) < 500


def test_version_reads_nothing_and_connects_to_nothing(launcher: Launcher, directory: Path) -> None:
    trace = directory / "trace"
    through = ("strace", "-f", "-o", str(trace), "-e", "trace=%file,%network,read,poll")
    with launcher.start(launcher.environ(CNI_COMMAND="VERSION"), through=through) as process:
        assert process.stdout is not None
        assert process.stdout.read()
        assert process.wait(PATIENCE) == 0  # its standard input is open until the end
    calls = set(re.findall(r"^\d+ +(\w+)\(", trace.read_text(), re.M))
    assert calls <= {"execve", "readlink", "readlinkat"}  # the C library asks for its own name


@pytest.mark.parametrize("closed", ["pipe", "descriptor"])
def test_version_that_cannot_be_written_is_an_error(launcher: Launcher, closed: str) -> None:
    environ = {"CNI_COMMAND": "VERSION"}
    if closed == "descriptor":
        assert launcher.run(environ, preexec_fn=lambda: os.close(1)).exit_code == 1
        return
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([launcher.executable], env=environ, stdout=writing, check=False)
    os.close(writing)
    assert done.returncode == 1


def test_launcher_is_small(built: Path) -> None:
    assert built.stat().st_size < 1 << 20


def test_it_starts_in_an_empty_root(launcher: Launcher, directory: Path) -> None:
    """It is static: no loader, no library, no /proc."""
    root = directory / "root"
    root.mkdir()
    shutil.copy(launcher.executable, root / "ipoib")
    for command, exit_code in (("VERSION", 0), ("ADD", 1)):
        done = subprocess.run(
            ["chroot", str(root), "/ipoib"],
            env={"CNI_COMMAND": command, "PATH": os.environ["PATH"]},
            input=b"{}",
            capture_output=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (exit_code, b"")
        assert done.stdout.startswith(b'{"cniVersion":"1.1.0"')
