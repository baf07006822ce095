"""Compute shares: the agent's controller, on a simulated GPU.

Errors are in points: the difference between the time that a group had of the GPU and its share,
times 100. Unless a test says otherwise, a simulation settles for 3 s and is measured over 10 s.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu import shares, time_account
from gpu.region import RegionUse
from gpu.sampled_time import ROUNDING, UsedTime
from gpu.shares import GroupShare, GroupUsage, observe
from gpu.time_account import LaunchTimes, Settlement
from tests.unit.gpu import simulator
from tests.unit.gpu.simulator import Controller, Group, Process, Simulation

S = 10**9  # nanoseconds
LENGTHS = [1e-6, 20e-6, 1e-3, 50e-3, 1.0]  # seconds of a kernel


def _group(share: float, kernel: float, wrong: float = 1.0, processes: int = 1) -> Group:
    return Group([Process(kernel, wrong) for _ in range(processes)], share)


def _used(*groups: Group, settle: float = 3, over: float = 10, late: int = 0) -> list[float]:
    """The fraction of the GPU's time that each group had."""
    simulation = Simulation({str(index): group for index, group in enumerate(groups)}, late=late)
    simulation.run(settle)
    return list(simulation.run(over).values())


def _worst(*groups: Group, settle: float = 3, over: float = 10, late: int = 0) -> float:
    """The largest error, in points."""
    used = _used(*groups, settle=settle, over=over, late=late)
    return max(
        abs(fraction - group.share) * 100 for fraction, group in zip(used, groups, strict=True)
    )


# ---- the simulated GPU itself


def test_without_shares_processes_get_the_gpu_in_turns_and_four_get_four_times_as_much() -> None:
    four, one = _used(_group(1, 1e-3, processes=4), _group(1, 1e-3))
    assert four == pytest.approx(0.8, abs=0.01)
    assert one == pytest.approx(0.2, abs=0.01)


# ---- the figures that gpu.md lists


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((0.3, 1e-3), (0.7, 1e-3)),
        ((0.3, 20e-6), (0.7, 50e-3)),
        ((0.7, 20e-6), (0.3, 50e-3)),
        ((0.1, 100e-3), (0.9, 100e-3)),
        ((0.3, 500e-3), (0.7, 500e-3)),
    ],
)
def test_right_estimates_give_each_group_its_share(
    first: tuple[float, float], second: tuple[float, float]
) -> None:
    assert _worst(_group(*first), _group(*second)) <= 1


@pytest.mark.parametrize(("four", "one"), [(1e-3, 1e-3), (50e-3, 20e-6)])
def test_four_processes_of_a_group_get_no_more_than_the_one_of_another(
    four: float, one: float
) -> None:
    assert _worst(_group(0.5, four, processes=4), _group(0.5, one)) <= 1


def test_sixteen_groups_get_a_sixteenth_each() -> None:
    assert _worst(*(_group(1 / 16, 1e-3) for _ in range(16))) <= 0.1


@pytest.mark.parametrize("kernel", [20e-6, 100e-6, 500e-6])
def test_estimates_wrong_in_opposite_directions_come_right(kernel: float) -> None:
    assert _worst(_group(0.3, kernel, 8), _group(0.7, kernel, 1 / 8)) <= 2
    assert _worst(_group(0.3, kernel, 1 / 8), _group(0.7, kernel, 8)) <= 5


@pytest.mark.parametrize("kernel", [20e-6, 100e-6, 500e-6])
def test_estimates_that_are_too_small_do_not_fill_an_idle_gpu(kernel: float) -> None:
    assert _worst(_group(0.3, kernel, 1 / 8), _group(0.3, kernel, 1 / 8)) <= 3


# ---- targets


@pytest.mark.parametrize("kernel", LENGTHS)
@pytest.mark.parametrize("groups", [2, 4, 16])
def test_equal_groups_with_right_estimates_are_within_two_points(
    groups: int, kernel: float
) -> None:
    assert _worst(*(_group(1 / groups, kernel) for _ in range(groups))) <= 2


@pytest.mark.parametrize("kernel", LENGTHS)
def test_unequal_groups_with_right_estimates_are_within_two_points(kernel: float) -> None:
    assert _worst(_group(0.1, kernel), _group(0.9, kernel)) <= 2
    assert _worst(_group(0.3, kernel), _group(0.3, 1e-3)) <= 2


