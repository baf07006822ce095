"""Whole blocks: the protocol holds in every state, and fails without any one of its rules.

`pytest -s` shows the number of states, and a shortest way to each mutant's first broken invariant.
"""

import functools

import pytest

from tests.model.cluster import HELD, INVARIANTS, Cluster, new_cluster
from tests.model.explore import Explored, Step, explore, without_way_to
from tests.model.whole_blocks import Rules, WholeBlocks

# A rule. Without it: the first invariant that breaks, the number of steps, and of machines.
MUTANTS = (
    ("row_before_address", "I10", 2, 1),
    ("mark_before_delete", "I3", 3, 1),
    ("delete_names_uid", "I3", 6, 1),
    ("delete_names_version", "I3", 6, 1),
    ("only_put_ends_returning", "I3", 7, 1),
    ("unknown_block_is_written", "I3", 5, 1),
    ("time_before_request", "I3", 7, 1),
    ("new_boot_is_written", "I3", 9, 1),
    ("adopted_in_another_boot_only", "I7", 7, 1),
    ("clone_becomes_another_instance", "I7", 10, 2),
    ("watch_confirms_nothing", "I3", 8, 1),
    ("reclaiming_confirms_nothing", "I3", 9, 1),
    ("fence_then_wait", "I3", 9, 1),
    ("absent_node_is_waited_for", "I3", 6, 1),
    ("proof_after_fence", "I3", 10, 1),
    ("shown_boot_is_the_present_one", "I7", 8, 1),
    ("reclaim_names_version", "I3", 9, 1),
    ("deleted_nodes_have_stopped", "I7", 8, 1),
    ("tainted_nodes_are_off", "I3", 10, 1),
)
DUPLICATES = {"I1": INVARIANTS["I1"]}

# Events that no agent, controller or kubelet causes.
FAULTS = ("power loss", "store lost", "Node deleted", "taint", "never arrives", "is late", "lost")


@functools.cache
def two_machines() -> Explored[Cluster]:
    return explore(new_cluster(2), WholeBlocks().steps, INVARIANTS)


@functools.cache
def steps_of_two_machines() -> dict[Cluster, list[Step[Cluster]]]:
    return {state: list(WholeBlocks().steps(state)) for state in two_machines().reached}


def test_the_invariants_hold_on_two_machines() -> None:
    explored = two_machines()
    print(f"two machines: {len(explored.reached)} states")
    assert explored.trace == ()


def test_the_invariants_hold_on_three_machines() -> None:
    explored = explore(new_cluster(3), WholeBlocks().steps, INVARIANTS)
    print(f"three machines: {len(explored.reached)} states")
    assert explored.trace == ()


@pytest.mark.parametrize(("rule", "invariant", "steps", "machines"), MUTANTS)
def test_no_rule_can_be_left_out(rule: str, invariant: str, steps: int, machines: int) -> None:
    mutant = WholeBlocks(Rules()._replace(**{rule: False}))
    explored = explore(new_cluster(machines), mutant.steps, INVARIANTS)
    print(f"without {rule}: {explored.broken} after {', '.join(explored.trace)}")
    assert (explored.broken, len(explored.trace)) == (invariant, steps)


def test_every_rule_has_a_mutant() -> None:
    assert tuple(rule for rule, *_ in MUTANTS) == Rules._fields


@pytest.mark.parametrize("rule", ["mark_before_delete", "delete_names_uid", "fence_then_wait"])
def test_two_pods_then_have_one_address(rule: str) -> None:
    mutant = WholeBlocks(Rules()._replace(**{rule: False}))
    explored = explore(new_cluster(2), mutant.steps, DUPLICATES)
    print(f"without {rule}: {len(explored.trace)} steps, {', '.join(explored.trace)}")
    assert explored.broken == "I1"


def test_the_model_reaches_what_it_is_about() -> None:
    """The invariants must not hold merely because nothing happens."""
    reached = two_machines().reached
    steps = {name for each in steps_of_two_machines().values() for name, _ in each}
    assert {"POST arrives", "PUT arrives", "DELETE arrives", "reclaimed, answer lost"} <= steps
    one_uses_what_the_other_may_write = [
        state
        for state in reached
        if state.block is not None
        and state.machines[state.block.holder].pod == HELD
        and state.machines[1 - state.block.holder].late is not None
    ]
    assert one_uses_what_the_other_may_write != []


def test_an_address_is_handed_out_in_the_end() -> None:
    """L1: once nothing fails any more, a pod can get the address, unless its holder is away."""
    stuck = without_way_to(_is_held, two_machines().reached, _without_faults)
    print(f"{len(stuck)} of {len(two_machines().reached)} states wait for the holder or a proof")
    assert all(_holder_is_away(state) for state in stuck)


def test_every_block_is_free_in_the_end() -> None:
    """L2: the holder or a proof frees it; for the proof a machine may have to lose its power."""
    assert (
        without_way_to(_is_free, two_machines().reached, steps_of_two_machines().__getitem__) == []
    )


def _without_faults(state: Cluster) -> list[Step[Cluster]]:
    return [step for step in steps_of_two_machines()[state] if not step[0].endswith(FAULTS)]


def _is_held(state: Cluster) -> bool:
    return any(machine.pod == HELD for machine in state.machines)


def _is_free(state: Cluster) -> bool:
    return state.block is None


def _holder_is_away(state: Cluster) -> bool:
    """Whether it is silent without a proof, or its store was lost while its sandboxes may live."""
    assert state.block is not None
    holder = state.machines[state.block.holder]
    return not holder.on or not state.block.instance
