"""The ledger: on disk before it is answered, and dropped only when the kubelet has had its time."""

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deviceplugin import checkpoint
from deviceplugin.checkpoint import Device
from deviceplugin.ledger import YOUNG, Ledger
from host.paths import Paths

RESOURCE = "rdma/hca"
BOOT = "9b6b5c1e-0d5a-4a3f-8f0e-6d5b1b1c9d11"
FIRST, SECOND = "0000:3b:00.0", "0000:5e:00.0"


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(state=tmp_path)


def ledger(paths: Paths, warn: Callable[[str], object] | None = None) -> Ledger:
    return Ledger(paths, BOOT, warn or pytest.fail)


def devices(*hcas: str) -> tuple[Device, ...]:
    return tuple(Device(id=hca, address=hca, netdevs=(), rdma=()) for hca in hcas)


def on_disk(paths: Paths) -> set[tuple[str, str]]:
    return {one.key for one in checkpoint.read(paths).allocations}


def aged(paths: Paths, seconds: float) -> None:
    """Make every entry of the file that old."""
    then = (datetime.now(UTC) - timedelta(seconds=seconds)).isoformat()
    found = checkpoint.read(paths)
    entries = [msgspec.structs.replace(one, time=then) for one in found.allocations]
    checkpoint.write(
        paths, found.resources, [msgspec.Raw(msgspec.json.encode(one)) for one in entries]
    )


def test_grant_is_on_disk_when_it_returns(paths: Paths) -> None:
    ledger(paths).grant(RESOURCE, {f"{FIRST}-0": devices(FIRST), f"{SECOND}-4": devices(SECOND)})
    found = {one.id: one for one in checkpoint.read(paths).allocations}
    assert set(found) == {f"{FIRST}-0", f"{SECOND}-4"}
    one = found[f"{FIRST}-0"]
    assert (one.resource, one.devices, one.boot_id) == (RESOURCE, devices(FIRST), BOOT)
    assert not one.adopted
    assert abs((datetime.now(UTC) - datetime.fromisoformat(one.time)).total_seconds()) < 60


def test_grant_waits_for_the_disk(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bool] = []
    monkeypatch.setattr("os.fsync", lambda _: synced.append(paths.checkpoint.exists()))
    ledger(paths).grant(RESOURCE, {f"{FIRST}-0": devices(FIRST)})
    assert synced[0] is False, "the content must be on disk before it gets its name"
    assert paths.checkpoint.exists()


def test_change_that_cannot_be_written_is_an_error_and_does_not_count(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = ledger(paths)
    one.grant(RESOURCE, {f"{FIRST}-0": devices(FIRST)})

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full)
        with pytest.raises(OSError, match="No space"):
            one.grant(RESOURCE, {f"{FIRST}-1": devices(FIRST)})
        with pytest.raises(OSError, match="No space"):
            one.drop_unknown((), age=-60.0)
    assert on_disk(paths) == {(RESOURCE, f"{FIRST}-0")}
    assert {kept.key for kept in one.allocations()} == on_disk(paths)


def test_next_ledger_knows_what_the_last_one_did(paths: Paths) -> None:
    first = ledger(paths)
    first.grant(RESOURCE, {f"{FIRST}-0": devices(FIRST)})
    first.grant("rdma/all", {"0": devices(FIRST, SECOND)})
    second = ledger(paths)
    assert second.allocations() == first.allocations()
    assert set(second.held(RESOURCE)) == {f"{FIRST}-0"}
    assert second.loads() == {FIRST: 2, SECOND: 1}


def test_id_that_is_granted_again_is_there_once_as_it_is_now(paths: Paths) -> None:
    one = ledger(paths)
    one.grant("rdma/all", {"0": devices(FIRST)})
    one.grant("rdma/all", {"0": devices(FIRST, SECOND)})
    (kept,) = checkpoint.read(paths).allocations
    assert kept.devices == devices(FIRST, SECOND)


