"""Compute shares on a simulated GPU, where the driver tells late or roughly what was used."""

import itertools
import random
from collections import defaultdict
from collections.abc import Mapping

import msgspec
import pytest

from gpu.driver.nvml import Utilization
from gpu.watch import compute_shares
from gpu.watch.compute_shares import GroupShare, GroupUsage
from gpu.watch.sampled_time import ROUNDING, SampledTime, UsedTime
from tests.unit.gpu.simulator import Controller, Simulation, alike, each_corrected, worst_error

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kernel", [20e-6, 1e-3, 20e-3, 200e-3])
def test_utilization_that_is_told_a_tick_late_still_comes_right(kernel: float) -> None:
    for wrong in (1, 8, 1 / 8):
        groups = alike(0.3, kernel, wrong), alike(0.7, kernel, wrong)
        assert worst_error(*groups, late=1, settle=5) <= 5


def _sampled(period: int) -> Controller:
    """A controller whose driver reports hundredths of each `period` (ticks)."""
    used: dict[str, float] = defaultdict(float)
    ticks = itertools.count()

    def control(
        groups: Mapping[str, GroupShare], usages: Mapping[str, GroupUsage]
    ) -> dict[str, GroupShare]:
        told = next(ticks) % period == 0
        seen = {}
        for name, usage in usages.items():
            used[name] += usage.used.seconds if usage.used else 0.0
            length = period * compute_shares.TICK
            part = round(used[name] / length, 2) if told else 0.0
            time = UsedTime(part * length, ROUNDING * length if part else 0.0)
            seen[name] = msgspec.structs.replace(usage, used=time)
        if told:
            used.clear()
        return each_corrected(groups, seen)

    return control


@pytest.mark.parametrize("wrong", [1, 8, 1 / 8])
@pytest.mark.parametrize("period", [1, 2])
@pytest.mark.parametrize(
    ("kernel", "settle"), [(100e-6, 3), (5e-3, 3), (50e-3, 3), (200e-3, 3), (1, 6)]
)
def test_use_that_is_told_in_hundredths_of_a_period_comes_right(
    kernel: float, settle: float, period: int, wrong: float
) -> None:
    for parts in ((0.3, 0.3), (0.1, 0.9)):
        groups = {name: alike(part, kernel, wrong) for name, part in zip("ab", parts, strict=True)}
        simulation = Simulation(groups, controller=_sampled(period))
        simulation.run(settle)
        expected = {name: group.share for name, group in groups.items()}
        assert simulation.run(10) == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize("wrong", [1, 8, 1 / 8])
def test_small_shares_come_right_although_the_driver_tells_hundredths(wrong: float) -> None:
    groups = {"a": alike(0.02, 100e-6, wrong), "b": alike(0.05, 100e-6, wrong)}
    simulation = Simulation(groups, controller=_sampled(1))
    simulation.run(3)
    assert simulation.run(10) == pytest.approx({"a": 0.02, "b": 0.05}, abs=0.02)


WINDOW = 0.2  # seconds, of an H200
LATE = 0.07


def _found_in_windows(seed: int) -> Controller:
    """The controller, whose driver counts each window to one group, by chance."""
    chance, sampled = random.Random(seed), SampledTime()
    ticks, windows = itertools.count(1), itertools.count(1)
    window = next(windows)

    def control(
        groups: Mapping[str, GroupShare], usages: Mapping[str, GroupUsage]
    ) -> dict[str, GroupShare]:
        nonlocal window
        now = next(ticks) * compute_shares.TICK
        parts = [
            usage.used.seconds / compute_shares.TICK if usage.used else 0
            for usage in usages.values()
        ]
        pids = range(len(parts) + 1)  # 0: none
        found: list[tuple[int, float]] = []
        while window * WINDOW <= now - LATE:
            [pid] = chance.choices(pids, [max(0.0, 1 - sum(parts)), *parts])
            found.append((pid, 1000 + window * WINDOW))
            window = next(windows)
        ends = {pid: end for pid, end in found if pid > 0}
        answer = [
            Utilization(pid, round(end * 1e6), [of for of, _ in found].count(pid) / len(found))
            for pid, end in ends.items()
        ]
        used = sampled.add(answer, now)
        seen = {
            name: msgspec.structs.replace(
                usage, used=used.get(pid, UsedTime()) + UsedTime(variance=sampled.variance)
            )
            for pid, (name, usage) in enumerate(usages.items(), 1)
        }
        return each_corrected(groups, seen)

    return control


@pytest.mark.parametrize(("first", "second"), [(0.3, 0.7), (0.1, 0.9)])
def test_right_estimates_are_not_corrected_by_chance(first: float, second: float) -> None:
    errors = []
    for seed in range(5):
        groups = {"a": alike(first, 1e-3), "b": alike(second, 1e-3)}
        simulation = Simulation(groups, controller=_found_in_windows(seed))
        simulation.run(3)
        errors.append(abs(simulation.run(10)["a"] - first))
    assert sorted(errors)[3] <= 0.01
    assert max(errors) <= 0.08


def test_estimates_that_are_eight_times_too_small_come_right_in_the_end() -> None:
    groups = {"a": alike(0.3, 1e-3, 1 / 8), "b": alike(0.7, 1e-3)}
    simulation = Simulation(groups, controller=_found_in_windows(1))
    simulation.run(30)
    assert simulation.run(60) == pytest.approx({"a": 0.3, "b": 0.7}, abs=0.1)


def test_estimates_with_the_time_of_another_group_come_right_in_the_end() -> None:
    """The first group gets back more than the gate lets it catch up at once."""
    parts = []
    for seed in (1, 2):
        groups = {"a": alike(0.3, 20e-3, 1.75), "b": alike(0.7, 20e-3)}
        simulation = Simulation(groups, controller=_found_in_windows(seed))
        simulation.run(30)
        parts.append(simulation.run(120)["a"])
    assert parts == pytest.approx([0.3, 0.3], abs=0.04)
