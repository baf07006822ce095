"""Shares: no order of steps gives two pods one address, and without any one rule some order does.

`pytest -s` shows the number of states, and a shortest way to each mutant's duplicate.
"""

from dataclasses import fields, replace

import pytest

from tests.model.explore import explore
from tests.model.shares import Rules, SharesModel, World, one_owner


def test_no_order_of_steps_gives_an_address_twice() -> None:
    explored = explore(World(), SharesModel().steps, {"one owner": one_owner})
    print(f"shares: {len(explored.reached)} states")
    assert explored.trace == ()
    assert any(world.a.pod for world in explored.reached)
    assert any(world.b.pod for world in explored.reached)


@pytest.mark.parametrize("rule", [field.name for field in fields(Rules)])
def test_without_the_rule_two_pods_have_the_address(rule: str) -> None:
    model = SharesModel(replace(Rules(), **{rule: False}))
    explored = explore(World(), model.steps, {"one owner": one_owner})
    print(f"\nwithout {rule}: {len(explored.trace)} steps")
    print("\n".join(explored.trace))
    assert explored.broken
