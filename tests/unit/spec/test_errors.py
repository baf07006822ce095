"""The codes, and the table of them that users read."""

import re
from pathlib import Path

import pytest

from cni.spec.errors import Code

TABLE = Path(__file__).resolve().parents[3] / "docs" / "errors.md"


def listed() -> dict[int, str]:
    """The rows of the table: a code in the first cell, its name in the second."""
    rows = re.findall(r"^\| *`?(\d+)`? *\|([^|\n]*)\|", TABLE.read_text(), re.MULTILINE)
    return {int(number): name.strip(" `") for number, name in rows}


@pytest.mark.parametrize("code", list(Code), ids=lambda code: str(code.name))
def test_code_is_listed_in_the_documentation(code: Code) -> None:
    assert listed().get(code.value) == code.name


def test_documentation_lists_no_code_that_does_not_exist() -> None:
    assert set(listed()) <= {code.value for code in Code}


def test_own_codes_begin_at_100() -> None:
    """SPEC.md: codes below 100 are the specification's; 8 is the reference's skel package's."""
    specified = {1, 2, 3, 4, 5, 6, 7, 8, 11, 50, 51}
    assert {code.value for code in Code if code < 100} == specified