def test_kernels_of_every_length_beside_each_other_are_within_two_points() -> None:
    assert _worst(*(_group(1 / 10, LENGTHS[index % 5]) for index in range(10))) <= 2


@pytest.mark.parametrize("wrong", [8, 1 / 8])
@pytest.mark.parametrize("kernel", [1e-6, 20e-6, 100e-6, 1e-3, 5e-3, 20e-3, 50e-3, 200e-3, 0.5, 1])
@pytest.mark.parametrize(
    "groups", [(0.3, 0.7), (0.1, 0.9), (0.3, 0.3), (1 / 4,) * 4, (1 / 8,) * 8, (1 / 16,) * 16]
)
def test_estimates_that_are_wrong_by_eight_times_come_within_five_points(
    groups: tuple[float, ...], kernel: float, wrong: float
) -> None:
    assert _worst(*(_group(share, kernel, wrong) for share in groups)) <= 5


@pytest.mark.parametrize("wrong", [1, 8, 1 / 8])
@pytest.mark.parametrize("kernel", [20e-6, 5e-3, 200e-3])
def test_sixteen_processes_of_a_group_get_its_share(kernel: float, wrong: float) -> None:
    assert _worst(_group(0.3, kernel, wrong, 16), _group(0.3, kernel, wrong)) <= 5
    assert _worst(_group(0.3, kernel, wrong, 4), _group(0.7, 20e-6, wrong)) <= 5


def test_each_process_has_a_long_kernel_in_the_drivers_queue() -> None:
    """A group with sixteen processes has sixteen seconds of the GPU there, and pays later."""
    groups = _group(0.3, 1, 1 / 8, 16), _group(0.3, 1, 1 / 8)
    assert _worst(*groups) > 5
    groups = _group(0.3, 1, 1 / 8, 16), _group(0.3, 1, 1 / 8)
    assert _worst(*groups, settle=60, over=30) <= 5


def test_thirty_to_seventy_keeps_its_ratio_and_no_time_is_lost() -> None:
    small, large = _used(_group(0.3, 1e-3), _group(0.7, 1e-3))
    assert large / small == pytest.approx(7 / 3, rel=0.15)
    assert small + large >= 0.92


def test_equal_shares_are_fair_although_the_kernels_are_not_equal() -> None:
    used = _used(*(_group(1 / 4, kernel, wrong) for kernel, wrong in _UNLIKE))
    assert sum(used) ** 2 / (4 * sum(x * x for x in used)) >= 0.97  # Jain's index


_UNLIKE = [(20e-6, 1), (1e-3, 4), (10e-3, 1), (100e-6, 1 / 4)]


@pytest.mark.parametrize("kernel", [20e-6, 1e-3, 20e-3, 200e-3])
def test_utilization_that_is_told_a_tick_late_still_comes_right(kernel: float) -> None:
    for wrong in (1, 8, 1 / 8):
        groups = _group(0.3, kernel, wrong), _group(0.7, kernel, wrong)
        assert _worst(*groups, late=1, settle=5) <= 5


def _sampled(period: int) -> Controller:
    """The controller, whose driver tells hundredths of each period of so many ticks."""
    used: dict[str, float] = defaultdict(float)
    ticks = itertools.count()

    def control(
        groups: Mapping[str, GroupShare], usages: Mapping[str, GroupUsage]
    ) -> dict[str, GroupShare]:
        told = next(ticks) % period == 0
        seen = {}
        for name, usage in usages.items():
            used[name] += usage.used.seconds if usage.used else 0.0
            length = period * shares.TICK
            part = round(used[name] / length, 2) if told else 0.0
            time = UsedTime(part * length, ROUNDING * length if part else 0.0)
            seen[name] = msgspec.structs.replace(usage, used=time)
        if told:
            used.clear()
        return shares.tick(groups, seen)

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
        groups = {name: _group(part, kernel, wrong) for name, part in zip("ab", parts, strict=True)}
        simulation = Simulation(groups, controller=_sampled(period))
        simulation.run(settle)
        expected = {name: group.share for name, group in groups.items()}
        assert simulation.run(10) == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize("wrong", [1, 8, 1 / 8])
