"""The tables of docs/reference are those of the code (`make reference` writes them)."""

from pathlib import Path

import pytest

from tools import reference

PAGES = sorted(reference.PAGES.glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.stem))
def test_the_tables_of_a_page_are_those_of_the_code(page: Path) -> None:
    text = page.read_text()
    assert reference.filled(text) == text, "run `make reference`"


def test_every_table_is_in_one_page() -> None:
    found = [table[2] for page in PAGES for table in reference.TABLE.finditer(page.read_text())]
    assert sorted(found) == sorted([*reference.TABLES, *reference.KINDS])


def test_every_row_has_a_meaning() -> None:
    rows = [line for page in PAGES for line in page.read_text().splitlines() if line[:1] == "|"]
    assert [row for row in rows if not row.split("|")[-2].strip()] == []


def test_a_new_row_is_empty_and_the_cells_of_a_known_row_are_kept() -> None:
    page = "<!-- table gpuLimits -->\n| `onOveruse` | old | `report` | Kept. |\n<!-- end -->\n"
    assert "| `onOveruse` | `report`, `kill` | `report` | Kept. |" in reference.filled(page)
    assert "| `driverRoot` | string |  |  |" in reference.filled(page)
