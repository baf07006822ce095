"""Writes a test's row of the tables into its id: `test_environment[A6-podfabric-ipam]`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.conformance.expect import Expected
from tests.conformance.node import Config
from tests.conformance.subject import EVERY, Subject

COVERED: set[str] = set()
"""Every row that has a test, here or in the virtual machine."""


def row(*rows: str, by: Iterable[Subject] = EVERY) -> pytest.MarkDecorator:
    """The test covers these rows. It runs for each subject, as its parameter `subject`."""
    COVERED.update(rows)
    return pytest.mark.parametrize(
        "subject", [pytest.param(subject, id=f"{'+'.join(rows)}-{subject}") for subject in by]
    )


def variants(name: str, row_of: str, values: Iterable[Any]) -> pytest.MarkDecorator:
    """The test covers one row, with several values of its parameter `name`."""
    COVERED.add(row_of)
    return pytest.mark.parametrize(
        name, [pytest.param(value, id=f"{row_of}-{value}") for value in values]
    )


@dataclass(frozen=True)
class Case:
    """A row of a table: changes to E0 and S0, and the expected answer.

    `config` has changes to the subject's S0, `raw` is the complete standard input.
    """

    row: str
    expected: Expected
    environ: Mapping[str, str | None] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    raw: bytes | None = None
    by: Sequence[Subject] = EVERY
    note: str = ""

    def stdin(self, subject: Subject) -> Config:
        return subject.config(**self.config) if self.raw is None else self.raw


def table(cases: Iterable[Case]) -> pytest.MarkDecorator:
    """The test covers a whole table, with the parameters `case` and `subject`."""
    params = []
    for case in cases:
        COVERED.add(case.row)
        for subject in case.by:
            note = f"-{case.note}" if case.note else ""
            params.append(pytest.param(case, subject, id=f"{case.row}-{subject}{note}"))
    return pytest.mark.parametrize(("case", "subject"), params)