def test_small_shares_come_right_although_the_driver_tells_hundredths(wrong: float) -> None:
    groups = {"a": _group(0.02, 100e-6, wrong), "b": _group(0.05, 100e-6, wrong)}
    simulation = Simulation(groups, controller=_sampled(1))
    simulation.run(3)
    assert simulation.run(10) == pytest.approx({"a": 0.02, "b": 0.05}, abs=0.02)


def test_a_wrong_estimate_stays_corrected() -> None:
    groups = _group(0.3, 1e-3, 8), _group(0.7, 1e-3, 1 / 8)
    assert _worst(*groups, settle=60, over=60) <= 1


# ---- what each part is for: without it, a simulation fails


def _pair(kernel: float, wrong: float) -> float:
    return _worst(_group(0.3, kernel, wrong), _group(0.3, kernel, wrong))


def test_little_is_in_the_drivers_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _pair(50e-3, 1 / 8) <= 1
    monkeypatch.setattr(simulator, "UNFINISHED", 60.0)
    assert _pair(50e-3, 1 / 8) > 5


def _keeps(name: str) -> Callable[..., Settlement]:
    """`after_tick` that leaves `settled` or `kappa` as it is."""

    def after_tick(*seen: object, **options: float) -> Settlement:
        after = time_account.after_tick(*seen, **options)  # type: ignore[arg-type]
        return msgspec.structs.replace(after, **{name: options[name]})

    return after_tick


def test_what_was_used_is_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    assert max(_pair(1, 8), _pair(1, 1 / 8)) <= 1
    monkeypatch.setattr(shares, "after_tick", _keeps("settled"))
    assert min(_pair(1, 8), _pair(1, 1 / 8)) > 5


def test_estimates_are_corrected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _pair(1e-3, 8) <= 1
    monkeypatch.setattr(shares, "after_tick", _keeps("kappa"))
    assert _pair(1e-3, 8) > 5


def test_a_group_that_was_held_up_by_others_catches_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four processes with long kernels leave a fifth of the time to the other group meanwhile."""

    def error() -> float:
        return _worst(_group(0.3, 200e-3, processes=4), _group(0.7, 20e-6))

    assert error() <= 1
    monkeypatch.setattr(simulator, "LAG", simulator.BURST)
    assert error() > 5


def test_a_group_that_asked_for_little_gets_no_more_than_its_share_afterwards() -> None:
    """It wants a tenth of the GPU for 20 s, and then all that it can get."""
    quiet = Group([Process(1e-3, wants=lambda now: now > 20 or now % 1 < 0.1)], 0.3)
    simulation = Simulation({"quiet": quiet, "other": _group(0.7, 1e-3)})
    simulation.run(20)
    assert simulation.run(3)["quiet"] == pytest.approx(0.3, abs=0.05)


# ---- elastic shares


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


# ---- one tick


def _at(share: float, kappa: float = 1.0) -> GroupShare:
    return GroupShare(share=share, in_force=share, kappa=kappa)


def _ticks(group: GroupShare, *seen: tuple[float, float, float]) -> GroupShare:
    """The group after ticks in which it used a part of the time, launched, and finished so much."""
    launched = finished = 0.0
    for tick, (used, more, done) in enumerate([(0.0, 0.0, 0.0), *seen]):
        launched, finished = launched + more, finished + done
        times = LaunchTimes(
            launched=launched, finished=finished, paid=launched, paid_finished=finished
        )
        usage = GroupUsage(
            used=UsedTime(used * shares.TICK), active=True, times=times, at=100 + tick * shares.TICK
        )
        group = shares.tick({"a": group}, {"a": usage})["a"]
    return group


def test_kappa_of_an_idle_group_goes_back_to_one() -> None:
    groups = {"large": _at(0.5, 8.0), "small": _at(0.5, 1 / 8)}
    for _ in range(600):
        groups = shares.tick(groups, {})
    assert groups["large"].kappa == pytest.approx(1, abs=0.01)
    assert groups["small"].kappa == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize(("used", "launched", "bound"), [(1.0, 1e-3, 16.0), (0.0, 10, 1 / 16)])
def test_kappa_stays_within_its_bounds(used: float, launched: float, bound: float) -> None:
    assert _ticks(_at(0.5), *[(used, launched, launched)] * 100).kappa == bound


def test_small_deviations_change_nothing() -> None:
    assert _ticks(_at(0.5), *[(0.502, 0.25, 0.25)] * 2).kappa == 1


def test_a_group_that_used_more_than_it_paid_for_owes_the_rest() -> None:
    group = _ticks(_at(0.5), (0.8, 0.25, 0.0), (0.8, 0.25, 0.0), (0.0, 0.0, 0.0))
    assert group.settled == pytest.approx(0.8 - 0.5)


def test_a_group_gets_back_what_it_paid_too_much_for_finished_launches() -> None:
    """The driver may tell of a tick's use in the next one: so a tick later."""
    seen = [(0.4, 1.0, 0.0), (0.4, 0.0, 1.0)]
    assert _ticks(_at(0.5), *seen).settled == 0
    group = _ticks(_at(0.5), *seen, (0.0, 0.0, 0.0))
    assert group.settled == pytest.approx(0.4 - 1.0)
    assert _ticks(_at(0.5), *seen, *[(0.0, 0.0, 0.0)] * 3).settled == group.settled


