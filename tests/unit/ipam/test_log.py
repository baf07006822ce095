"""The log as a file: what its end tells."""

from pathlib import Path

import pytest

from ipam.log import Header, Log, Record, read_all, records_of, write_new
from tests.unit.ipam.calls import reservation


@pytest.fixture
def path(memory_path: Path) -> Path:
    return memory_path / "log"


def written(path: Path, *records: Record, base: int = 0) -> Log:
    write_new(path, Header(store="s", base=base), ())
    log = Log(path)
    for record in records:
        log.append([record])
    return log


def test_a_log_gives_back_what_was_appended(path: Path) -> None:
    one, two = reservation("10.0.0.1", "c1"), reservation("fd00::1", "ü\n")
    log = written(path, Record(seq=1, put=(one, two)), Record(seq=2, drop=(("", "10.0.0.1"),)))
    tail = log.tail(0)
    assert (tail.last, tail.torn, tail.problem) == (2, False, "")
    assert [record.seq for record in tail.records] == [1, 2]
    assert tail.records[0].put == (one, two)
    assert log.tail(2).records == ()
    assert log.tail(1).records == (tail.records[1],)
    assert [type(line) for line in read_all(path)] == [Header, Record, Record]


@pytest.mark.parametrize("length", [1, 100, 4000, 5000, 20_000])
def test_lines_of_any_length_are_found_from_the_end(path: Path, length: int) -> None:
    log = written(path, *(Record(seq=n, put=(reservation("10.0.0.1", "x" * length),))
                          for n in range(1, 6)))  # fmt: skip
    assert [record.seq for record in log.tail(2).records] == [3, 4, 5]


@pytest.mark.parametrize("rest", [b"0", b"\0" * 4096, b'deadbeef {"seq":3'])
def test_an_unfinished_line_is_torn_and_cut(path: Path, rest: bytes) -> None:
    log = written(path, Record(seq=1))
    size = log.size
    with path.open("ab") as file:
        file.write(rest)
    tail = log.tail(1)
    assert (tail.last, tail.torn, tail.end) == (1, True, size)


def test_an_unfinished_transaction_is_torn_and_cut(path: Path) -> None:
    many = [reservation(f"10.0.{n // 250}.{n % 250}", "c") for n in range(1200)]
    first, second, third = records_of(1, many)
    assert [one.more for one in (first, second, third)] == [True, True, False]
    log = written(path, Record(seq=1))
    size = log.size
    log.append([first, second])
    tail = log.tail(1)
    assert (tail.last, tail.torn, tail.end, tail.records) == (1, True, size, ())
    log.append([third])
    assert log.tail(1).records == (first, second, third)


def test_a_whole_line_that_does_not_match_its_checksum_is_a_problem(path: Path) -> None:
    log = written(path, Record(seq=1), Record(seq=2))
    content = path.read_bytes()
    path.write_bytes(content[:-3] + b"x" + content[-2:])
    tail = Log(path).tail(1)
    assert tail.unread_end
    assert "cannot be read" in tail.problem
    assert log.tail(0).last == 1


def test_a_log_that_begins_behind_the_database_has_a_gap(path: Path) -> None:
    log = written(path, Record(seq=8), base=7)
    assert "has no record 6" in log.tail(5).problem
    assert log.tail(7).problem == ""


def test_the_first_line_may_be_unreadable(path: Path) -> None:
    written(path, Record(seq=1))
    path.write_bytes(b"x" + path.read_bytes()[1:])
    log = Log(path)
    assert log.header is None
    assert "first line" in log.tail(1).problem


@pytest.mark.parametrize(
    ("content", "unused"), [(b"", True), (b"nonsense", False), (b"\0" * 100, False)]
)
def test_only_a_log_without_records_is_unused(path: Path, content: bytes, unused: bool) -> None:
    path.write_bytes(content)
    assert Log(path).is_unused() is unused
    assert written(path).is_unused()
    assert not written(path, Record(seq=1)).is_unused()
    assert not written(path, base=3).is_unused()
