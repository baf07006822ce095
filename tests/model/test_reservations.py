"""The reservation of one address (docs/whereabouts.md), between two sandboxes of a pod and theirs.

The first sandbox of a pod has ended, and its reservation is being removed: the agent reads it,
looks into its store, and sends a DELETE, which may arrive late. The pod's next sandbox, whose
reservation looks the same, gets the address meanwhile; a node of whereabouts wants it, too. Any
step may be the last one of its process.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import pytest

from tests.model.explore import Explored, explore


@dataclass(frozen=True)
class Rules:
    """What the protocol demands. Each can be left out."""

    store_is_looked_at_after_the_read: bool = True
    a_former_reservation_is_made_again: bool = True
    address_is_taken_before_the_reservation: bool = True


@dataclass(frozen=True)
class World:
    """`owner` and `uid` are of the reservation on the API server: "pod" (of either sandbox) or
    "theirs". `store` says whether the next sandbox holds the address; it uses it once `announced`.

    `read` is the uid that the removal has read, `late` that of a DELETE on its way; -1 is none.
    """

    owner: str = "pod"
    uid: int = 0
    store: bool = False
    found: int = -1  # what the next sandbox's ADD has read
    announced: bool = False
    looked: bool = False  # the removal has looked into the store, and the address was free
    read: int = -1
    late: int = -1
    removed: bool = False
    theirs: bool = False


def steps(world: World, rules: Rules) -> Iterator[tuple[str, World]]:
    yield from _removal(world, rules)
    yield from _next_sandbox(world, rules)
    if not world.owner and not world.theirs:
        theirs = replace(world, owner="theirs", uid=world.uid + 1, theirs=True)
        yield "whereabouts' POST", theirs


def _removal(world: World, rules: Rules) -> Iterator[tuple[str, World]]:
    if world.removed:
        if world.late == world.uid and world.owner:
            yield "DELETE arrives", replace(world, owner="", late=-1)
        return
    if not rules.store_is_looked_at_after_the_read and world.read < 0 and not world.store:
        yield "removal: the address is free", replace(world, looked=True)
    if world.read < 0 and world.owner == "pod":
        yield "removal: GET", replace(world, read=world.uid)
    elif world.read < 0:
        yield "removal: it is not the pod's", replace(world, removed=True)
    elif rules.store_is_looked_at_after_the_read and world.store:
        yield "removal: the address is held", replace(world, removed=True)
    elif rules.store_is_looked_at_after_the_read or world.looked:
        yield "removal: DELETE", replace(world, late=world.read, removed=True)


def _next_sandbox(world: World, rules: Rules) -> Iterator[tuple[str, World]]:
    if world.announced:
        if not world.store:
            yield "ADD: the store", replace(world, store=True)
        return
    if not world.store and rules.address_is_taken_before_the_reservation:
        yield "ADD: the store", replace(world, store=True)
        return
    if not world.owner:
        made = replace(world, owner="pod", uid=world.uid + 1, announced=True)
        yield "ADD: POST", made
    elif world.owner == "pod" and not rules.a_former_reservation_is_made_again:
        yield "ADD: it is the pod's", replace(world, announced=True)
    elif world.owner == "pod" and world.found < 0:
        yield "ADD: GET", replace(world, found=world.uid)
    elif world.owner == "pod" and world.found == world.uid:
        yield "ADD: DELETE", replace(world, owner="", found=-1)
    elif world.owner == "pod":
        yield "ADD: another one is there", replace(world, found=-1)
    else:
        yield "ADD: it is theirs", replace(world, store=False)


def is_protected(world: World) -> bool:
    """Whether our pod has a reservation if it uses the address: else whereabouts may give it
    away."""
    return not (world.announced and world.store) or world.owner == "pod"


def every_order(rules: Rules) -> Explored[World]:
    """All states, or those up to one where our pod lacks its reservation."""
    return explore(World(), partial(steps, rules=rules), {"protected": is_protected})


def test_a_pod_that_uses_the_address_has_its_reservation() -> None:
    found = every_order(Rules())
    assert not found.broken, found.trace
    assert len(found.reached) > 30


@pytest.mark.parametrize(
    "rule",
    [
        "store_is_looked_at_after_the_read",
        "a_former_reservation_is_made_again",
        "address_is_taken_before_the_reservation",
    ],
)
def test_without_the_rule_it_loses_it(rule: str) -> None:
    assert every_order(replace(Rules(), **{rule: False})).broken
