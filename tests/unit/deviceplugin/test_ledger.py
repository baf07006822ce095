"""The ledger: written before it is answered, dropped only when the kubelet has had its time."""

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from base.paths import Paths
from base.types import DeviceId
from deviceplugin import checkpoint
from deviceplugin.checkpoint import (
    AllocatedHCA,
    AllocationKey,
    CheckpointDamaged,
    CheckpointUnreadable,
)
from deviceplugin.ledger import YOUNG, Ledger
from tests.waiting import PATIENCE

RESOURCE = "rdma/hca"
BOOT = "9b6b5c1e-0d5a-4a3f-8f0e-6d5b1b1c9d11"
FIRST, SECOND = "0000:3b:00.0", "0000:5e:00.0"


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(state=tmp_path)


def ledger(paths: Paths, warn: Callable[[str], object] | None = None) -> Ledger:
    return Ledger(paths, BOOT, warn or pytest.fail)


def with_two(paths: Paths) -> Ledger:
    """A ledger that has recorded two ids."""
    recorded = ledger(paths)
    for number in range(2):
        recorded.record(RESOURCE, {f"{FIRST}-{number}": devices(FIRST)})
    return recorded


def devices(*hcas: str) -> tuple[AllocatedHCA, ...]:
    return tuple(AllocatedHCA(id=hca, address=hca, netdevs=(), rdma=()) for hca in hcas)


def on_disk(paths: Paths) -> set[tuple[str, str]]:
    return {allocation.key for allocation in checkpoint.read(paths).allocations}


def aged(paths: Paths, seconds: float) -> None:
    """Make every entry of the file that old."""
    then = (datetime.now(UTC) - timedelta(seconds=seconds)).isoformat()
    found = checkpoint.read(paths)
    entries = [msgspec.structs.replace(allocation, time=then) for allocation in found.allocations]
    checkpoint.write(paths, [checkpoint.encode(entry) for entry in entries], found.offered)


