"""GPU time of processes, from samples like those of NVML."""

import pytest

from gpu.driver.nvml import Utilization
from gpu.watch.sampled_time import ROUNDING, SampledTime

START = 1_700_000_000.0  # seconds of the driver's clock
TICK = 0.5
LATE = 0.07  # seconds after a period, when the driver tells its samples


def _asked(
    busy: dict[int, list[tuple[float, float]]], window: float, *, ticks: int
) -> dict[int, float]:
    """The sampled times of processes that use the GPU in these periods (from, to), sampled each
    tick.
    """
    sampled = SampledTime()
    found = dict.fromkeys(busy, 0.0)
    for tick in range(ticks + 1):
        now = tick * TICK
        ends = [n * window for n in range(-3, int((now - LATE) // window) + 1)]
        ends = [end for end in ends if round((START + end) * 1e6) > sampled.since_us]
        samples = []
        for pid, times in busy.items():
            parts = {end: _part(times, end - window, end) for end in ends}
            if not parts:
                continue
            last = max((end for end, part in parts.items() if part > 0), default=ends[-1])
            mean = sum(parts.values()) / len(parts)
            samples.append(Utilization(pid, round((START + last) * 1e6), mean))
        for pid, used in sampled.add(samples, now).items():
            found[pid] += used.seconds
            assert used.rounding >= 0
    return found


def _part(times: list[tuple[float, float]], began: float, ended: float) -> float:
    inside = (max(0.0, min(ended, end) - max(began, start)) for start, end in times)
    return sum(inside) / (ended - began)


@pytest.mark.parametrize("period", [1 / 6, 0.25, 0.5, 1.0])
def test_time_is_used_once_however_long_the_drivers_periods_are(period: float) -> None:
    always, half = [(-9.0, 99.0)], [(n * 0.02, n * 0.02 + 0.01) for n in range(-150, 1100)]
    found = _asked({1: always, 2: half}, period, ticks=40)
    assert found[1] == pytest.approx(20, abs=2 * period + TICK)
    assert found[2] == pytest.approx(10, abs=period + TICK)


@pytest.mark.parametrize("period", [1 / 6, 0.25, 0.5, 1.0])
def test_a_gpu_that_was_idle_is_not_used_from_the_last_sample_on(period: float) -> None:
    bursts = [(n * 5.0 + 0.05, n * 5.0 + 2.05) for n in range(-2, 8)]
    found = _asked({1: bursts}, period, ticks=60)
    assert found[1] == pytest.approx(12, abs=2.5)


@pytest.mark.parametrize("period", [1 / 6, 0.25, 0.5])
def test_short_bursts_beside_a_busy_process_count_as_long_as_they_are(period: float) -> None:
    bursts = [(n + 0.05, n + 0.15) for n in range(-9, 99)]
    found = _asked({1: bursts, 2: [(-9.0, 99.0)]}, period, ticks=120)
    assert found[1] == pytest.approx(6, abs=0.5)


def test_processes_that_were_found_in_different_windows_used_parts_of_the_same_period() -> None:
    """As an H200 tells it: of three windows of 200 ms, one process had the first two."""
    sampled = SampledTime()
    sampled.add([Utilization(1, 10**15, 1.0)], 0.0)
    used = sampled.add(
        [Utilization(1, 10**15 + 400_000, 0.66), Utilization(2, 10**15 + 600_000, 0.33)], 0.5
    )
    assert used[1].seconds == pytest.approx(0.396)
    assert used[2].seconds == pytest.approx(0.198)
    assert sampled.variance == pytest.approx(0.6 * 0.6 / 4)


def test_only_the_first_answer_without_processes_may_have_missed_some() -> None:
    sampled = SampledTime()
    sampled.add([Utilization(1, 10**15, 1.0)], 0.0)
    assert not sampled.add([], 0.5)
    assert sampled.variance > 0
    assert not sampled.add([], 1.0)
    assert sampled.variance == 0


def test_what_was_used_before_the_first_question_is_not_known() -> None:
    sampled = SampledTime()
    assert not sampled.add([Utilization(1, 10**15, 1.0)], 0.0)
    used = sampled.add([Utilization(1, 10**15 + 500_000, 0.4)], 0.5)[1]
    assert used.seconds == pytest.approx(0.2)
    assert used.rounding == pytest.approx(0.5 * ROUNDING)


def test_a_clock_of_the_day_that_is_set_forward_makes_little_use() -> None:
    sampled = SampledTime()
    sampled.add([Utilization(1, 10**15, 1.0)], 0.0)
    sampled.add([Utilization(1, 10**15 + 500_000, 1.0)], 0.5)
    assert sampled.add([Utilization(1, 10**15 + 60_000_000, 1.0)], 1.0)[1].seconds <= 1.5
