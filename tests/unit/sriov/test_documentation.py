"""The page of VFs lists every option, and every test that the rows of behaviour name exists."""

import re

from cni.sriov import options
from tests.runtime import CHECKOUT

OPTIONS = (CHECKOUT / "docs/use/vfs.md").read_text()
ROWS = (CHECKOUT / "tests/kernel/sriov-rows.md").read_text()


def test_every_option_is_documented() -> None:
    _, _, after = OPTIONS.partition("## Options")
    first_cells = re.findall(r"^\| (`.*?) \|", after, re.MULTILINE)
    documented = {key for cell in first_cells for key in re.findall(r"`(\w+)`", cell)}
    assert not options.KNOWN - documented


def test_every_row_of_the_specification_appears_once() -> None:
    _, _, after = ROWS.partition("## Behaviour, row by row")
    ids = re.findall(r"^\| ([A-Z]+[0-9]*)(?:–[0-9]+)? \|", after, re.MULTILINE)
    rows = [f"SC{n}" for n in range(1, 21)] + [f"SU{n}" for n in range(1, 12)]
    rows += ["SP1", "SP2", "SP3", "SK1", "SK2", "SL1", *(f"SM{n}" for n in range(1, 19))]
    rows += [f"R{n}" for n in range(1, 11)] + [f"B{n}" for n in range(1, 16)]
    rows += [*"ABCDEF", *(f"S{n}" for n in range(1, 15)), "R1", "R2", "N1", "N2"]
    assert ids == rows


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", ROWS)
    assert len(named) > 100
    for file, name in named:
        path = CHECKOUT / file
        assert not name or f"def {name}(" in path.read_text(), f"{file}::{name}"
