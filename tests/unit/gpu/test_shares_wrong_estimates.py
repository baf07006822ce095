"""Compute shares on a simulated GPU, where the gate estimates kernels wrong: they come right."""

import pytest

from tests.unit.gpu.simulator import Simulation, alike, parts_of_time, worst_error

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kernel", [20e-6, 100e-6, 500e-6])
def test_estimates_wrong_in_opposite_directions_come_right(kernel: float) -> None:
    assert worst_error(alike(0.3, kernel, 8), alike(0.7, kernel, 1 / 8)) <= 2
    assert worst_error(alike(0.3, kernel, 1 / 8), alike(0.7, kernel, 8)) <= 5


@pytest.mark.parametrize("wrong", [8, 1 / 8])
@pytest.mark.parametrize("kernel", [1e-6, 20e-6, 100e-6, 1e-3, 5e-3, 20e-3, 50e-3, 200e-3, 0.5, 1])
@pytest.mark.parametrize(
    "groups", [(0.3, 0.7), (0.1, 0.9), (0.3, 0.3), (1 / 4,) * 4, (1 / 8,) * 8, (1 / 16,) * 16]
)
def test_estimates_that_are_wrong_by_eight_times_come_within_five_points(
    groups: tuple[float, ...], kernel: float, wrong: float
) -> None:
    assert worst_error(*(alike(share, kernel, wrong) for share in groups)) <= 5


@pytest.mark.parametrize("wrong", [8, 1 / 8])
@pytest.mark.parametrize("kernel", [1e-6, 5e-3, 200e-3])
def test_sixteen_processes_of_a_group_get_its_share(kernel: float, wrong: float) -> None:
    assert worst_error(alike(0.3, kernel, wrong, 16), alike(0.3, kernel, wrong)) <= 5
    assert worst_error(alike(0.3, kernel, wrong, 4), alike(0.7, 20e-6, wrong)) <= 5


@pytest.mark.parametrize("processes", [2, 16])
def test_long_kernels_that_seem_short_at_first_are_paid_for_later(processes: int) -> None:
    """They cost an eighth until the driver tells of them; one process has one of them at a time."""
    groups = {"several": alike(0.3, 1, 1 / 8, processes), "one": alike(0.3, 1, 1 / 8)}
    simulation = Simulation(groups)
    simulation.run(3)
    assert abs(simulation.run(10)["several"] - 0.3) > 0.05
    simulation.run(7)
    assert simulation.run(10) == pytest.approx({"several": 0.3, "one": 0.3}, abs=0.05)
    assert groups["several"].used == pytest.approx(0.3 * 30, abs=0.3)


def test_equal_shares_are_fair_although_the_kernels_are_not_equal() -> None:
    unlike = [(20e-6, 1), (1e-3, 4), (10e-3, 1), (100e-6, 1 / 4)]
    parts = parts_of_time(*(alike(1 / 4, kernel, wrong) for kernel, wrong in unlike))
    assert sum(parts) ** 2 / (4 * sum(x * x for x in parts)) >= 0.97  # Jain's index


def test_a_wrong_estimate_stays_corrected() -> None:
    groups = alike(0.3, 1e-3, 8), alike(0.7, 1e-3, 1 / 8)
    assert worst_error(*groups, settle=60, over=60) <= 1
