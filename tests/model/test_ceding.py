"""Ceding: the order of writes holds in every state; without any of its rules it does not."""

import functools

import pytest

from tests.model.ceding import INVARIANTS, Order, canonical_steps, start, steps
from tests.model.explore import explore

# A rule; without it: the first invariant that breaks, after how many steps; and until two owners.
MUTANTS = (
    ("recall_then_look", "I6", 8, 10),
    ("mark_then_delete", "I7", 3, 5),
    ("read_cover_then_use", "I6", 4, 6),
    ("read_cover_now", "I6", 4, 6),
    ("reclaiming_then_list", "I6", 11, 13),
    ("mark_then_cede", "I5", 2, 7),
    ("return_without_marks", "I6", 9, 11),
    ("put_before_unmarking", "I5", 6, 11),
    ("adopt_what_is_recalled", "I6", 9, 11),
    ("confirm_then_list", "I6", 9, 11),
    ("held_is_not_ceded", "I5", 7, 11),
)


@pytest.mark.parametrize("nodes", [2, 3])
def test_the_invariants_hold_while_addresses_are_ceded(nodes: int) -> None:
    right = functools.partial(canonical_steps, order=Order())
    explored = explore(start(nodes), right, INVARIANTS)
    print(f"ceding, {nodes} nodes: {len(explored.reached)} states")
    assert explored.trace == ()


def test_every_rule_has_its_mutant() -> None:
    assert {rule for rule, *_ in MUTANTS} == set(Order._fields)


@pytest.mark.parametrize(("rule", "invariant", "length", "_until_two"), MUTANTS)
def test_no_other_order_holds(rule: str, invariant: str, length: int, _until_two: int) -> None:
    mutant = functools.partial(steps, order=Order()._replace(**{rule: False}))
    explored = explore(start(2), mutant, INVARIANTS)
    print(f"without {rule}: {explored.broken} after {', '.join(explored.trace)}")
    assert (explored.broken, len(explored.trace)) == (invariant, length)


@pytest.mark.parametrize(("rule", "_invariant", "_length", "until_two"), MUTANTS)
def test_two_pods_have_one_address_in_any_other_order(
    rule: str, _invariant: str, _length: int, until_two: int
) -> None:
    mutant = functools.partial(steps, order=Order()._replace(**{rule: False}))
    explored = explore(start(2), mutant, {"I1": INVARIANTS["I1"]})
    print(f"without {rule}: two owners after {', '.join(explored.trace)}")
    assert (explored.broken, len(explored.trace)) == ("I1", until_two)