def test_readers_do_not_wait_for_the_disk(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = with_two(paths)
    seen: list[int] = []

    def synced(_: int) -> None:
        reader = threading.Thread(target=lambda: seen.append(len(recording.allocations())))
        reader.start()
        reader.join(60)

    monkeypatch.setattr("os.fsync", synced)
    recording.record(RESOURCE, {f"{FIRST}-2": devices(FIRST)})
    assert seen == [2]
    assert len(recording.allocations()) == 3


def test_change_that_cannot_be_finished_is_an_error(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_two(paths)
    paths.checkpoint.rename(paths.checkpoint.with_name(f".{paths.checkpoint.name}.tmp"))

    def refused(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patched:
        patched.setattr("os.replace", refused)
        with pytest.raises(CheckpointUnreadable, match="last change of this file: Read-only"):
            ledger(paths)
    assert len(ledger(paths).keys()) == 2


def test_settling_writes_only_what_is_not_written(paths: Paths) -> None:
    recording = with_two(paths)
    before = paths.checkpoint.stat()
    recording.settle()
    assert paths.checkpoint.stat() == before


def test_nothing_is_written_for_a_node_that_never_gave_anything(paths: Paths) -> None:
    ledger(paths).settle()
    assert not paths.devices.exists()


def test_what_was_granted_since_the_look_is_not_adopted_over(paths: Paths) -> None:
    the_ledger = ledger(paths)
    the_ledger.adopt(RESOURCE, {"17": devices(FIRST)})
    seen = the_ledger.held(RESOURCE)
    the_ledger.record(RESOURCE, {"17": devices(FIRST)})
    the_ledger.adopt(RESOURCE, {"17": devices(SECOND)}, seen)
    (kept,) = checkpoint.read(paths).allocations
    assert (kept.devices, kept.adopted) == (devices(FIRST), False)


@pytest.mark.parametrize(
    ("age", "known", "stays"),
    [
        (0.0, False, True),  # the kubelet has not noted it yet
        (YOUNG - 60, False, True),
        (YOUNG + 60, False, False),
        (YOUNG + 60, True, True),
        (-3600.0, False, True),  # the clock was set back
    ],
)
def test_is_dropped_only_when_the_kubelet_does_not_know_it_and_it_is_old(
    paths: Paths, age: float, known: bool, stays: bool
) -> None:
    key = RESOURCE, DeviceId(f"{FIRST}-0")
    ledger(paths).record(RESOURCE, {key[1]: devices(FIRST)})
    aged(paths, age)
    dropped = ledger(paths).drop_unknown({key} if known else ())
    assert dropped == ([] if stays else [key])
    assert on_disk(paths) == ({key} if stays else set())


@pytest.mark.parametrize(
    ("told", "again"),
    [
        ("1970-01-01T00:00:00Z", False),
        ("2098-01-01T00:00:00Z", False),
        ("2098-01-01T00:00:00Z", True),
    ],
)
def test_clock_that_is_set_makes_nothing_older_or_younger(
    paths: Paths, monkeypatch: pytest.MonkeyPatch, told: str, again: bool
) -> None:
    """A machine may boot with any time; what is granted meanwhile has that."""
    the_ledger = ledger(paths)
    monkeypatch.setattr("deviceplugin.ledger.timestamp", lambda: told)
    the_ledger.record(RESOURCE, {f"{FIRST}-0": devices(FIRST)})
    if again:
        the_ledger = ledger(paths)
    now = time.monotonic()
    assert the_ledger.drop_unknown(()) == []
    with monkeypatch.context() as patched:
        patched.setattr("time.monotonic", lambda: now + YOUNG + 1)
        assert the_ledger.drop_unknown(()) == [(RESOURCE, f"{FIRST}-0")]


def test_entry_of_another_boot_is_old(paths: Paths) -> None:
    ledger(paths).record(RESOURCE, {f"{FIRST}-0": devices(FIRST)})
    booted = Ledger(paths, "another boot", pytest.fail)
    assert booted.drop_unknown(()) == [(RESOURCE, f"{FIRST}-0")]


def test_entry_whose_time_cannot_be_read_is_old(paths: Paths) -> None:
    ledger(paths).record(RESOURCE, {f"{FIRST}-0": devices(FIRST)})
    text = paths.checkpoint.read_text()
    (time,) = (allocation.time for allocation in checkpoint.read(paths).allocations)
    paths.checkpoint.write_text(text.replace(time, "yesterday"))
    assert ledger(paths).drop_unknown(()) == [(RESOURCE, f"{FIRST}-0")]


def test_reader_never_misses_what_was_recorded_before_it_began(paths: Paths) -> None:
    the_ledger = ledger(paths)
    granted: list[str] = []
    ended = threading.Event()
    faults: list[object] = []

    def look() -> None:
        while not ended.is_set():
            expected = set(granted)
            try:
                missing = expected - {known for _, known in on_disk(paths)}
            except CheckpointDamaged as damage:
                faults.append(damage)
                return
            if missing:
                faults.append(missing)

    readers = [threading.Thread(target=look) for _ in range(2)]
    for reader in readers:
        reader.start()
    for number in range(120):
        known = f"{FIRST}-{number}"
        the_ledger.record(RESOURCE, {known: devices(FIRST)})
        granted.append(known)
    ended.set()
    for reader in readers:
        reader.join(PATIENCE)
    assert faults == []


def test_allocations_of_many_threads_are_all_kept(paths: Paths) -> None:
    the_ledger = ledger(paths)
    begin = threading.Barrier(8)
    missing: list[str] = []

    def grant(thread: int) -> None:
        begin.wait()
        for number in range(5):
            known = f"{FIRST}-{thread * 5 + number}"
            the_ledger.record(RESOURCE, {known: devices(FIRST)})
            if (RESOURCE, known) not in on_disk(paths):
                missing.append(known)

    threads = [threading.Thread(target=grant, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert missing == []
    assert len(on_disk(paths)) == 40
    assert the_ledger.loads() == {FIRST: 40}


ids = st.sampled_from([f"{hca}-{slot}" for hca in (FIRST, SECOND) for slot in range(3)])
steps = st.tuples(st.sampled_from(["grant", "drop all but", "restart"]), st.sets(ids, min_size=1))


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(history=st.lists(steps, max_size=12))
def test_memory_and_disk_are_the_same_after_any_history(
    paths: Paths, history: list[tuple[str, set[str]]]
) -> None:
    paths.checkpoint.unlink(missing_ok=True)
    the_ledger = ledger(paths)
    expected: set[AllocationKey] = set()
    for step, those in history:
        if step == "grant":
            the_ledger.record(RESOURCE, {known: devices(known[:-2]) for known in those})
            expected |= {(RESOURCE, DeviceId(known)) for known in those}
        elif step == "restart":
            the_ledger = ledger(paths)
        else:
            known = {(RESOURCE, DeviceId(known)) for known in those}
            assert set(the_ledger.drop_unknown(known, age=-60.0)) == expected - known
            expected &= known
        assert {kept.key for kept in the_ledger.allocations()} == expected
        assert on_disk(paths) == expected
