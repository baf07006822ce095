"""Lists between markers are those of the code (`make reference` writes them)."""

from pathlib import Path

import pytest

from tools import reference

PAGES = {path: text for path in reference.PAGES if "<!-- list" in (text := path.read_text())}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.stem))
def test_the_lists_of_a_page_are_those_of_the_code(page: Path) -> None:
    assert reference.filled(PAGES[page]) == PAGES[page], "run `make reference`"


def test_every_list_is_in_one_page() -> None:
    found = [each[2] for text in PAGES.values() for each in reference.LIST.finditer(text)]
    assert sorted(found) == sorted([*reference.ITEMS, *reference.LISTS])


def test_every_item_has_a_meaning() -> None:
    lists = [found[3] for text in PAGES.values() for found in reference.LIST.finditer(text)]
    items = [item for each in lists for item in reference.ITEM.finditer(each)]
    assert len(items) == sum(each.count("\n- ") for each in lists)
    assert [item[1] for item in items if not item[2].strip()] == []


def test_a_new_item_is_empty_and_the_meaning_of_a_known_item_is_kept() -> None:
    page = "<!-- list checkpoint -->\n- `version` (text): Kept,\n  also here.\n<!-- end -->\n"
    assert "- `version` (number): Kept, also here.\n" in reference.filled(page)
    assert "- `hcas.KEY.rdma[].uverbs.path` (string):\n" in reference.filled(page)
