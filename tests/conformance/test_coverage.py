"""Every row of the tables has a test, or a reason here why it has none."""

import importlib
import pkgutil
import re

from tests import conformance
from tests.conformance.rows import COVERED

ROWS = {
    "A": "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30",
    "B": "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16",
    "C": "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18",
    "D": "1 2 3 4 5 6",
    "E": "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22",
    "F": "1 2 3 4 5 6 7 8 9 10",
    "G": "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16",
    "H": "1 2 3 4 5 6 7 8 9 10",
    "I": "1 2 3 4 5 6 7 8 9 10 11 12 13",
    "J": "1 2 3 4 5 6 7 8 9 10 11",
    "K": "1 2 3 4 5 6 7 8 9 10 11 12 13 14",
    "L": "1 2 3 4 5 6 7 8 9 10",
    "M": "1 2 3 4 5 6 7 8",
    "N": "1 2 3 4 5 6 7",
}

NOT_APPLICABLE = {
    "H2": "tuning is not ours",
    "M5": "covered by tests/host/ipam: 400 ADDs at once",
}


def test_every_row_is_a_test_or_has_a_reason() -> None:
    for module in pkgutil.iter_modules(conformance.__path__):
        importlib.import_module(f"{conformance.__name__}.{module.name}")
    covered = {part for row in COVERED for part in row.split("+")}
    rows = {f"{letter}{number}" for letter, ns in ROWS.items() for number in ns.split()}
    assert covered & set(NOT_APPLICABLE) == set()
    assert covered | set(NOT_APPLICABLE) == rows


def test_rows_are_named_as_in_the_tables() -> None:
    assert all(re.fullmatch(r"[A-N][0-9]+(\+[A-N][0-9]+)*", row) for row in COVERED)