def _rounded_up(group: GroupShare, ticks: int, more: float) -> GroupShare:
    """The group after ticks in which the driver says `more` than the tenth that it used."""
    for tick in range(ticks):
        done = tick * 0.1
        times = LaunchTimes(launched=done, finished=done, paid=done, paid_finished=done)
        used = UsedTime(0.1 + more, rounding=0.05)
        usage = GroupUsage(used=used, active=True, times=times, at=tick * shares.TICK)
        group = shares.tick({"a": group}, {"a": usage})["a"]
    return group


def test_what_may_be_rounded_is_not_settled() -> None:
    """Of each of many processes the driver may tell half of a hundredth more than it used."""
    group = _rounded_up(_at(0.5), 100, 0.04)
    assert (group.settled, group.kappa) == (0, 1)
    assert _rounded_up(_at(0.5), 100, 0.1).settled > 1


@pytest.mark.parametrize(("processes", "share"), [(10, 0.05), (40, 0.1), (4, 0.02)])
def test_many_small_processes_are_held_to_the_share_by_estimates(
    processes: int, share: float
) -> None:
    """Each uses less than half of a hundredth in a tick, of which the driver tells nothing."""
    group = _at(share)
    for tick in range(60):
        done = tick * share * shares.TICK
        times = LaunchTimes(launched=done, finished=done, paid=done, paid_finished=done)
        told = UsedTime().at_least(processes * ROUNDING * shares.TICK)
        usage = GroupUsage(used=told, active=True, times=times, at=tick * shares.TICK)
        group = shares.tick({"a": group}, {"a": usage})["a"]
    assert (group.settled, group.kappa) == (0, 1)


def test_launches_of_killed_processes_count_as_finished_once_the_group_is_still() -> None:
    """They would make the bounds wide for ever."""
    lost = (0.0, 3.0, 0.0)
    still = [(0.0, 0.0, 0.0)] * 5
    runs = [(0.8, 0.05, 0.05)] * 30  # estimates are eight times too small
    kept = _ticks(_at(0.5), *[(0.1, 0.05, 0.05)] * 4, lost, *runs)
    assert kept.kappa < 3
    found = _ticks(_at(0.5), *[(0.1, 0.05, 0.05)] * 4, lost, *still, *runs)
    assert found.kappa == pytest.approx(8, rel=0.05)


def test_a_long_kernel_beside_short_ones_does_not_make_them_dearer() -> None:
    """It is estimated right, and runs for longer than its length counts."""
    group = _at(0.5)
    for tick in range(200):
        short = tick * 0.005
        times = LaunchTimes(
            launched=60 + short, finished=short, paid=60 + short, paid_finished=short
        )
        usage = GroupUsage(used=UsedTime(0.25), active=True, times=times, at=tick * shares.TICK)
        group = shares.tick({"a": group}, {"a": usage})["a"]
    assert (group.settled, group.kappa) == (0, 1)


def test_what_is_launched_and_not_finished_is_neither_owed_nor_given_back() -> None:
    assert _ticks(_at(0.5), *[(0.0, 10.0, 0.0), (0.5, 0.0, 0.0)] * 10).settled == 0


def test_nothing_is_corrected_while_the_driver_does_not_tell_of_the_gpu() -> None:
    group = _at(0.5, kappa=2.0)
    unknown = GroupUsage(used=None, active=True, times=LaunchTimes(launched=9), at=1.0)
    assert shares.tick({"a": group}, {"a": unknown}) == {"a": group}


