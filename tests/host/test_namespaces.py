"""Network namespaces of this machine: open, identify, enter and leave."""

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from host import procfs
from host.errors import HostError, NamespaceGone
from host.namespaces import NetworkNamespace, where
from host.netlink import links
from host.netlink.sockets import netlink
from tests.netns import IP, namespace
from tests.waiting import until


@pytest.fixture
def name() -> Iterator[str]:
    with namespace() as path:
        yield path.name


def _path(name: str) -> str:
    return f"/var/run/netns/{name}"


def test_new_namespace_has_another_identity(name: str) -> None:
    with NetworkNamespace.open(_path(name)) as first:
        identity = first.identity
        first.look_at_path()
        assert first.seen_from == where(_path(name))
        assert not first.was_removed()
        subprocess.run([IP, "netns", "delete", name], check=True)
        assert first.was_removed()
    subprocess.run([IP, "netns", "add", name], check=True)
    with NetworkNamespace.open(_path(name)) as second:
        assert second.identity != identity
        assert second.identity == second.identity


def test_socket_made_inside_stays_there_and_the_thread_does_not(name: str) -> None:
    before = Path("/proc/thread-self/ns/net").stat().st_ino
    with NetworkNamespace.open(_path(name)) as space, netlink(space) as inside:
        assert [link.name for link in links.every(inside)] == ["lo"]
        with pytest.raises(ZeroDivisionError), space.entered():
            raise ZeroDivisionError
    assert Path("/proc/thread-self/ns/net").stat().st_ino == before


def test_namespace_without_a_path_is_found_by_the_process_in_it(name: str) -> None:
    with NetworkNamespace.open(_path(name)) as space:
        identity, inode = space.identity, space.inode
    assert NetworkNamespace.find(identity) is None
    inside = subprocess.Popen([IP, "netns", "exec", name, "sleep", "600"])
    try:
        theirs = Path(f"/proc/{inside.pid}/ns/net")
        until(lambda: theirs.stat().st_ino == inode)
        subprocess.run([IP, "netns", "delete", name], check=True)
        namespace = NetworkNamespace.find(identity)
        assert namespace is not None
        with namespace:
            assert namespace.identity == identity
    finally:
        inside.kill()
        inside.wait()


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A proc(5) with one process, which ends while the walk over the processes visits it."""
    process = subprocess.Popen(["sleep", "600"])
    directory = os.open(f"/proc/{process.pid}", os.O_PATH)
    process.kill()
    process.wait()
    (tmp_path / str(process.pid)).symlink_to(f"/proc/self/fd/{directory}")
    monkeypatch.setattr(procfs, "_root", tmp_path)
    yield tmp_path
    os.close(directory)


def test_process_that_ends_during_a_walk_hides_no_other(processes: Path) -> None:
    (ended,) = processes.iterdir()
    with pytest.raises(ProcessLookupError):
        (ended / "ns/net").stat()
    with NetworkNamespace.own() as own:
        identity, inode = own.identity, own.inode
    assert NetworkNamespace.find(identity) is None
    (processes / "1").symlink_to("/proc/self")
    found = NetworkNamespace.find(identity)
    assert found is not None
    with found:
        assert found.identity == identity
    seen = []
    for each in NetworkNamespace.every():
        with each:
            seen.append(each.inode)
    assert inode in seen


def test_process_that_ends_as_it_is_examined_is_not_one_that_may_not_be(
    processes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (processes / "1").symlink_to("/proc/self")

    def ended(path: Path) -> Path:
        path.parent.parent.unlink()
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "readlink", ended)
    assert NetworkNamespace.find("cookie:0") is None


def test_process_that_may_not_be_examined_is_told(
    processes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (processes / "1").symlink_to("/proc/self")

    def refused(path: Path) -> Path:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "readlink", refused)
    with pytest.raises(HostError, match=r"some are unreadable: .*1/ns/net.*Permission denied"):
        NetworkNamespace.find("cookie:0")


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/run/netns/none", NamespaceGone),
        ("/etc/passwd/none", NamespaceGone),
        ("/etc/passwd", NamespaceGone),
        ("/proc/self/ns/mnt", NamespaceGone),
        ("/" + "x" * 300, HostError),
    ],
)
def test_only_a_missing_or_plain_file_is_a_namespace_that_is_gone(
    path: str, kind: type[HostError]
) -> None:
    with pytest.raises(HostError) as caught:
        NetworkNamespace.open(path)
    assert type(caught.value) is kind
    assert path in str(caught.value)
