"""Compute shares on a simulated GPU, where the gate estimates kernels right."""

import pytest

from tests.unit.gpu.simulator import Group, Process, Simulation, alike, parts_of_time, worst_error

pytestmark = pytest.mark.slow

LENGTHS = [1e-6, 20e-6, 1e-3, 50e-3, 1.0]  # seconds of a kernel


def test_without_shares_processes_get_the_gpu_in_turns_and_four_get_four_times_as_much() -> None:
    four, one = parts_of_time(alike(1, 1e-3, processes=4), alike(1, 1e-3))
    assert four == pytest.approx(0.8, abs=0.01)
    assert one == pytest.approx(0.2, abs=0.01)


@pytest.mark.parametrize("kernel", LENGTHS)
@pytest.mark.parametrize("processes", [2, 4, 16])
def test_processes_of_a_group_have_its_share_together_within_two_points(
    processes: int, kernel: float
) -> None:
    assert worst_error(alike(0.3, kernel, processes=processes), alike(0.3, kernel)) <= 2


@pytest.mark.parametrize("share", [0.3, 0.9])
def test_processes_whose_kernels_are_of_every_length_have_their_groups_share(share: float) -> None:
    every = Group([Process(kernel) for kernel in 3 * LENGTHS], share)
    assert worst_error(every, alike(1 - share, 1.0)) <= 2


@pytest.mark.parametrize("kernel", LENGTHS)
@pytest.mark.parametrize("groups", [2, 4, 16])
def test_equal_groups_with_right_estimates_are_within_two_points(
    groups: int, kernel: float
) -> None:
    assert worst_error(*(alike(1 / groups, kernel) for _ in range(groups))) <= 2


@pytest.mark.parametrize("kernel", LENGTHS)
def test_unequal_groups_with_right_estimates_are_within_two_points(kernel: float) -> None:
    assert worst_error(alike(0.1, kernel), alike(0.9, kernel)) <= 2
    assert worst_error(alike(0.3, kernel), alike(0.3, 1e-3)) <= 2


def test_a_group_that_asked_for_little_gets_no_more_than_its_share_afterwards() -> None:
    """It wants a tenth of the GPU for 20 s, and then all that it can get."""
    quiet = Group([Process(1e-3, wants=lambda now: now > 20 or now % 1 < 0.1)], 0.3)
    simulation = Simulation({"quiet": quiet, "other": alike(0.7, 1e-3)})
    simulation.run(20)
    assert simulation.run(3)["quiet"] == pytest.approx(0.3, abs=0.05)


def test_a_group_keeps_to_its_share_beside_an_idle_neighbour() -> None:
    simulation = Simulation(
        {
            "stays": alike(0.3, 100e-6),
            "pauses": Group([Process(100e-6, wants=lambda t: not 5 <= t < 10.1)], 0.7),
        }
    )
    simulation.run(6)
    assert simulation.run(4)["stays"] == pytest.approx(0.3, abs=0.02)
