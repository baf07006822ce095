"""One address beside whereabouts (docs/move/whereabouts.md): every order of both sides' steps.

The address is in two IPPools, whose ranges overlap. A node of whereabouts reads an IPPool, and
patches it later if the address is still free there. Our controller reads both, adds placeholders,
and then writes the pool's status. A node of ours uses that status to lease and hand out. Each of
them may die, or act on an earlier read. Reservations keep whereabouts from giving the address out
in both IPPools.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import pytest

from tests.model.explore import Explored, explore

Entries = tuple[str, str]
"""What each IPPool has: "", "placeholder" or "theirs"."""


@dataclass(frozen=True)
class Rules:
    """The rules of the protocol. Each can be left out."""

    placeholders_before_offer: bool = True
    every_ippool: bool = True
    a_patch_fails_where_an_entry_is: bool = True
    held_leaves_by_a_placeholder: bool = True


@dataclass(frozen=True)
class World:
    """`entries`, `offered` and `held` are on the API server. `looked` is the controller's last
    read, `told` the `held` that our node has read, and `row` the exclusion in its block, `None`
    without a block. `seen` marks each IPPool that whereabouts read when the address was free.
    `theirs`: a pod of whereabouts uses the address, even if its entry is gone."""

    entries: Entries = ("", "")
    offered: bool = False
    held: bool = False
    looked: Entries | None = None
    told: bool | None = None
    row: bool | None = None
    ours: bool = False
    seen: tuple[bool, bool] = (False, False)
    theirs: bool = False


def steps(world: World, rules: Rules) -> Iterator[tuple[str, World]]:
    yield from _of_whereabouts(world)
    yield from _of_the_controller(world, rules)
    yield from _of_the_node(world)


def _of_whereabouts(world: World) -> Iterator[tuple[str, World]]:
    for number in (0, 1):
        entry = world.entries[number]
        if not entry and not world.theirs:
            yield "whereabouts reads", replace(world, seen=_with(world.seen, number, True))
        if world.seen[number]:
            after = replace(world, seen=_with(world.seen, number, False))
            if not entry and not world.theirs:
                entries = _with(world.entries, number, "theirs")
                after = replace(after, entries=entries, theirs=True)
            yield "whereabouts patches, with its test", after
    if world.theirs:
        first, second = ("" if each == "theirs" else each for each in world.entries)
        yield "whereabouts' DEL", replace(world, entries=(first, second), theirs=False)


def _of_the_controller(world: World, rules: Rules) -> Iterator[tuple[str, World]]:
    yield "the controller reads", replace(world, looked=world.entries)
    looked = world.looked
    if looked is None:
        return
    yield "the controller dies", replace(world, looked=None)
    watched = (0, 1) if rules.every_ippool else (0,)
    is_held = any(looked[number] == "theirs" for number in watched)
    for number in watched:
        if looked[number] or is_held:
            continue
        if world.entries[number] and rules.a_patch_fails_where_an_entry_is:
            yield "a patch fails", replace(world, looked=None)
        else:
            yield (
                "placeholder",
                replace(
                    world,
                    entries=_with(world.entries, number, "placeholder"),
                    looked=_with(looked, number, "placeholder"),
                ),
            )
    is_placed = all(looked[number] == "placeholder" for number in watched)
    may_offer = is_placed or is_held or not rules.placeholders_before_offer
    if may_offer or (world.offered and not rules.held_leaves_by_a_placeholder):
        yield "status", replace(world, offered=True, held=is_held, looked=None)


def _of_the_node(world: World) -> Iterator[tuple[str, World]]:
    if world.offered:
        yield "our node reads", replace(world, told=world.held)
    if world.told is not None:
        yield "our node leases, or confirms", replace(world, row=world.told)
    if world.row is False and not world.ours:
        yield "ADD", replace(world, ours=True)
    if world.ours:
        yield "DEL", replace(world, ours=False)
    elif world.row is not None:
        yield "our node gives the block back", replace(world, row=None)


def _with(pair: tuple, number: int, value: object) -> tuple:  # type: ignore[type-arg]
    return (value, pair[1]) if number == 0 else (pair[0], value)


def every_order(rules: Rules) -> Explored[World]:
    """All states, or those up to one in which both sides use the address."""
    apart = {"apart": lambda world: not (world.ours and world.theirs)}
    return explore(World(), partial(steps, rules=rules), apart)


def test_no_address_is_used_on_both_sides() -> None:
    found = every_order(Rules())
    assert not found.broken, found.trace
    assert len(found.reached) > 100
    assert any(world.ours for world in found.reached)
    assert any(world.theirs and world.row for world in found.reached)


@pytest.mark.parametrize("rule", Rules.__dataclass_fields__)
def test_without_a_rule_both_use_it(rule: str) -> None:
    assert every_order(replace(Rules(), **{rule: False})).broken
