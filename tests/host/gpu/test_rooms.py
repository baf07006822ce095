"""Each region has its own file system, which is all that the tenant can fill."""

import errno
import fcntl
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

from agent import leave_node
from gpu.limits import layout, processes
from gpu.limits.groups import Groups
from gpu.limits.region import RegionInvalid
from host import mounts
from tests.host.gpu.own_mounts import PRIVATE, in_container, mount, mounts_below, with_own_mounts
from tests.unit.gpu.killing import killed_at
from tests.unit.gpu.made import A, B, limit

PAGE = os.sysconf("SC_PAGE_SIZE")


def fill(path: Path) -> int:
    """Append to a file until nothing fits; returns the number of bytes."""
    with path.open("ab", buffering=0) as file:
        before = file.tell()
        try:
            while file.tell() < before + (64 << 20):
                file.write(b"x" * 65536)
        except OSError as error:
            assert error.errno == errno.ENOSPC
        return file.tell() - before


@contextmanager
def lease(path: Path, kind: int, flags: int) -> Iterator[None]:
    descriptor = os.open(path, flags)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, kind)
        yield
    finally:
        os.close(descriptor)


def test_enlarged_region_takes_no_room_from_other_tenants(tmp_path: Path) -> None:
    def act() -> None:
        mount("tmpfs", str(tmp_path), "tmpfs")  # which no other process fills meanwhile
        groups = Groups(tmp_path)
        first = groups.make("a", limit(A))
        before = os.statvfs(tmp_path).f_bavail
        assert fill(first / "region") < PAGE
        os.truncate(first / "region", 1 << 40)  # no page behind it
        assert os.statvfs(first / "region").f_blocks * PAGE < layout.REGION_SIZE + PAGE
        assert os.statvfs(tmp_path).f_bavail >= before - 16
        second = groups.make("b", limit(A))
        assert (second / "region").stat().st_dev != (first / "region").stat().st_dev
        groups.region("b", groups.read("b")).close()
        with pytest.raises(RegionInvalid, match="has 1099511627776 bytes"):
            groups.region("a", groups.read("a"))

    with_own_mounts(act)


def test_room_is_removed_with_its_group_and_an_earlier_holder_keeps_its_own(tmp_path: Path) -> None:
    def act() -> None:
        groups = Groups(tmp_path)
        path = groups.make("a", limit(A)) / "region"
        assert mounts_below(tmp_path) == ["a/region"]
        with path.open("r+b") as former:
            groups.make("a", limit(B))  # a new container has the slot
            assert mounts_below(tmp_path) == ["a/region"]
            former.write(b"written by the former holder")
            groups.region("a", groups.read("a")).close()
        groups.remove("a")
        assert (mounts_below(tmp_path), list(tmp_path.glob("a*"))) == ([], [])
        groups.remove("a")

    with_own_mounts(act)


def test_a_kill_at_any_change_leaves_no_group_or_a_whole_one_and_no_mount(tmp_path: Path) -> None:
    def act() -> None:
        groups = Groups(tmp_path)
        for number in count():
            killed = killed_at(number, lambda: groups.make("g", limit(A)))
            if "g" in groups.names():
                groups.region("g", groups.read("g")).close()
            groups.make("g", limit(B))
            groups.region("g", groups.read("g")).close()
            assert mounts_below(tmp_path) == ["g/region"]
            removed = killed_at(number, lambda: groups.remove("g"))
            groups.remove("g")
            assert mounts_below(tmp_path) == []
            if not killed and not removed:
                break
        assert number > 10

    with_own_mounts(act)


def test_the_agent_finds_the_region_that_a_container_has_mounted(tmp_path: Path) -> None:
    def act() -> None:
        path = Groups(tmp_path).make("a", limit(A)) / "region"
        device = path.stat().st_dev
        place = processes.place_of(path)
        assert place.path == "/region"
        assert place.device == f"{os.major(device)}:{os.minor(device)}"

    with_own_mounts(act)


def test_an_agent_in_a_container_mounts_where_the_runtime_sees_it(tmp_path: Path) -> None:
    def act() -> None:
        groups = Groups(tmp_path)
        assert groups.obstacle() is None
        first, second = (groups.make(name, limit(A)) for name in ("a", "b"))
        for pid in ("self", "1"):
            assert mounts_below(tmp_path, pid) == ["a/region", "b/region"]
        groups.region("a", groups.read("a")).close()
        assert processes.place_of(second / "region").path == "/region"
        groups.remove("a")
        groups.make("b", limit(B))
        for pid in ("self", "1"):
            assert mounts_below(tmp_path, pid) == ["b/region"]
        assert not first.exists()

    in_container(act)


def test_mounts_that_the_agent_does_not_see_are_an_obstacle(tmp_path: Path) -> None:
    """The same happens in a container whose directory is mounted without propagation."""

    def act() -> None:
        told = Groups(tmp_path).obstacle()
        assert told is not None
        assert "mountPropagation HostToContainer" in told
        assert mounts_below(tmp_path, "1") == []
        assert list(tmp_path.iterdir()) == []

    in_container(act, PRIVATE)


def test_agent_without_mount_rights_gets_an_error_with_the_needed_rights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), "somewhere")

    monkeypatch.setattr(mounts, "in_host", refuse)
    told = Groups(tmp_path).obstacle()
    assert told is not None
    assert "somewhere: Operation not permitted: give the agent the capabilities" in told


def test_an_agent_that_may_not_mount_removes_what_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent without these rights gives GPUs without limits, and has no groups."""

    def refused(act: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", "the host's mounts")

    monkeypatch.setattr(mounts, "in_host", refused)
    Groups(tmp_path).remove("a")


def test_an_agent_that_leaves_takes_the_mounts_away(tmp_path: Path) -> None:
    def act() -> None:
        groups = Groups(tmp_path / "gpu with a space")
        for name in ("a", "b"):
            groups.make(name, limit(A))
        leave_node._remove(groups.root)
        assert mounts_below(tmp_path, "1") == []
        assert not groups.root.exists()

    in_container(act)


def test_tenants_lease_does_not_delay_the_agent(tmp_path: Path) -> None:
    """An open(2) would wait for up to 45 s, and delay the limits of all groups."""

    def act() -> None:
        groups = Groups(tmp_path)
        directory = groups.make("a", limit(A))
        known = groups.read("a")
        signal.signal(signal.SIGIO, signal.SIG_IGN)  # SIGIO asks the holder to release the lease
        with (
            lease(directory / "region", fcntl.F_WRLCK, os.O_RDWR),
            pytest.raises(RegionInvalid, match="Resource temporarily unavailable"),
        ):
            groups.region("a", known)
        for kind in (fcntl.F_RDLCK, fcntl.F_WRLCK):  # a file of limits cannot have a lease
            with (
                pytest.raises(BlockingIOError),
                lease(directory / "limits", kind, os.O_RDONLY),
            ):
                pass
        groups.region("a", groups.read("a")).close()

    with_own_mounts(act)
