"""One address beside whereabouts (docs/whereabouts.md): every order of our steps and of theirs.

Our node and one of whereabouts share an IPPool. Any step may be the last one before a crash, which
keeps what the API server and the node's store have. whereabouts reads the IPPool, and patches it
later if the address is still free there.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import pytest

from tests.model.explore import Explored, explore


@dataclass(frozen=True)
class Rules:
    """What the protocol demands. Each can be left out."""

    placeholders_before_active: bool = True
    row_is_marked_before_placeholders_go: bool = True
    foreign_leaves_by_a_placeholder: bool = True
    placeholder_goes_before_the_block: bool = True


@dataclass(frozen=True)
class World:
    """`block` and `entry` are on the API server, `row` and `ours` in the store of our node.

    `foreign` is what the block's object and the row say of the address; `seen` is that whereabouts
    has read the IPPool when the address was free.
    """

    block: str = ""  # Pending, Active
    entry: str = ""  # placeholder, theirs
    foreign: bool = False
    row: str = ""  # usable, returning
    ours: bool = False
    seen: bool = False
    theirs: bool = False


def steps(world: World, rules: Rules) -> Iterator[tuple[str, World]]:
    yield from _ours(world, rules)
    if not world.theirs and not world.entry:
        yield "whereabouts reads the pool", replace(world, seen=True)
    if world.seen:
        won = not world.entry
        yield (
            "whereabouts patches it, with its tests",
            replace(world, seen=False, theirs=won, entry="theirs" if won else world.entry),
        )
    if world.theirs:
        yield "whereabouts' DEL", replace(world, theirs=False, entry="")


def _ours(world: World, rules: Rules) -> Iterator[tuple[str, World]]:
    if not world.block and not world.row:
        yield "POST, Pending", replace(world, block="Pending", foreign=False)
    is_covered = bool(world.entry)
    if world.block == "Pending":
        if not world.entry:
            yield "placeholder", replace(world, entry="placeholder")
        if is_covered or not rules.placeholders_before_active:
            foreign = world.entry == "theirs"
            yield "PUT Active", replace(world, block="Active", foreign=foreign, row="usable")
    if world.row == "usable":
        if not world.ours and not world.foreign:
            yield "ADD", replace(world, ours=True)
        if not world.ours:
            yield "row: returning", replace(world, row="returning")
        if world.foreign and not world.entry:
            if rules.foreign_leaves_by_a_placeholder:
                yield "placeholder", replace(world, entry="placeholder")
            else:
                yield "not foreign any more", replace(world, foreign=False)
        if world.foreign and world.entry == "placeholder":
            yield "not foreign any more", replace(world, foreign=False)
    if world.ours:
        yield "DEL", replace(world, ours=False)
    may_remove = world.row == "returning" or (
        world.row == "usable" and not world.ours and not rules.row_is_marked_before_placeholders_go
    )
    if may_remove and world.entry == "placeholder":
        yield "placeholder removed", replace(world, entry="")
    is_bare = world.entry != "placeholder" or not rules.placeholder_goes_before_the_block
    if world.row == "returning" and world.block and is_bare:
        yield "DELETE", replace(world, block="", row="", foreign=False)


def is_apart(world: World) -> bool:
    """Whether no more than one side uses the address."""
    return not (world.ours and world.theirs)


def every_order(rules: Rules) -> Explored[World]:
    """All states, or those up to one where both use the address."""
    return explore(World(), partial(steps, rules=rules), {"apart": is_apart})


def test_no_address_is_used_on_both_sides() -> None:
    found = every_order(Rules())
    assert not found.broken, found.trace
    assert len(found.reached) > 20
    assert any(world.ours for world in found.reached)
    assert any(world.theirs and world.block == "Active" for world in found.reached)


def test_no_placeholder_is_left_without_a_block() -> None:
    worlds = every_order(Rules()).reached
    assert not [each for each in worlds if each.entry == "placeholder" and not each.block]


@pytest.mark.parametrize(
    "rule",
    [
        "placeholders_before_active",
        "row_is_marked_before_placeholders_go",
        "foreign_leaves_by_a_placeholder",
    ],
)
def test_without_the_rule_both_use_it(rule: str) -> None:
    assert every_order(replace(Rules(), **{rule: False})).broken


def test_without_the_last_rule_a_placeholder_is_left() -> None:
    worlds = every_order(Rules(placeholder_goes_before_the_block=False)).reached
    assert [each for each in worlds if each.entry == "placeholder" and not each.block]
