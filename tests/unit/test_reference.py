"""Tables between markers are those of the code (`make reference` writes them)."""

from pathlib import Path

import pytest

from tools import reference

PAGES = {path: text for path in reference.PAGES if "<!-- table" in (text := path.read_text())}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.stem))
def test_the_tables_of_a_page_are_those_of_the_code(page: Path) -> None:
    assert reference.filled(PAGES[page]) == PAGES[page], "run `make reference`"


def test_every_table_is_in_one_page() -> None:
    found = [table[2] for text in PAGES.values() for table in reference.TABLE.finditer(text)]
    assert sorted(found) == sorted([*reference.TABLES, *reference.LISTS])


def test_every_row_has_a_meaning() -> None:
    tables = [found[3] for text in PAGES.values() for found in reference.TABLE.finditer(text)]
    rows = [line for table in tables for line in table.splitlines() if line.startswith("|")]
    assert [row for row in rows if not row.split("|")[-2].strip()] == []


def test_a_new_row_is_empty_and_the_cells_of_a_known_row_are_kept() -> None:
    page = "<!-- table checkpoint -->\n| `version` | text | Kept. |\n<!-- end -->\n"
    assert "| `version` | number | Kept. |" in reference.filled(page)
    assert "| `hcas.KEY.rdma[].uverbs.path` | string |  |" in reference.filled(page)
