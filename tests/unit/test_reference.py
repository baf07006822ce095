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
    assert sorted(found) == sorted(["errors", *reference.ITEMS, *reference.LISTS])


def test_every_row_and_item_has_a_meaning() -> None:
    tables = [found[3] for text in PAGES.values() for found in reference.TABLE.finditer(text)]
    rows = [line for table in tables for line in table.splitlines() if line.startswith("|")]
    assert [row for row in rows if not row.split("|")[-2].strip()] == []
    items = [item for table in tables for item in reference.ITEM.finditer(table)]
    assert [item[1] for item in items if not item[2].strip()] == []


def test_a_new_item_is_empty_and_the_meaning_of_a_known_item_is_kept() -> None:
    page = "<!-- table checkpoint -->\n- `version` (text): Kept,\n  also here.\n<!-- end -->\n"
    assert "- `version` (number): Kept, also here.\n" in reference.filled(page)
    assert "- `hcas.KEY.rdma[].uverbs.path` (string):\n" in reference.filled(page)


def test_the_cells_of_a_known_code_are_kept() -> None:
    page = "<!-- table errors -->\n| 120 | OLD | when | remedy |\n<!-- end -->\n"
    assert "| 120 | DEVICE_MISMATCH | when | remedy |" in reference.filled(page)
    assert "| 121 | NOT_ALLOWED |  |  |" in reference.filled(page)
