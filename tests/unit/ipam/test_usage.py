"""How full ranges are, as the agent's metrics tell it."""

from pathlib import Path
from unittest import mock

import msgspec

from ipam.addresses import parse, text
from ipam.ranges import RangeSet
from ipam.store import tables
from ipam.store.reservations import RangeUsage, Reservation
from ipam.store.sqlite_store import MOST, SeenRanges, SqliteStore
from tests.unit.ipam.calls import BOOT, Calls, range_of, request, reservation

POOL = {"range": "10.0.0.0/24", "gateway": "10.0.0.1"}


def used(*of: RangeUsage) -> dict[tuple[str, str], tuple[int, int]]:
    return {(row.domain, row.range): (row.used, row.free) for row in of}


def test_ranges_are_known_by_reservations_until_an_add_shows_their_bounds(node: Calls) -> None:
    node.store.load(
        [
            reservation("10.0.0.5", "a", range="10.0.0.0/24"),
            reservation("10.0.0.9", "b", range="10.0.0.0/24"),
            reservation("fd00::1", "c", range="fd00::/64", domain="blue"),
            reservation("10.9.0.4", "d", range="10.9.0.4/31"),
            reservation("10.8.0.4", "single", range="10.8.0.4/32"),
        ]
    )
    plugin = node.plugin
    others = {
        ("", "10.9.0.4/31"): (1, 1),
        ("blue", "fd00::/64"): (1, 2**64 - 3),
    }
    assert used(*plugin.usage()) == {("", "10.0.0.0/24"): (2, 252), **others}
    narrow = {**POOL, "range": "10.0.0.8-10.0.0.17/24", "exclude": ["10.0.0.10-10.0.0.11"]}
    plugin.reserve(request("ADD", narrow, "new"))
    assert used(*plugin.usage()) == {("", "10.0.0.8-10.0.0.17/24"): (2, 6), **others}


def test_a_range_is_known_though_it_has_no_address_left(node: Calls) -> None:
    plugin = node.plugin
    plugin.reserve(request("ADD", {"range": "10.0.0.0/30", "gateway": "10.0.0.1"}, "c1"))
    assert used(*plugin.usage()) == {("", "10.0.0.0/30"): (1, 0)}
    plugin.delete(request("DEL", None, "c1"))
    assert used(*plugin.usage()) == {("", "10.0.0.0/30"): (0, 1)}


def test_runs_are_counted_and_not_reservations(memory_path: Path) -> None:
    first = parse("10.0.0.1")
    store = SqliteStore(memory_path, BOOT)
    store.load([reservation(text(first + n), f"c{n}") for n in range(5000)])
    with mock.patch("ipam.store.tables._run_of", wraps=tables._run_of) as read:
        answer = store.usage((range_of("10.0.0.0/8"),))
    assert used(*answer) == {("", "10.0.0.0/8"): (5000, 2**24 - 2 - 5000)}
    assert read.call_count < 5


def test_what_was_not_seen_for_longest_is_forgotten() -> None:
    seen = SeenRanges(most=3)
    every = [range_of(f"10.{number}.0.0/16") for number in range(4)]
    for row in (*every[:3], every[0], every[3]):
        seen.see([RangeSet((row,))])
    assert set(seen.all()) == {every[0], every[2], every[3]}
    changed = msgspec.structs.replace(every[0], gateway=every[0].first)
    seen.see([RangeSet((changed,))])
    assert set(seen.all()) == {changed, every[2], every[3]}


def test_ranges_with_reservations_are_shown_before_those_that_were_only_named(
    memory_path: Path,
) -> None:
    store = SqliteStore(memory_path, BOOT)
    store.load(scattered(10))
    named = tuple(range_of(f"10.{n // 200 + 100}.{n % 200}.0/24") for n in range(MOST))
    answer = store.usage(named)
    assert len(answer) == MOST
    assert sum(row.used for row in answer) == 10


def test_there_are_never_more_ranges_than_metrics_should_have(memory_path: Path) -> None:
    store = SqliteStore(memory_path, BOOT)
    store.load(scattered(MOST + 50))
    assert len(store.usage(())) == MOST


def scattered(count: int) -> list[Reservation]:
    return [
        reservation(f"10.{n // 200}.{n % 200}.1", f"c{n}", range=f"10.{n // 200}.{n % 200}.0/24")
        for n in range(count)
    ]
