"""A block changes hands: the invariants hold in every state, and each rule is needed."""

import functools

import pytest

from tests.model.explore import explore, without_way_to
from tests.model.hand_over import INVARIANTS, Rules, State, start, steps

# A rule. Without it: the first invariant that breaks, and the number of steps until then.
MUTANTS = (
    ("mark_then_drain", "I3", 1),
    ("put_names_version", "I3", 4),
    ("come_back_by_put", "I3", 4),
    ("take_what_is_let_go", "I3", 1),
    ("let_go_after_proof", "I3", 2),
)


@pytest.mark.parametrize("nodes", [2, 3])
def test_the_invariants_hold_while_a_block_changes_hands(nodes: int) -> None:
    explored = explore(start(nodes), functools.partial(steps, rules=Rules()), INVARIANTS)
    print(f"hand-over: {nodes} nodes, {len(explored.reached)} states")
    assert explored.trace == ()


def test_the_pod_gets_its_address_on_every_node_in_the_end() -> None:
    reached = explore(start(3), functools.partial(steps, rules=Rules()), INVARIANTS).reached
    for number in range(3):

        def has_it(state: State, number: int = number) -> bool:
            return state.nodes[number].pod

        assert not without_way_to(has_it, reached, functools.partial(steps, rules=Rules()))


@pytest.mark.parametrize(("rule", "invariant", "length"), MUTANTS)
def test_without_a_rule_it_does_not_hold(rule: str, invariant: str, length: int) -> None:
    mutant = functools.partial(steps, rules=Rules()._replace(**{rule: False}))
    explored = explore(start(2), mutant, INVARIANTS)
    print(f"without {rule}: {explored.broken} after {', '.join(explored.trace)}")
    assert (explored.broken, len(explored.trace)) == (invariant, length)


@pytest.mark.parametrize("rule", Rules._fields)
def test_without_a_rule_two_pods_have_the_address(rule: str) -> None:
    mutant = functools.partial(steps, rules=Rules()._replace(**{rule: False}))
    explored = explore(start(2), mutant, {"I1": INVARIANTS["I1"]})
    print(f"without {rule}: two owners after {', '.join(explored.trace)}")
    assert explored.broken == "I1"
