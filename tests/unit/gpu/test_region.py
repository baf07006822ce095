"""A tenant writes anything into its region: the agent reads valid numbers, or raises an error."""

import os
import struct
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu.limits import layout, region
from gpu.limits.region import MOST_BYTES, MOST_COUNT, MOST_NS, Region, RegionInvalid

ALLOCATION = bytes(range(16))
MUTEX_AT = 64  # of the header


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "region"
    path.write_bytes(region.content_of(ALLOCATION))
    return path


def opened(path: Path) -> Region:
    return Region(path, ALLOCATION)


def write(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def test_numbers_of_a_slot_are_read(path: Path) -> None:
    slot = layout.PfSlot()
    slot.state, slot.registration = layout.SLOT_USED, 8
    slot.data_bytes, slot.context_bytes = 100, 200
    write(path, layout.SLOT_AT + 255 * 64, bytes(slot))
    with opened(path) as reading:
        assert reading.slots([0, 255]) == {255: region.SlotUse(registration=8, data_bytes=100)}


def test_numbers_that_cannot_be_are_clamped(path: Path) -> None:
    write(path, layout.USE_AT, b"\xff" * (layout.REGION_SIZE - layout.USE_AT))
    with opened(path) as reading:
        use, now = reading.use(), time.monotonic_ns()
        assert (use.used_bytes, use.peak_bytes) == (MOST_BYTES, MOST_BYTES)
        assert (use.denied, use.launches, use.throttled) == (MOST_COUNT,) * 3
        assert (use.tat, use.longest_ns, use.wait_ns) == (MOST_NS,) * 3
        assert max(use.backlogged_at, use.longest_at, use.last_launch) <= now
        assert reading.slots(range(layout.SLOTS)) == {}  # no such state


@given(st.data())
def test_garbage_anywhere_gives_an_error_or_numbers_within_their_bounds(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "garbage"
    content = bytearray(region.content_of(ALLOCATION))
    for _ in range(data.draw(st.integers(1, 4))):
        offset = data.draw(st.sampled_from((0, 8, 16, 64, 128, 192, layout.SLOT_AT)))
        part = data.draw(st.binary(max_size=400))
        content[offset : offset + len(part)] = part
    sizes = (0, 191, 3000, layout.REGION_SIZE - 1, layout.REGION_SIZE + 1)
    path.write_bytes(bytes(content[: data.draw(st.sampled_from(sizes))]))
    try:
        with opened(path) as reading:
            use = reading.use()
            assert 0 <= use.used_bytes <= MOST_BYTES
            assert 0 <= use.last_launch <= time.monotonic_ns()
            for slot in reading.slots(range(layout.SLOTS)).values():
                assert 0 <= slot.data_bytes <= MOST_BYTES
    except RegionInvalid as error:
        assert str(path) in str(error)


@pytest.mark.parametrize(
    ("offset", "content"),
    [
        (0, b"x"),
        (8, struct.pack("<I", 2)),
        (12, struct.pack("<I", layout.REGION_SIZE + 1)),
        (16, b"\xff"),
        (MUTEX_AT + layout.MUTEX_KIND_AT, b"\0"),
    ],
    ids=["magic", "version", "size", "allocation", "mutex"],
)
def test_a_header_of_another_file_is_refused(path: Path, offset: int, content: bytes) -> None:
    write(path, offset, content)
    with pytest.raises(RegionInvalid, match=r"overwrote the header|different allocation ids"):
        opened(path)


def test_a_file_that_is_made_shorter_while_it_is_read_is_an_error(path: Path) -> None:
    with opened(path) as reading:
        os.truncate(path, layout.SLOT_AT + 10)
        with pytest.raises(RegionInvalid, match="truncated this file"):
            reading.slots([0])
        os.truncate(path, 0)
        with pytest.raises(RegionInvalid, match="truncated this file"):
            reading.use()


def test_a_link_in_place_of_the_file_is_not_followed(path: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(RegionInvalid, match="Too many levels of symbolic links"):
        opened(tmp_path / "link")
