"""Ceding: the order of writes holds in every state, and no other order does."""

import functools

import pytest

from tests.model.ceding import INVARIANTS, START, Order, steps
from tests.model.explore import explore

# A rule; without it: the first invariant that breaks, after how many steps.
MUTANTS = (
    ("uncede_then_look", "I6", 8),
    ("mark_then_delete", "I7", 3),
    ("read_cover_then_use", "I6", 4),
    ("reclaiming_then_list", "I6", 11),
)


def test_the_invariants_hold_while_addresses_are_ceded() -> None:
    explored = explore(START, functools.partial(steps, order=Order()), INVARIANTS)
    print(f"ceding: {len(explored.reached)} states")
    assert explored.trace == ()


@pytest.mark.parametrize(("rule", "invariant", "length"), MUTANTS)
def test_no_other_order_holds(rule: str, invariant: str, length: int) -> None:
    mutant = functools.partial(steps, order=Order()._replace(**{rule: False}))
    explored = explore(START, mutant, INVARIANTS)
    print(f"without {rule}: {explored.broken} after {', '.join(explored.trace)}")
    assert (explored.broken, len(explored.trace)) == (invariant, length)


@pytest.mark.parametrize("rule", Order._fields)
def test_two_pods_have_one_address_in_any_other_order(rule: str) -> None:
    mutant = functools.partial(steps, order=Order()._replace(**{rule: False}))
    explored = explore(START, mutant, {"I1": INVARIANTS["I1"]})
    print(f"without {rule}: two owners after {', '.join(explored.trace)}")
    assert explored.broken == "I1"
