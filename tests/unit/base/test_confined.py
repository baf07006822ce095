"""Files below a directory: links and special files are refused, also when they are swapped in."""

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from base import confined
from base.confined import UnsafeFile

MOST = 1000
TRIES = 20_000


@pytest.fixture
def inside(tmp_path: Path) -> Path:
    """The allowed directory, with a file and a directory in it, and a forbidden one beside it."""
    directory = tmp_path / "inside"
    (directory / "deeper").mkdir(parents=True)
    (directory / "deeper/file").write_text("inside\n")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/file").write_text("outside\n")
    return directory


def read(directory: Path, name: str) -> bytes:
    return confined.read([str(directory)], f"{directory}/{name}", MOST)


def test_the_directory_itself_may_be_behind_a_link(inside: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(inside)
    assert read(tmp_path / "link", ".//deeper/./file") == b"inside\n"


def test_first_matching_directory_is_used(inside: Path) -> None:
    directories = ["/nowhere", str(inside)]
    assert confined.read(directories, f"{inside}/deeper/file", MOST) == b"inside\n"


@pytest.mark.parametrize(
    "path",
    ["", "file", "/", "{}", "{}/", "{}/.", "{}/../outside/file", "{}/deeper/../deeper/file",
     "{}-too/file", "/proc/self/root{}/deeper/file", "{}/a\0b", "{}/\ud800"],
)  # fmt: skip
def test_a_path_that_leads_elsewhere_is_not_below(inside: Path, path: str) -> None:
    whole = path.replace("{}", str(inside))
    assert not confined.is_below([str(inside)], whole)
    with pytest.raises(UnsafeFile):
        confined.read([str(inside)], whole, MOST)


def test_nothing_is_below_no_directory() -> None:
    assert not confined.is_below([], "/etc/hostname")


@pytest.mark.parametrize("name", ["link", "way/file", "dangling", "deeper/file/below"])
def test_a_link_is_not_followed_anywhere(inside: Path, name: str) -> None:
    (inside / "link").symlink_to("deeper/file")
    (inside / "way").symlink_to("../outside")
    (inside / "dangling").symlink_to("../outside/new")
    with pytest.raises(UnsafeFile):
        read(inside, name)
    assert (inside.parent / "outside/file").read_text() == "outside\n"
    assert not (inside.parent / "outside/new").exists()


@pytest.mark.parametrize("read_by_someone", [False, True])
def test_a_pipe_is_not_waited_for(inside: Path, read_by_someone: bool) -> None:
    os.mkfifo(inside / "pipe")
    reader = os.open(inside / "pipe", os.O_RDONLY | os.O_NONBLOCK) if read_by_someone else None
    with pytest.raises(UnsafeFile, match="not a regular file"):
        read(inside, "pipe")
    if reader is not None:
        os.close(reader)


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/full", "/proc/self/environ", "/proc/1/root/x"])
def test_devices_and_links_of_proc_are_not_read(path: str) -> None:
    _, directory, name = path.split("/", 2)
    with pytest.raises(UnsafeFile):
        read(Path("/") / directory, name)


def test_directory_is_refused(inside: Path) -> None:
    with pytest.raises(UnsafeFile, match="not a regular file"):
        read(inside, "deeper")


def test_sizes_are_bounded(inside: Path) -> None:
    (inside / "file").write_bytes(b"x" * MOST)
    assert len(read(inside, "file")) == MOST
    (inside / "file").write_bytes(b"x" * (MOST + 1))
    with pytest.raises(UnsafeFile, match="more than"):
        read(inside, "file")


def test_missing_file_is_an_os_error(inside: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read(inside, "nowhere/file")


def test_no_descriptor_is_left_open(inside: Path) -> None:
    (inside / "link").symlink_to("deeper/file")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for name in ("deeper/file", "link", "link/below", "nowhere/file"):
        with suppress(UnsafeFile, OSError):
            read(inside, name)
    assert (
        len(list(Path("/proc/self/fd").iterdir())) <= before
    )  # another test's may have been closed


@pytest.fixture
def swapped(inside: Path) -> Iterator[Path]:
    """The allowed directory, where "deeper" alternates between a directory and a link outside."""
    (inside / "link").symlink_to("../outside")
    end = threading.Event()

    def swap() -> None:
        while not end.is_set():
            (inside / "deeper").rename(inside / "directory")
            (inside / "link").rename(inside / "deeper")
            (inside / "deeper").rename(inside / "link")
            (inside / "directory").rename(inside / "deeper")

    thread = threading.Thread(target=swap)
    thread.start()
    yield inside
    end.set()
    thread.join()


def test_a_directory_that_becomes_a_link_leads_nowhere(swapped: Path) -> None:
    seen: set[object] = set()
    for _ in range(TRIES):
        try:
            seen.add(read(swapped, "deeper/file")[:7])
        except (UnsafeFile, OSError) as error:
            seen.add(type(error))
        if {b"inside\n", UnsafeFile} <= seen:
            break
    assert b"outside" not in seen
    assert (swapped.parent / "outside/file").read_text() == "outside\n"
    assert b"inside\n" in seen
