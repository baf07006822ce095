"""`podfabric install` and `uninstall`, on directories of made-up runtimes."""

import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.commands import run
from cli.setup import executables, install
from cli.setup.executables import EVERY, OWN, PLUGINS, REPLACED
from deviceplugin.allocate.memlock import HOOK

LAUNCHER = b"\x7fELF...podfabric launcher 1..."
INSTALLED = (*PLUGINS, HOOK)
FOREIGN = b"\x7fELF...somebody else's..."
STEPS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "ctypes.dlsym/handle"}


@pytest.fixture
def bin_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "bin"
    directory.mkdir()
    return directory


@pytest.fixture(autouse=True)
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "launcher"
    path.write_bytes(LAUNCHER)
    monkeypatch.setattr(executables, "LAUNCHER", path)
    return path


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for root in ("state", "etc", "kubelet", "cdi"):
        monkeypatch.setenv(f"PODFABRIC_{root.upper()}", str(tmp_path / root))
    return tmp_path / "state"


def _podfabric(*given: str | Path) -> int:
    return run([str(word) for word in given])


def _install(bin_dir: Path, *options: str | Path) -> int:
    return _podfabric("install", "--bin-dir", bin_dir, *options)


def _uninstall(bin_dir: Path) -> int:
    return _podfabric("uninstall", "--bin-dir", bin_dir)


def _tree(directory: Path) -> list[str]:
    return sorted(
        str(path.relative_to(directory)) for path in directory.rglob("*") if not path.is_dir()
    )


