"""Elastic shares: who gets what others leave, and when they have it back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu import shares
from gpu.shares import GroupShare
from tests.unit.gpu.simulator import Group, Process, Simulation


def _neighbours(*, elastic: bool = True) -> Simulation:
    """30 and 70; the second group is idle from second 5 to second 10.1."""
    return Simulation(
        {
            "stays": Group([Process(100e-6)], 0.3, elastic),
            "pauses": Group([Process(100e-6, wants=lambda t: not 5 <= t < 10.1)], 0.7, elastic),
        }
    )


def test_an_elastic_group_gets_what_its_neighbour_leaves_within_a_second() -> None:
    simulation = _neighbours()
    assert simulation.run(5)["stays"] == pytest.approx(0.3, abs=0.05)
    simulation.run(1)
    assert simulation.run(4)["stays"] >= 0.9


def test_a_neighbour_that_wakes_has_its_share_again_within_a_second() -> None:
    simulation = _neighbours()
    simulation.run(11.1)
    used = simulation.run(2)
    assert used["stays"] == pytest.approx(0.3, abs=0.05)
    assert used["pauses"] == pytest.approx(0.7, abs=0.05)


def test_a_neighbour_that_wakes_beside_long_kernels_has_its_share_within_a_second() -> None:
    """The elastic group was alone, and its estimates are too small: few are in the queue."""
    stays = Group([Process(5e-3, 1 / 8)], 0.3, elastic=True)
    wakes = Group([Process(5e-3, wants=lambda t: t > 6)], 0.7, elastic=True)
    simulation = Simulation({"stays": stays, "wakes": wakes})
    assert simulation.run(6)["stays"] >= 0.95
    simulation.run(1)
    assert simulation.run(10)["stays"] == pytest.approx(0.3, abs=0.05)


def test_a_fixed_group_keeps_to_its_share_beside_an_idle_neighbour() -> None:
    simulation = _neighbours(elastic=False)
    simulation.run(6)
    assert simulation.run(4)["stays"] == pytest.approx(0.3, abs=0.02)


def _shares(**groups: tuple[float, bool]) -> dict[str, GroupShare]:
    return {
        name: GroupShare(share=share, elastic=elastic) for name, (share, elastic) in groups.items()
    }


def test_the_rest_goes_to_active_elastic_groups_in_proportion() -> None:
    groups = _shares(a=(0.1, True), b=(0.2, True), c=(0.3, False), d=(0.4, True))
    in_force = shares.shares_in_force(groups, {"a", "b", "c"})
    assert in_force == pytest.approx(
        {"a": 0.1 + 0.4 / 3, "b": 0.2 + 0.8 / 3, "c": 0.3, "d": 0.4}, abs=1e-4
    )


def test_one_active_elastic_group_has_nearly_the_whole_gpu() -> None:
    both = _shares(a=(0.3, True), b=(0.7, True))
    assert shares.shares_in_force(both, {"a"}) == pytest.approx({"a": shares.ALONE, "b": 0.7})
    assert shares.shares_in_force(_shares(a=(1, True)), {"a"})["a"] == 1


@given(
    st.dictionaries(
        st.integers(0, 20),
        st.tuples(st.floats(shares.LEAST_SHARE, 1), st.booleans(), st.booleans()),
    )
)
def test_no_group_gets_less_than_its_share_and_the_rest_is_given_once(
    drawn: dict[int, tuple[float, bool, bool]],
) -> None:
    groups = {
        key: GroupShare(share=share, elastic=elastic) for key, (share, elastic, _) in drawn.items()
    }
    active = {key for key, (_, _, launches) in drawn.items() if launches}
    in_force = shares.shares_in_force(groups, active)
    precision = 1e-4
    for key, group in groups.items():
        assert group.share - precision <= in_force[key] <= 1
    allocated = sum(groups[key].share for key in active)
    assert sum(in_force[key] for key in active) <= max(1, allocated) + precision * len(groups)


def test_shares_in_force_are_those_that_limits_can_express() -> None:
    groups = _shares(a=(1 / 3, True), b=(1 / 7, False))
    assert shares.shares_in_force(groups, set()) == pytest.approx({"a": 0.3333, "b": 0.1429})
