"""A failed call that could not undo its change says so, and its remedy works.

The disk is full when SQLite commits, and the log cannot be cut any more (it is append-only).
"""

import array
import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cni.spec.errors import CNIError, Code
from ipam.recovery import LOG
from tests.attacks.full_disk import SmallDisk
from tests.attacks.full_disk_ipam import RANGES, WAYS, Watched, disk_with_store, node_on
from tests.unit.ipam.calls import error_of

PAGES = 2  # enough for the log's lines, too few for SQLite's

_FS_IOC_GETFLAGS, _FS_IOC_SETFLAGS, _FS_APPEND_FL = 0x80086601, 0x40086602, 0x20


@contextmanager
def append_only(path: Path) -> Iterator[None]:
    """The file cannot be cut until the end (chattr(1) +a)."""
    descriptor = os.open(path, os.O_RDONLY)
    before, after = array.array("i", [0]), array.array("i", [0])
    try:
        try:
            fcntl.ioctl(descriptor, _FS_IOC_GETFLAGS, before)
        except OSError as error:
            assert error.errno == errno.ENOTTY
            pytest.skip("a tmpfs has no attributes before Linux 6.6")
        after[0] = before[0] | _FS_APPEND_FL
        fcntl.ioctl(descriptor, _FS_IOC_SETFLAGS, after)
        yield
    finally:
        fcntl.ioctl(descriptor, _FS_IOC_SETFLAGS, before)
        os.close(descriptor)


@pytest.fixture(params=WAYS)
def node(request: pytest.FixtureRequest) -> Iterator[tuple[Watched, SmallDisk]]:
    with disk_with_store() as disk:
        disk.restore()
        with node_on(disk.directory, request.param) as node:
            yield node, disk


def failure_of(verb: str, container_id: str, node: Watched, disk: SmallDisk) -> CNIError:
    """The error of a call whose change stays in the log."""
    calls = node.calls
    with append_only(disk.directory / LOG):
        disk.leave_pages(PAGES)
        error = error_of(
            lambda: (calls.add if verb == "ADD" else calls.delete)(RANGES, container_id)
        )
        disk.make_room()
    assert error.code == Code.IO_FAILURE
    return error


def test_add_says_that_it_is_not_certain_and_del_releases(
    node: tuple[Watched, SmallDisk],
) -> None:
    watched, disk = node
    error = failure_of("ADD", "new", watched, disk)
    assert "it is not certain whether the change was made: call DEL" in error.message
    assert "nothing was changed" not in error.message
    assert watched.call("DEL", "new")
    watched.require_that_all_goes_on()


def test_del_says_that_it_is_not_certain_and_another_del_releases(
    node: tuple[Watched, SmallDisk],
) -> None:
    watched, disk = node
    error = failure_of("DEL", "c1", watched, disk)
    assert "it is not certain whether the change was made" in error.message
    assert "nothing was changed" not in error.message
    assert watched.call("DEL", "c1")
    watched.require_that_all_goes_on()


def test_add_after_a_del_that_is_not_certain_gives_no_address_to_two(
    node: tuple[Watched, SmallDisk],
) -> None:
    watched, disk = node
    failure_of("DEL", "c1", watched, disk)
    released = {address for address, holder in watched.said.items() if holder == "c1"}
    kept = dict(watched.calls.held())
    assert {address: holder for address, holder in watched.said.items() if holder != "c1"} == {
        address: holder for address, holder in kept.items() if address not in released
    }
    watched.said = kept
    watched.require_that_all_goes_on()