def test_every_plugin_is_the_launcher(bin_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _install(bin_dir) == 0
    assert _tree(bin_dir) == sorted(INSTALLED)
    for name in INSTALLED:
        assert (bin_dir / name).read_bytes() == LAUNCHER
        assert (bin_dir / name).stat().st_mode & 0o7777 == 0o755
    said = capsys.readouterr().out.splitlines()
    assert said == [f"installed {bin_dir / name}" for name in INSTALLED]


def untouched(path: Path) -> tuple[int, ...]:
    """Numbers that change when a file is replaced or written, but not when it is read."""
    found = path.lstat()
    return found.st_ino, found.st_mode, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def test_chosen_plugins_only(bin_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _install(bin_dir, "--plugins", "ipoib") == 0
    assert _tree(bin_dir) == ["ipoib", HOOK]
    with pytest.raises(SystemExit):
        _install(bin_dir, "--plugins", "ipoib,ipam")
    told = f'no plugin "ipam": choose from {", ".join(EVERY)}'
    assert told in capsys.readouterr().err


def test_mode_is_the_same_whatever_the_umask(bin_dir: Path) -> None:
    before = os.umask(0o077)
    try:
        assert _install(bin_dir) == 0
    finally:
        os.umask(before)
    assert (bin_dir / "ipoib").stat().st_mode & 0o7777 == 0o755


# Our executables and foreign ones.


def test_ours_are_replaced(bin_dir: Path, tmp_path: Path) -> None:
    (bin_dir / "ipoib").write_bytes(LAUNCHER + b"an older one")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(LAUNCHER + b"another")
    (bin_dir / "podfabric-ipam").symlink_to(elsewhere)
    assert _install(bin_dir) == 0
    assert all((bin_dir / name).read_bytes() == LAUNCHER for name in PLUGINS)
    assert not (bin_dir / "podfabric-ipam").is_symlink()
    assert elsewhere.read_bytes() == LAUNCHER + b"another"


@pytest.mark.parametrize("kind", ["file", "empty", "link", "dangling", "mention"])
def test_file_of_others_is_kept_and_comes_back_at_the_uninstall(
    bin_dir: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = bin_dir / "podfabric-ipam"
    (tmp_path / "other").write_bytes(FOREIGN)
    if kind == "link":
        path.symlink_to(tmp_path / "other")
    elif kind == "dangling":
        path.symlink_to("nowhere")
    else:
        # "mention": a text that speaks of us is not ours
        path.write_bytes({"file": FOREIGN, "empty": b"", "mention": b"podfabric launcher 1"}[kind])
    before = path.lstat()
    for _ in range(2):  # the second time there is nothing to keep
        assert _install(bin_dir) == 0
        assert path.read_bytes() == LAUNCHER
        assert os.path.samestat((bin_dir / REPLACED / "podfabric-ipam").lstat(), before)
    assert capsys.readouterr().out.count(f"{REPLACED}/podfabric-ipam, which was {path}") == 1
    assert (tmp_path / "other").read_bytes() == FOREIGN

    assert _uninstall(bin_dir) == 0
    assert os.path.samestat(path.lstat(), before)
    assert list(bin_dir.iterdir()) == [path]
    assert f"put back {path}" in capsys.readouterr().out.splitlines()


def test_a_launcher_of_any_version_is_never_kept(bin_dir: Path) -> None:
    (bin_dir / "ipoib").write_bytes(LAUNCHER.replace(b"launcher 1", b"launcher 20"))
    (bin_dir / "sriov").symlink_to("ipoib")
    assert _install(bin_dir) == 0
    assert not (bin_dir / OWN).exists()


def test_the_newest_file_of_others_is_kept(bin_dir: Path) -> None:
    for content in (FOREIGN, FOREIGN + b"2"):  # their installer runs again
        (bin_dir / "sriov").write_bytes(content)
        assert _install(bin_dir) == 0
    assert (bin_dir / REPLACED / "sriov").read_bytes() == FOREIGN + b"2"
    (bin_dir / "sriov").write_bytes(FOREIGN + b"3")
    assert _uninstall(bin_dir) == 0
    assert _tree(bin_dir) == ["sriov"]
    assert (bin_dir / "sriov").read_bytes() == FOREIGN + b"3"


def test_a_file_of_others_comes_back_also_where_the_launcher_is_gone(bin_dir: Path) -> None:
    (bin_dir / "sriov").write_bytes(FOREIGN)
    assert _install(bin_dir) == 0
    (bin_dir / "sriov").unlink()
    assert _uninstall(bin_dir) == 0
    assert (bin_dir / "sriov").read_bytes() == FOREIGN


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def _killed_before(step: int, act: Callable[[Path], int], bin_dir: Path) -> int:
    """The result of `act` in a child that is killed after `step` steps; -9 if it was killed."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    left = step

    def count(event: str, arguments: object) -> None:
        nonlocal left
        if event in STEPS:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    code = 1
    try:
        sys.addaudithook(count)
        code = act(bin_dir)
    finally:
        os._exit(code)


@pytest.mark.slow
@pytest.mark.parametrize("command", [_install, _uninstall])
def test_a_kill_at_any_step_loses_no_file_of_others(
    tmp_path: Path, command: Callable[[Path], int]
) -> None:
    """A runtime finds an executable at any moment, and a repeated run goes on."""
    theirs = {name: FOREIGN + name.encode() for name in ("ipoib", "sriov")}
    code = -9
    for step in itertools.count(1):
        if code == 0:
            break
        bin_dir = tmp_path / str(step)
        bin_dir.mkdir()
        for name, content in theirs.items():
            (bin_dir / name).write_bytes(content)
        link = bin_dir / "ib-sriov"
        link.symlink_to("sriov")
        assert command is _install or _install(bin_dir) == 0
        code = _killed_before(step, command, bin_dir)
        assert code in (0, -9)
        for name, content in theirs.items():
            found = (bin_dir / name).read_bytes()
            assert found in (LAUNCHER, content), (step, name)
            assert content in (found, _content(bin_dir / REPLACED / name)), (step, name)
        assert link.read_bytes() in (LAUNCHER, theirs["sriov"]), step
        assert command(bin_dir) == 0
        assert _uninstall(bin_dir) == 0
        assert {path.name: path.read_bytes() for path in bin_dir.iterdir()} == {
            **theirs,
            "ib-sriov": theirs["sriov"],
        }, step
        assert link.is_symlink(), step
        shutil.rmtree(bin_dir)
    assert step > 10


def test_directory_stays(bin_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (bin_dir / "ipoib").mkdir()
    assert _install(bin_dir) == 1
    assert f"{bin_dir / 'ipoib'}: is a directory: remove it" in capsys.readouterr().err
    assert _tree(bin_dir) == []


@pytest.mark.parametrize("kind", ["file", "link"])
def test_nothing_is_written_into_another_directory(
    bin_dir: Path, tmp_path: Path, kind: str
) -> None:
    if kind == "link":
        (bin_dir / OWN).symlink_to(tmp_path)
    else:
        (bin_dir / OWN).write_text("")
    assert _install(bin_dir) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"bin", "launcher"}
    assert [path.name for path in bin_dir.iterdir()] == [OWN]


# Interrupted, concurrent, impossible.


def test_failed_write_leaves_everything_as_it_was(
    bin_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _install(bin_dir) == 0
    before = {name: untouched(bin_dir / name) for name in _tree(bin_dir)}
    calls = []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 3:
            raise OSError(28, "No space left on device", "the third")

    monkeypatch.setattr(os, "fsync", full)
    assert _install(bin_dir) == 1
    assert {name: untouched(bin_dir / name) for name in _tree(bin_dir)} == before
    assert "No space left on device" in capsys.readouterr().err


def test_executable_in_use_is_replaced(bin_dir: Path) -> None:
    """Written in place, it would be busy."""
    path = bin_dir / "ipoib"
    path.write_bytes(Path("/bin/sleep").read_bytes() + b"podfabric launcher 1")
    path.chmod(0o755)
    with subprocess.Popen([path, "60"]) as running:
        assert _install(bin_dir) == 0
        running.kill()
    assert path.read_bytes() == LAUNCHER


def test_two_at_once_wait_for_each_other(bin_dir: Path) -> None:
    codes: list[int] = []
    threads = [threading.Thread(target=lambda: codes.append(_install(bin_dir))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [0] * 4
    assert _tree(bin_dir) == sorted(INSTALLED)


def test_directory_that_is_not_there_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (_install, _uninstall):
        assert command(tmp_path / "nowhere") == 1
        assert f"{tmp_path / 'nowhere'}: is not a directory" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["install", "uninstall"])
def test_directory_of_an_unset_variable_is_not_the_current_one(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(SystemExit):
        _podfabric(part, "--bin-dir", "")
    assert "--bin-dir: the path is empty" in capsys.readouterr().err
    assert not any((tmp_path / "here").iterdir())


def test_default_directory_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    default = tmp_path / "opt/cni/bin"
    monkeypatch.setattr(install, "DEFAULT_BIN_DIR", default)
    assert _podfabric("install") == 0
    assert _tree(default) == sorted(INSTALLED)


def test_launcher_must_be_one(
    bin_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    assert _install(bin_dir, "--launcher", other) == 1
    assert f"{other}: this launcher does not exist: run `make cni`" in capsys.readouterr().err
    other.write_bytes(FOREIGN)
    assert _install(bin_dir, "--launcher", other) == 1
    assert f"{other}: is not a launcher of podfabric" in capsys.readouterr().err
    assert _tree(bin_dir) == []


# Uninstall.


def test_uninstall_leaves_what_is_not_ours_and_says_so(
    bin_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _install(bin_dir) == 0
    (bin_dir / "ipoib").write_bytes(FOREIGN)
    (bin_dir / "bridge").write_bytes(FOREIGN)
    (bin_dir / OWN).mkdir()
    (bin_dir / OWN / "notes").write_text("mine")
    capsys.readouterr()
    assert _uninstall(bin_dir) == 0
    assert _tree(bin_dir) == [f"{OWN}/notes", "bridge", "ipoib"]
    said = capsys.readouterr().out.splitlines()
    assert f"left {bin_dir / 'ipoib'}: it is not podfabric's" in said
    assert f"removed {bin_dir / 'podfabric-ipam'}" in said


def test_uninstall_leaves_the_cdi_device_of_running_containers_without_the_hook(
    bin_dir: Path, tmp_path: Path
) -> None:
    _install(bin_dir)
    specification = tmp_path / "cdi" / f"{HOOK}.json"
    specification.parent.mkdir()
    specification.write_text('{"devices": [{"name": "unlimited"}]}')
    unreadable = tmp_path / "kubelet/device-plugins/kubelet_internal_checkpoint"
    unreadable.parent.mkdir(parents=True)
    unreadable.write_text("{")
    assert _uninstall(bin_dir) == 0
    assert _tree(bin_dir) == []
    assert "PODFABRIC_MEMLOCK=unlimited" in specification.read_text()
