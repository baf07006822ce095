"""The files of groups: made whole or not at all, changed while they are read, never half."""

import mmap
import os
import select
import stat
import struct
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest

from gpu.limits import layout
from gpu.limits.groups import Groups
from gpu.limits.limits_file import GroupError, Limit, LimitsFile
from gpu.limits.region import RegionInvalid
from tests.unit.gpu.groups import PlainRegions
from tests.unit.gpu.killing import killed_at
from tests.unit.gpu.made import GIB, A, B, limit

NO_REGION = b"\0" * layout.REGION_SIZE


@pytest.fixture
def groups(tmp_path: Path) -> Groups:
    return Groups(tmp_path / "gpu", regions=PlainRegions())


def memory(groups: Groups, group: str = "g") -> int:
    return groups.read(group).limit.memory_bytes


def sequence(path: Path) -> int:
    (number,) = struct.unpack_from("<Q", path.read_bytes(), 16)
    return int(number)


def test_a_new_group_has_both_files_as_the_header_describes_them(tmp_path: Path) -> None:
    groups = Groups(tmp_path, regions=PlainRegions())
    directory = groups.make("g", limit(A, 2 * GIB, 0.25))
    limits = layout.PfLimits.from_buffer_copy((directory / "limits").read_bytes())
    region = layout.PfRegion.from_buffer_copy((directory / "region").read_bytes())
    assert (limits.header.magic, limits.header.version) == (layout.LIMITS_MAGIC, 1)
    assert (limits.header.size, limits.header.sequence) == (layout.LIMITS_SIZE, 2)
    gpu = limits.gpu
    assert (bytes(gpu.uuid)[-1], gpu.memory_bytes) == (10, 2 * GIB)
    assert (gpu.share, gpu.kappa) == (2500, 1 << 16)
    assert (region.header.magic, region.header.size) == (layout.REGION_MAGIC, layout.REGION_SIZE)
    assert bytes(region.header.allocation) == bytes(limits.header.allocation) != bytes(16)
    assert region.header.mutex[layout.MUTEX_KIND_AT] == layout.MUTEX_KIND
    assert sum(region.header.mutex) == layout.MUTEX_KIND
    assert bytes(region)[layout.USE_AT :] == NO_REGION[layout.USE_AT :]


def test_tenants_may_write_the_region_and_read_the_limits_and_nobody_else_gets_there(
    groups: Groups,
) -> None:
    previous = os.umask(0o077)
    try:
        directory = groups.make("g", limit())
    finally:
        os.umask(previous)
    modes = {
        name: stat.S_IMODE((directory / name).stat().st_mode)
        for name in (".", "limits", "region", "agent")
    }
    assert modes == {
        ".": 0o700, "limits": 0o644, "region": 0o666, "agent": 0o755
    }  # fmt: skip


def test_make_again_keeps_what_processes_have_allocated_and_sets_the_limits(
    groups: Groups,
) -> None:
    directory = groups.make("g", limit(A, GIB))
    with (directory / "region").open("r+b") as region:
        region.seek(layout.SLOT_AT)
        region.write(b"kept")
    inodes = [(directory / name).stat().st_ino for name in ("limits", "region")]
    groups.make("g", limit(A, 2 * GIB))
    assert inodes == [(directory / name).stat().st_ino for name in ("limits", "region")]
    assert memory(groups) == 2 * GIB
    assert (directory / "region").read_bytes()[layout.SLOT_AT :][:4] == b"kept"


def test_other_gpus_get_new_files_unless_a_process_uses_the_old_ones(groups: Groups) -> None:
    groups.make("g", limit(A))
    process = groups.register("g", 3, host_pid=os.getpid(), start_time=7)
    with pytest.raises(GroupError, match=f"are damaged .* processes .{os.getpid()}. use them"):
        groups.make("g", limit(B))
    groups.mark_dead("g", {3: process.registration})
    groups.make("g", limit(B))
    assert groups.read("g").limit.uuid == B
    assert groups.read("g").processes == {}


