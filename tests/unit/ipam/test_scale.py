"""The cost of a call in a large pool, counted in steps of SQLite, not in seconds."""

from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from ipam.addresses import Interval, parse, text
from ipam.ranges import RangeSet, merged
from ipam.store import database
from ipam.store.database import DATABASE, WAL
from ipam.store.sqlite_store import SqliteStore
from ipam.store.store_files import StoreFiles
from tests.unit.ipam.calls import BOOT, error_of, owner, range_of, reservation
from tests.unit.ipam.steps import steps

__all__ = ["steps"]

HELD = 50_000
FIRST = parse("10.0.0.1")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A /8 with many reservations, every third of which is an island of its own."""
    directory = tmp_path_factory.mktemp("large")
    SqliteStore(directory, BOOT).load(
        [
            reservation(text(FIRST + n + (n // 3 if n > HELD // 2 else 0)), f"c{n}", pod=f"p{n}")
            for n in range(HELD)
        ]
    )
    return directory


@pytest.mark.slow
def test_every_verb_costs_the_same_in_a_large_pool(
    large: Path, tmp_path: Path, steps: Callable[[Callable[[], object]], int]
) -> None:
    sets = [RangeSet((range_of("10.0.0.0/8"),))]
    full, empty = SqliteStore(large, BOOT), SqliteStore(tmp_path, BOOT)
    empty.load([reservation("10.0.0.1", "x"), reservation("10.0.0.3", "y")])
    new = owner("new", pod="new")
    verbs: dict[str, Callable[[SqliteStore], object]] = {
        "add": lambda store: store.reserve(new, sets),
        "status": lambda store: store.exhausted(sets),
        "check": lambda store: store.held_by(new.attachment),
        "del": lambda store: store.release(new.attachment),
    }
    for name, verb in verbs.items():
        cost, least = steps(partial(verb, full)), steps(partial(verb, empty))
        assert cost < 1.3 * least, name


def test_exclusions_cost_one_lookup_each_however_large(
    tmp_path: Path, steps: Callable[[Callable[[], object]], int]
) -> None:
    store = SqliteStore(tmp_path, BOOT)
    store.load([reservation("10.0.0.1", "x")])
    plain = range_of("10.0.0.0/8")
    hole = merged([Interval(FIRST + 1, FIRST + 8_000_000)])
    excluded = type(plain)(network=plain.network, first=plain.first, last=plain.last, excluded=hole)
    cost = steps(lambda: store.reserve(owner("a"), [RangeSet((excluded,))]))
    least = steps(lambda: store.reserve(owner("b"), [RangeSet((plain,))]))
    assert cost < 1.3 * least


def test_a_full_pool_does_not_look_at_every_reservation_for_a_stale_one(
    large: Path, steps: Callable[[Callable[[], object]], int]
) -> None:
    part = range_of("10.0.0.0/8", start="10.0.0.1", end=text(FIRST + HELD // 2 - 10))
    store = SqliteStore(large, BOOT)
    full = [RangeSet((part,))]
    assert steps(lambda: error_of(lambda: store.reserve(owner("late"), full))) < 2_000


@pytest.mark.parametrize(("domain", "segment"), [("blue", "ib0"), (" 10.0.0.0/8", "")])
def test_what_other_domains_hold_costs_a_look_up_each_and_only_on_the_same_link(
    tmp_path: Path, steps: Callable[[Callable[[], object]], int], domain: str, segment: str
) -> None:
    """Every second address is held, so that each is a gap of its own."""
    costs = []
    for count in (500, 1000, 2000):
        store = SqliteStore(tmp_path / str(count), BOOT)
        held = [reservation(text(FIRST + 2 * n), f"c{n}", segment=segment) for n in range(count)]
        store.load(held)

        def cost(container_id: str, domain: str, segment: str, store: SqliteStore = store) -> int:
            sets = [RangeSet((range_of("10.0.0.0/8", domain=domain),))]
            return steps(lambda: store.reserve(owner(container_id), sets, segment=segment))

        costs.append(cost("a", domain, segment))
        assert cost("b", "red", "ib1") < 3_000
        assert cost("c", "red", "") < 3_000
    assert costs[1] < 2.2 * costs[0]
    assert costs[2] < 2.2 * costs[1]


def test_the_files_follow_the_size_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "_MOST_PAGES", 100)
    sets = [RangeSet((range_of("10.0.0.0/24"),))]
    sizes = []
    with closing(StoreFiles(tmp_path)) as files:
        store = SqliteStore(files, BOOT)
        for n in range(60):
            store.reserve(owner(f"c{n}"), sets)
            store.release(owner(f"c{n}").attachment)
            sizes.append((tmp_path / WAL).stat().st_size)
    assert max(sizes) < 600_000
    assert sizes[-1] == sizes[-2]
    assert (tmp_path / DATABASE).stat().st_size < 100_000
