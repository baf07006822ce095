"""The cost of one tenant's ranges for the store. Every other ADD of the node waits for its lock.

The tests count SQLite's instructions and rows that become objects, because seconds vary.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from cni.spec.errors import CNIError, Code
from ipam.addresses import Interval, parse, text
from ipam.ranges import Range, RangeSet
from ipam.store import tables
from ipam.store.reservations import Reservation
from ipam.store.sqlite_store import SqliteStore
from tests.unit.ipam.calls import BOOT, NEXT_BOOT, error_of, owner, range_of, reservation
from tests.unit.ipam.steps import steps

__all__ = ["steps"]

FIRST = parse("10.0.0.1")
HELD = 1000
MOST = 256
LINK = "eth0"

Steps = Callable[[Callable[[], object]], int]
Decoded = Callable[[], int]


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Decoded:
    """The number of rows that became reservations since the start of the test."""
    count = 0
    original = tables._reservation_of

    def counted(row: tuple[object, ...]) -> Reservation:
        nonlocal count
        count += 1
        return original(row)

    monkeypatch.setattr(tables, "_reservation_of", counted)
    return lambda: count


def evil(index: int = 0, end: str = "", domain: str = "evil") -> Range:
    """A range of a private domain over the other tenants' addresses, each with another start."""
    return range_of("10.0.0.0/16", start=text(FIRST + index), end=end, domain=domain)


def sets(count: int, end: str = "") -> list[RangeSet]:
    """`count` ranges in sets of 4, as many as a definition may have."""
    ranges = [evil(index, end) for index in range(count)]
    return [RangeSet(tuple(ranges[at : at + 4])) for at in range(0, count, 4)]


def victims(network: str = "theirs", boot: str = BOOT, step: int = 1) -> list[Reservation]:
    return [
        reservation(text(FIRST + step * n), f"c{n}", segment=LINK, network=network, boot=boot)
        for n in range(HELD)
    ]


def loaded(path: Path, *held: list[Reservation]) -> SqliteStore:
    store = SqliteStore(path, BOOT)
    store.load([reservation for reservations in held for reservation in reservations])
    return store


def test_ranges_that_differ_in_their_start_read_the_link_once(
    tmp_path: Path, steps: Steps, decoded: Decoded
) -> None:
    store = loaded(tmp_path, victims())
    small = steps(lambda: store.reserve(owner("a"), sets(4), segment=LINK))
    assert decoded() < 20
    large = steps(lambda: store.reserve(owner("b"), sets(MOST), segment=LINK))
    assert decoded() < 20 + MOST
    # Each set also reserves an address.
    empty = SqliteStore(tmp_path / "empty", BOOT)
    writes = steps(lambda: empty.reserve(owner("b"), sets(MOST), segment=LINK))
    assert large < small + 2 * writes + 50 * MOST


def test_full_ranges_are_searched_once_however_many_a_set_has(
    tmp_path: Path, steps: Steps, decoded: Decoded
) -> None:
    """Other domains and this one have alternate addresses, which makes the most runs."""
    mine = [
        reservation(text(FIRST + 2 * n + 1), f"m{n}", domain="evil", segment=LINK, network="m")
        for n in range(HELD)
    ]
    beside = [
        reservation(address.address, f"b{n}", domain="third", segment=LINK)
        for n, address in enumerate(mine)
    ]
    store = loaded(tmp_path, victims(step=2), mine, beside)
    end = text(FIRST + 2 * HELD - 1)

    def search(count: int) -> CNIError:
        ranges = [evil(index, end) for index in range(count)]
        return error_of(lambda: store.reserve(owner("a"), [RangeSet(tuple(ranges))], segment=LINK))

    small = steps(lambda: search(1))
    before = decoded()
    large = steps(lambda: search(MOST))
    assert search(1).code == Code.NO_FREE_ADDRESS
    assert large < 5 * small + 500 * MOST  # the error counts 4 of the sets
    assert decoded() <= 3 * before + MOST


@pytest.mark.parametrize("name", ["theirs", "mine"])
def test_search_for_other_networks_reads_the_link_once(
    tmp_path: Path, steps: Steps, decoded: Decoded, name: str
) -> None:
    """A tenant chooses the name of its network; with the victim's name no address is refused."""
    store = loaded(tmp_path, victims())

    def reserve(count: int) -> int:
        alone = [evil(index) for index in range(count)]
        new = owner(f"a{count}", network=name)
        try:
            store.reserve(new, sets(4), segment=LINK, alone=alone)
        except CNIError as error:
            assert error.code == Code.NOT_ALLOWED
        return 0

    small, large = steps(lambda: reserve(1)), steps(lambda: reserve(MOST))
    assert large < 1.5 * small
    assert decoded() < 40


@pytest.mark.parametrize("verb", ["ADD", "STATUS"])
def test_the_error_of_full_ranges_counts_a_few_of_them(
    tmp_path: Path, steps: Steps, verb: str
) -> None:
    """Every second address is reserved, so each is a separate run."""
    store = loaded(tmp_path, victims(step=2))
    plain = range_of("10.0.0.0/16")
    hole = Interval(plain.first, plain.last - 1)
    store.load([reservation(text(plain.last), "last")])
    full = [
        Range(
            network=plain.network,
            first=plain.first,
            last=plain.last,
            excluded=(hole,),
            where=f"ipam.ranges[0][{index}]",
        )
        for index in range(MOST)
    ]

    def message(count: int) -> str:
        chosen = [RangeSet(tuple(full[:count]))]
        if verb == "STATUS":
            return store.exhausted(chosen) or ""
        return error_of(lambda: store.reserve(owner("a"), chosen)).message

    small, large = steps(lambda: message(4)), steps(lambda: message(MOST))
    assert large < small + 500 * MOST
    assert "more ranges" not in message(4)
    told = message(MOST)
    assert "and 252 more ranges" in told
    assert told.count("of which 1 are held") == 4


def test_an_address_that_two_domains_hold_is_not_given_out_while_either_holder_lives(
    tmp_path: Path,
) -> None:
    address = text(FIRST)
    alive = reservation(address, "c1", domain="a", segment=LINK)
    stale = reservation(address, "c2", domain="b", segment=LINK, boot=NEXT_BOOT)
    store = loaded(tmp_path, [alive, stale])
    full = [RangeSet((evil(end=address),))]
    error = error_of(lambda: store.reserve(owner("a"), full, segment=LINK))
    assert error.code == Code.NO_FREE_ADDRESS