def test_adopted_is_marked(paths: Paths) -> None:
    ledger(paths).grant(RESOURCE, {f"{FIRST}-0": devices(FIRST)}, adopted=True)
    (kept,) = checkpoint.read(paths).allocations
    assert kept.adopted


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
    key = RESOURCE, f"{FIRST}-0"
    ledger(paths).grant(RESOURCE, {key[1]: devices(FIRST)})
    aged(paths, age)
    dropped = ledger(paths).drop_unknown({key} if known else ())
    assert dropped == ([] if stays else [key])
    assert on_disk(paths) == ({key} if stays else set())


def test_entry_whose_time_cannot_be_read_is_old(paths: Paths) -> None:
    ledger(paths).grant(RESOURCE, {f"{FIRST}-0": devices(FIRST)})
    text = paths.checkpoint.read_text()
    (time,) = (one.time for one in checkpoint.read(paths).allocations)
    paths.checkpoint.write_text(text.replace(time, "yesterday"))
    assert ledger(paths).drop_unknown(()) == [(RESOURCE, f"{FIRST}-0")]


@pytest.mark.parametrize(
    "content", [b"", b'{"version": 1, "alloc', b'{"version": 9}', b"\x00" * 80]
)
def test_torn_file_is_told_set_aside_and_begun_anew(paths: Paths, content: bytes) -> None:
    paths.devices.mkdir(parents=True)
    paths.checkpoint.write_bytes(content)
    told: list[str] = []
    one = ledger(paths, told.append)
    assert one.allocations() == []
    (line,) = told
    assert str(paths.checkpoint) in line and "set aside" in line
    assert paths.checkpoint.with_suffix(".damaged").read_bytes() == content
    one.grant(RESOURCE, {f"{FIRST}-0": devices(FIRST)})
    assert on_disk(paths) == {(RESOURCE, f"{FIRST}-0")}


def test_what_a_killed_writer_left_is_in_nobodys_way(paths: Paths) -> None:
    ledger(paths).grant(RESOURCE, {f"{FIRST}-0": devices(FIRST)})
    (paths.devices / ".checkpoint.json.tmp").write_bytes(b'{"version": 1, "alloc')
    one = ledger(paths)
    one.grant(RESOURCE, {f"{FIRST}-1": devices(FIRST)})
    assert on_disk(paths) == {(RESOURCE, f"{FIRST}-0"), (RESOURCE, f"{FIRST}-1")}
    assert [path.name for path in paths.devices.iterdir()] == ["checkpoint.json"]


def test_grants_of_many_threads_are_all_kept(paths: Paths) -> None:
    one = ledger(paths)
    begin = threading.Barrier(8)
    missing: list[str] = []

    def grant(thread: int) -> None:
        begin.wait()
        for number in range(5):
            known = f"{FIRST}-{thread * 5 + number}"
            one.grant(RESOURCE, {known: devices(FIRST)})
            if (RESOURCE, known) not in on_disk(paths):
                missing.append(known)

    threads = [threading.Thread(target=grant, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert missing == []
    assert len(on_disk(paths)) == 40
    assert one.loads() == {FIRST: 40}


ids = st.sampled_from([f"{hca}-{slot}" for hca in (FIRST, SECOND) for slot in range(3)])
steps = st.tuples(st.sampled_from(["grant", "drop all but", "restart"]), st.sets(ids, min_size=1))


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(history=st.lists(steps, max_size=12))
def test_memory_and_disk_are_one_whatever_happens(
    paths: Paths, history: list[tuple[str, set[str]]]
) -> None:
    paths.checkpoint.unlink(missing_ok=True)
    one = ledger(paths)
    expected: set[tuple[str, str]] = set()
    for step, those in history:
        if step == "grant":
            one.grant(RESOURCE, {known: devices(known[:-2]) for known in those})
            expected |= {(RESOURCE, known) for known in those}
        elif step == "restart":
            one = ledger(paths)
        else:
            known = {(RESOURCE, known) for known in those}
            assert set(one.drop_unknown(known, age=-60.0)) == expected - known
            expected &= known
        assert {kept.key for kept in one.allocations()} == expected
        assert on_disk(paths) == expected
