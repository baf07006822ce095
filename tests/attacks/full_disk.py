"""A small disk that becomes full, runs out of inodes or becomes read-only; few descriptors or
memory."""

import _sqlite3
import ctypes
import errno
import os
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tests.waiting import until

PAGE = os.sysconf("SC_PAGESIZE")


class SmallDisk:
    """A mounted tmpfs: `directory` has the files under test, `base` a copy of them."""

    def __init__(self, mount: Path) -> None:
        self._mount = mount
        self._filler = mount / "filler"
        self.directory = mount / "state"
        self.base = mount / "base"

    def restore(self) -> None:
        """Make room, and replace `directory` by a copy of `base`."""
        self.make_room()
        shutil.rmtree(self.directory, ignore_errors=True)
        shutil.copytree(self.base, self.directory)

    def empty(self) -> None:
        """Make room, and empty `directory`."""
        self.make_room()
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir()

    def leave_pages(self, number: int) -> None:
        """Fill the disk until only `number` pages are free."""
        self._filler.mkdir(exist_ok=True)
        with (self._filler / "pages").open("wb") as file:
            free = os.statvfs(self._mount).f_bavail
            if free > number:
                os.posix_fallocate(file.fileno(), 0, (free - number) * PAGE)
        assert os.statvfs(self._mount).f_bavail == min(free, number)

    def leave_inodes(self, number: int) -> None:
        """Make files until only `number` inodes are free."""
        self._filler.mkdir(exist_ok=True)
        while os.statvfs(self._mount).f_favail > number:
            (self._filler / f"{time.monotonic_ns()}").touch()

    def make_room(self) -> None:
        """Remove the files that fill the disk."""
        shutil.rmtree(self._filler, ignore_errors=True)

    def make_read_only(self) -> None:
        """Remount it read-only, as soon as no file is open for writing (mount(2): EBUSY)."""
        command = ["mount", "-o", "remount,ro", str(self._mount)]
        until(
            lambda: subprocess.run(command, capture_output=True, check=False).returncode == 0,
            what="disk without open files",
        )

    def make_writable(self) -> None:
        """Remount it writable."""
        subprocess.run(["mount", "-o", "remount,rw", self._mount], check=True)

    def files(self) -> set[str]:
        """The names of all files in `directory`, relative to it."""
        return {
            str(path.relative_to(self.directory))
            for path in self.directory.rglob("*")
            if path.is_file()
        }


@contextmanager
def small_disk(pages: int = 256, inodes: int = 100) -> Iterator[SmallDisk]:
    """A disk with these numbers of pages and inodes; it is unmounted at the end."""
    mount = Path(tempfile.mkdtemp(prefix="podfabric-disk-"))
    options = f"size={pages * PAGE},nr_inodes={inodes},mode=0700"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", mount], check=True)
    try:
        yield SmallDisk(mount)
    finally:
        # Lazily, because a failed test may have left a file open.
        subprocess.run(["umount", "--lazy", mount], check=True)
        mount.rmdir()


@contextmanager
def descriptors_left(number: int) -> Iterator[None]:
    """In the block this process may open only `number` more files at once (RLIMIT_NOFILE)."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = [os.open(os.devnull, os.O_RDONLY) for _ in range(number + 1)]
    for descriptor in lowest_free:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free[-1], before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextmanager
def calls_left(number: int) -> Iterator[None]:
    """In the block only `number` more calls that change files succeed; later ones get ENOMEM.

    The kernel cannot be made to answer ENOMEM here. Functions do it in place of the calls that need
    kernel memory (open(2), write(2), rename(2), fallocate(2)).
    """
    names = ("open", "pwrite", "write", "replace", "posix_fallocate")
    before = {name: getattr(os, name) for name in names}
    left = number

    def limited(call: Callable[..., object], *arguments: object, **more: object) -> object:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return call(*arguments, **more)

    try:
        for name, call in before.items():
            setattr(os, name, partial(limited, call))
        yield
    finally:
        for name, call in before.items():
            setattr(os, name, call)


@contextmanager
def memory_left(number: int) -> Iterator[None]:
    """In the block SQLite may use only `number` more bytes in this process."""
    library = ctypes.CDLL(_sqlite3.__file__)  # it is linked to SQLite
    for name in ("sqlite3_memory_used", "sqlite3_hard_heap_limit64"):
        getattr(library, name).restype = ctypes.c_int64
    limit = library.sqlite3_memory_used() + number + 1  # 0 would mean no limit
    library.sqlite3_hard_heap_limit64(ctypes.c_int64(limit))
    try:
        yield
    finally:
        library.sqlite3_hard_heap_limit64(ctypes.c_int64(0))
