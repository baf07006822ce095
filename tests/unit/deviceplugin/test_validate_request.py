"""Questions for a preference: those that make no sense are told of, and answered."""

import pytest

from deviceplugin.allocate.preferred import preferred
from deviceplugin.allocate.validate_request import problem_of
from host.topology import Topology
from tests.unit.deviceplugin.made import hca, pool

TWO = pool([hca("0000:00:00.0"), hca("0000:01:00.0")])
A, B = (slot.id for slot in TWO.slots)


@pytest.mark.parametrize(
    ("available", "must", "size", "problem", "answer"),
    [
        ([A, B], [], 1, None, 1),
        ([A, B], [B], 2, None, 2),
        ([A, B], [A, B], 2, None, 2),
        ([A, "0000:09:00.0"], [], 2, None, 2),  # the pool had it a moment ago
        ([A, A, B], [], 2, None, 2),
        ([A, B], [], 0, "0 ids are asked for", 0),
        ([A, B], [], -1, "-1 ids are asked for", 0),
        ([A], [], 2, "2 ids are asked for, and only 1 are available", 1),
        ([A, A], [], 2, "2 ids are asked for, and only 1 are available", 1),
        ([], [], 3, "3 ids are asked for, and only 0 are available", 0),
        ([A], [B], 1, f"it must include {B}, which is not available", 1),
        ([A, B], [A, B], 1, "it must include 2 ids, and 1 are asked for", 1),
        (
            [A],
            [f"x{n}" for n in range(7)],
            9,
            "9 ids are asked for, and only 1 are available; it must include x0, x1, x2, x3 and 3 "
            "more, which is not available",
            1,
        ),
    ],
)
def test_what_makes_no_sense_is_told_and_answered(
    available: list[str], must: list[str], size: int, problem: str | None, answer: int
) -> None:
    assert problem_of(available, must, size) == problem
    chosen = preferred(TWO, available, must, size, {}, [], Topology(()))
    assert len(chosen) == len(set(chosen)) == answer
    assert set(chosen) <= set(available)