def test_use_that_was_not_told_for_a_while_is_not_settled_later() -> None:
    group = _ticks(_at(0.5), (0.5, 0.25, 0.25))
    unknown = GroupUsage(used=None, active=True, at=110.0)
    group = shares.tick({"a": group}, {"a": unknown})["a"]
    again = _ticks(group, (0.5, 0.25, 0.25), (0.5, 0.25, 0.25))
    assert (again.kappa, again.settled) == (1, 0)


def test_a_group_whose_region_cannot_be_read_any_more_pays_for_what_it_uses() -> None:
    group = _ticks(_at(0.5), (0.5, 0.25, 0.25))
    for tick in range(4):
        spoiled = GroupUsage(used=UsedTime(0.25), active=True, at=101.0 + tick * shares.TICK)
        group = shares.tick({"a": group}, {"a": spoiled})["a"]
    assert group.settled == pytest.approx(4 * 0.25)


def test_a_change_of_the_share_is_settled_neither_way() -> None:
    """The group used what it might: nearly all of the GPU, and 0.3 of it after another woke."""
    alone = GroupShare(share=0.3, elastic=True, in_force=shares.ALONE)
    group = _ticks(alone, (1.0, 0.5, 0.5), (1.0, 0.5, 0.5))
    held = msgspec.structs.replace(group, in_force=0.3)
    times = LaunchTimes(launched=1.15, finished=1.15, paid=1.15, paid_finished=1.15)
    usage = GroupUsage(used=UsedTime(0.15), active=True, times=times, at=101.5)
    after = shares.corrected(held, usage)
    assert (after.kappa, after.settled) == (1, 0)


@given(st.lists(st.tuples(*[st.floats(0, 2**62 / 1e9)] * 4, st.floats(0, 1)), min_size=2))
def test_nothing_that_a_tenant_writes_breaks_the_account(
    drawn: list[tuple[float, float, float, float, float]],
) -> None:
    group = _at(0.5)
    for tick, (launched, finished, paid, paid_finished, used) in enumerate(drawn):
        times = LaunchTimes(
            launched=launched, finished=finished, paid=paid, paid_finished=paid_finished
        )
        usage = GroupUsage(used=UsedTime(used), active=True, times=times, at=tick * shares.TICK)
        group = shares.tick({"a": group}, {"a": usage})["a"]
        assert time_account.LEAST_KAPPA <= group.kappa <= time_account.MOST_KAPPA
        assert abs(group.settled) <= 2**63 / 1e9


@pytest.mark.parametrize("share", [0.0, -0.1, 1.01, float("nan")])
def test_a_share_that_is_no_fraction_of_a_gpu_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="it is a fraction of one GPU"):
        GroupShare(share=share)


# ---- what the region says


def _observe(**fields: int) -> GroupUsage:
    nothing = dict.fromkeys(RegionUse.__struct_fields__, 0)
    return observe(UsedTime(), RegionUse(**{**nothing, **fields}), 1000 * S)


def test_a_launch_of_the_last_200_ms_makes_a_group_active() -> None:
    assert _observe(last_launch=1000 * S - S // 5).active
    assert not _observe(last_launch=1000 * S - S // 4).active


def test_a_group_that_waits_is_active_although_it_does_not_launch() -> None:
    assert _observe(backlogged_at=1000 * S - S // 10, last_launch=990 * S).active
    assert not _observe(backlogged_at=999 * S).active


def test_what_a_tenant_writes_into_the_region_stays_within_bounds() -> None:
    most = 2**64 - 1
    usage = _observe(backlogged_at=most, last_launch=most, longest_ns=most, longest_at=1000 * S)
    assert not usage.active
    assert usage.longest_kernel == 60
    assert _observe(longest_ns=S, longest_at=most).longest_kernel == 0


def test_the_longest_kernel_counts_for_half_a_minute() -> None:
    assert _observe(longest_ns=S, longest_at=971 * S).longest_kernel == 1
    assert _observe(longest_ns=S, longest_at=969 * S).longest_kernel == 0


def test_shares_in_force_are_those_that_limits_can_express() -> None:
    groups = _shares(a=(1 / 3, True), b=(1 / 7, False))
    assert shares.shares_in_force(groups, set()) == pytest.approx({"a": 0.3333, "b": 0.1429})