def test_what_another_process_of_the_node_changes_is_read_at_once(groups: Groups) -> None:
    """`read` returns the same object until the files change."""
    other = Groups(groups.root, regions=PlainRegions())
    other.make("g", limit())
    assert groups.read("g") is groups.read("g")
    other.make("g", limit(memory=2 * GIB))
    assert memory(groups) == 2 * GIB
    assert groups.read("g").limit == limit(memory=2 * GIB)
    other.register("g", layout.SLOTS - 1, host_pid=7, start_time=1)
    second = other.register("g", 0, host_pid=8, start_time=2)
    pids = {slot: each.host_pid for slot, each in groups.read("g").processes.items()}
    assert pids == {0: 8, layout.SLOTS - 1: 7}
    other.mark_dead("g", {0: second.registration})
    assert not groups.read("g").processes[0].alive
    other.remove("g")
    with pytest.raises(GroupError):
        groups.read("g")
    other.make("g", limit(memory=3 * GIB))  # with the same sequence number as at first
    assert memory(groups) == 3 * GIB
    assert groups.read("g").processes == {}


def test_what_is_read_during_a_change_or_of_a_killed_one_is_not_kept(groups: Groups) -> None:
    path = groups.make("g", limit()) / "limits"
    with path.open("r+b", buffering=0) as file:
        os.pwrite(file.fileno(), struct.pack("<Q", 3), 16)
        os.pwrite(file.fileno(), struct.pack("<Q", GIB // 2), layout.GPU_AT + 16)
        assert memory(groups) == GIB // 2
        os.pwrite(file.fileno(), struct.pack("<Q", GIB // 4), layout.GPU_AT + 16)
        assert memory(groups) == GIB // 4
    groups.settle("g")
    assert memory(groups) == GIB // 4
    assert sequence(path) % 2 == 0


@pytest.mark.parametrize("content", [b"", b"x", NO_REGION, NO_REGION + b"x"], ids=len)
def test_a_region_that_the_tenant_destroyed_is_made_again_for_its_next_container(
    groups: Groups, content: bytes
) -> None:
    directory = groups.make("g", limit())
    (directory / "region").write_bytes(content)
    with pytest.raises(RegionInvalid):
        groups.region("g", groups.read("g"))
    groups.make("g", limit())
    groups.region("g", groups.read("g")).close()


def test_a_limits_file_that_is_cut_at_any_length_is_made_again(groups: Groups) -> None:
    directory = groups.make("g", limit())
    whole = (directory / "limits").read_bytes()
    for length in (0, 1, 15, 16, 39, 40, 104, len(whole) - 1):
        (directory / "limits").write_bytes(whole[:length])
        with pytest.raises(GroupError, match=r"has \d+ bytes, but this version"):
            groups.read("g")
        groups.make("g", limit())
        assert memory(groups) == GIB


@pytest.mark.parametrize(
    ("refused", "text"),
    [
        (limit("GPU-1"), "expected the UUID of a GPU"),
        (limit(A, memory=400 << 20), "too few for a CUDA context: set more than 419430400"),
        (limit(A, share=0.0), "share 0 must be above 0"),
        (limit(A, share=1.5), "share 1.5 must be above 0 and at most 1"),
    ],
)
def test_limits_that_make_no_sense_are_refused(groups: Groups, refused: Limit, text: str) -> None:
    with pytest.raises(GroupError, match=text):
        groups.make("g", refused)
    assert groups.names() == []


@pytest.mark.parametrize("name", ["", "..", ".lock", "a/b", "a" * 201, "a\n"])
def test_a_name_that_is_no_file_name_is_refused(groups: Groups, name: str) -> None:
    for act in (lambda: groups.make(name, limit()), lambda: groups.remove(name)):
        with pytest.raises(GroupError, match="name"):
            act()


def test_change_reaches_a_reader_that_has_mapped_the_file(groups: Groups) -> None:
    directory = groups.make("g", limit(A, GIB))
    with (directory / "limits").open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    groups.make("g", limit(A, 5 * GIB, 0.5))
    seen = layout.PfLimits.from_buffer_copy(mapped)
    assert (seen.gpu.memory_bytes, seen.gpu.share) == (5 * GIB, 5000)
    assert seen.header.sequence == 4


READER = """
import mmap, sys
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
# Aligned words of the mapping, each read at once: the sequence, the memory, the share and kappa.
words = memoryview(mapped).cast("Q")
seen = set()
print("ready", flush=True)
memory = 0
while memory != 1 << 40:
    before, memory, share = words[2], words[7], words[11] & 0xffffffff
    if before % 2 == 0 and before == words[2] and memory != 1 << 40:
        assert memory - (1 << 30) == share, (memory, share)
        seen.add(share)
        if len(seen) == 2:
            print("two values", flush=True)
            seen |= {-1}
"""


def test_a_reader_never_sees_a_half_of_a_change(groups: Groups) -> None:
    directory = groups.make("g", limit(A, GIB + 1, 0.0001))
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, directory / "limits"], stdout=subprocess.PIPE, text=True
    )
    assert reader.stdout is not None and reader.stdout.readline() == "ready\n"
    step = 0
    while step < 200 or not (select.select([reader.stdout], [], [], 0)[0] or reader.poll()):
        step += 1
        units = step % 10_000 + 1
        groups.make("g", limit(A, GIB + units, units / 10_000))
    groups.make("g", limit(A, 1 << 40))
    printed, _ = reader.communicate()
    assert reader.returncode == 0
    assert printed == "two values\n"


def test_a_kill_at_any_write_of_a_change_is_finished_by_the_next_one(groups: Groups) -> None:
    odd = 0
    for number in count():
        directory = groups.make("g", limit(A, GIB))
        killed = killed_at(number, lambda: groups.make("g", limit(A, 2 * GIB)))
        odd += sequence(directory / "limits") % 2
        if sequence(directory / "limits") % 2 == 0:
            assert memory(groups) in (GIB, 2 * GIB)
        groups.make("g", limit(A, 3 * GIB))
        assert sequence(directory / "limits") % 2 == 0
        assert memory(groups) == 3 * GIB
        groups.remove("g")
        if not killed:
            break
    assert odd == 2  # before each write between the two of the sequence


def test_a_kill_at_any_change_of_remove_leaves_what_the_next_call_removes(groups: Groups) -> None:
    for number in count():
        directory = groups.make("g", limit())
        killed = killed_at(number, lambda: groups.remove("g"))
        groups.remove("g")
        assert not directory.exists()
        if not killed:
            break
    groups.remove("g")


def test_registrations_of_a_slot_never_come_again(groups: Groups) -> None:
    groups.make("g", limit())
    first = groups.register("g", 9, host_pid=11, start_time=1)
    groups.mark_dead("g", {9: first.registration})
    second = groups.register("g", 9, host_pid=12, start_time=2)
    assert (first.registration, second.registration) == (1, 2)
    groups.mark_dead("g", {9: first.registration})  # comes late: the slot is another process' now
    assert groups.read("g").processes[9].alive


def test_two_processes_change_one_group_without_losing_a_change(groups: Groups) -> None:
    groups.make("g", limit())
    child = os.fork()
    if child == 0:
        own = Groups(groups.root, regions=PlainRegions())
        for slot in range(0, 200, 2):
            own.register("g", slot, host_pid=1, start_time=1)
        os._exit(0)
    for slot in range(1, 200, 2):
        groups.register("g", slot, host_pid=1, start_time=1)
    assert os.waitpid(child, 0)[1] == 0
    assert sorted(groups.read("g").processes) == list(range(200))
    with LimitsFile(groups.root / "g/limits") as opened:
        assert opened.header().sequence == 2 + 2 * 200
