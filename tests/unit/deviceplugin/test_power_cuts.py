"""The ledger and a power cut before any system call: no answered allocation is lost.

The disk is a model that keeps nothing but what it was told to, and perhaps more: a file's fsync
keeps its content and its name, a directory's fsync keeps the renames and removals in it. A rename
happens as a whole.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from base.paths import Paths
from deviceplugin import checkpoint
from deviceplugin.checkpoint import AllocatedHCA
from deviceplugin.ledger import Ledger

RESOURCE, HCA = "rdma/hca", "0000:3b:00.0"


class Disk:
    """A directory. Files are numbers; `cut` is called before each system call."""

    def __init__(self, patch: pytest.MonkeyPatch, cut: Callable[[], None]) -> None:
        self._names: dict[str, int] = {}
        self._contents: list[bytearray] = []
        self._kept_names: dict[str, int] = {}
        self._kept: dict[int, bytes] = {}
        self._descriptors: dict[int, int | None] = {}  # None: the directory
        self._cut = cut
        self._is_cut = False  # what runs then does so on other disks
        for name, note in (
            ("open", self._opened),
            ("pwrite", self._wrote),
            ("fsync", self._synced),
            ("fdatasync", self._synced),
            ("replace", self._replaced),
            ("unlink", self._unlinked),
        ):
            patch.setattr(os, name, self._noted(getattr(os, name), note))

    def states(self) -> Iterator[dict[str, bytes]]:
        """The states after a power cut: names and contents, each old, new, or half written."""
        named = self._names.values()
        removed = {name: inode for name, inode in self._kept_names.items() if inode in named}
        new = [bytes(content) for content in self._contents]
        old = [
            self._kept.get(index, b"").ljust(len(new[index]), b"\0") for index in range(len(new))
        ]
        cut = [len(content) // 2 for content in new]
        first = [now[:at] + was[at:] for now, was, at in zip(new, old, cut, strict=True)]
        last = [was[:at] + now[at:] for now, was, at in zip(new, old, cut, strict=True)]
        for names in (self._names, self._kept_names, removed):
            for contents in (new, old, first, last):
                yield {name: contents[inode] for name, inode in names.items()}

    def _noted(self, call: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
        def noted(*given: Any, **named: Any) -> Any:  # noqa: ANN401 - of any call
            if self._is_cut:
                return call(*given, **named)
            self._is_cut = True
            self._cut()
            self._is_cut = False
            result = call(*given, **named)
            note(result, *given)
            return result

        return noted

    def _opened(self, descriptor: int, path: Path | str, flags: int, *_: int) -> None:
        if flags & os.O_DIRECTORY:
            self._descriptors[descriptor] = None
            return
        name = Path(path).name
        if name not in self._names:
            self._names[name] = len(self._contents)
            self._contents.append(bytearray())
        inode = self._descriptors[descriptor] = self._names[name]
        if flags & os.O_TRUNC:
            self._contents[inode].clear()

    def _wrote(self, count: int, descriptor: int, content: memoryview, offset: int) -> None:
        inode = self._descriptors[descriptor]
        assert inode is not None
        self._contents[inode][offset : offset + count] = bytes(content[:count])

    def _synced(self, _: None, descriptor: int) -> None:
        inode = self._descriptors[descriptor]
        if inode is None:
            self._kept_names = dict(self._names)
        else:
            self._kept[inode] = bytes(self._contents[inode])
            self._kept_names |= {name: of for name, of in self._names.items() if of == inode}

    def _replaced(self, _: None, before: Path | str, after: Path | str) -> None:
        self._names[Path(after).name] = self._names.pop(Path(before).name)

    def _unlinked(self, _: None, path: Path | str) -> None:
        self._names.pop(Path(path).name, None)


class Recording:
    """A ledger that records one id after another, with a power cut before each system call."""

    def __init__(self, patch: pytest.MonkeyPatch, directory: Path) -> None:
        self._after = directory / "after"
        self._asked: set[str] = set()
        self._answered: set[str] = set()
        self._seen: set[tuple[object, ...]] = set()
        self._disk = Disk(patch, self.cut)
        self.ledger = Ledger(Paths(state=directory / "state"), "a boot", pytest.fail)

    def record(self, number: int) -> None:
        device_id = f"{HCA}-{number}"
        device = AllocatedHCA(id=HCA, address=HCA, netdevs=(), rdma=())
        self._asked.add(device_id)
        self.ledger.record(RESOURCE, {device_id: (device,)})
        self._answered.add(device_id)

    def cut(self) -> None:
        """Check every state that the disk may be in now: all answered ids, and no other ones."""
        for state in self._disk.states():
            key = (*sorted(state.items()), len(self._answered))
            if key in self._seen:
                continue
            self._seen.add(key)
            paths = Paths(state=self._after / str(len(self._seen)))
            paths.devices.mkdir(parents=True)
            for name, content in state.items():
                (paths.devices / name).write_bytes(content)
            checkpoint.recover(paths)
            ids = {allocation.id for allocation in checkpoint.read(paths).allocations}
            assert [file.name for file in paths.devices.iterdir()] in ([], [paths.checkpoint.name])
            assert self._answered <= ids <= self._asked, sorted(state)

    @property
    def states(self) -> int:
        """How many different ones were looked at."""
        return len(self._seen)


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Recording:
    return Recording(monkeypatch, tmp_path)


def test_answered_allocation_outlives_a_power_cut_at_any_moment(recording: Recording) -> None:
    recording.ledger.serve({RESOURCE: ()})
    for number in range(7):
        recording.record(number)
    recording.ledger.settle()
    assert recording.states > 40
