"""Compute shares: the agent's controller, on a simulated GPU.

Errors are in points: the difference between the time that a group had of the GPU and its share,
times 100. Unless a test says otherwise, a simulation settles for 3 s and is measured over 10 s.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu import shares
from gpu.region import RegionUse
from gpu.shares import GroupShare, GroupUsage, observe
from tests.unit.gpu.simulator import Group, Process, Simulation

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


GROUPS = pytest.mark.parametrize(
    "groups", [(0.3, 0.7), (0.1, 0.9), (0.3, 0.3), (1 / 8,) * 8], ids=str
)


@pytest.mark.parametrize("kernel", [1e-6, 100e-6, 5e-3, 20e-3, 50e-3, 200e-3, 500e-3])
@GROUPS
def test_estimates_eight_times_too_large_come_within_five_points(
    groups: tuple[float, ...], kernel: float
) -> None:
    assert _worst(*(_group(share, kernel, 8) for share in groups)) <= 5


@pytest.mark.parametrize(("kernel", "over"), [(100e-3, 20), (1.0, 30)])
@GROUPS
def test_a_part_of_a_kernel_more_or_less_is_less_than_five_points_of_a_longer_time(
    groups: tuple[float, ...], kernel: float, over: float
) -> None:
    """Of kernels of a second 10 s hold ten, so that each is ten points."""
    assert _worst(*(_group(share, kernel, 8) for share in groups), over=over) <= 5


@pytest.mark.parametrize(("kernel", "settle"), [(5e-3, 20), (50e-3, 40)])
def test_what_small_estimates_let_into_the_drivers_queue_must_drain_first(
    kernel: float, settle: float
) -> None:
    def error(settle: float) -> float:
        groups = (_group(0.3, kernel, 1 / 8) for _ in range(2))
        return _worst(*groups, settle=settle, over=20)

    assert error(3) > 5  # 1024 launches are 5 s of the GPU, and more
    assert error(settle) <= 5


def test_thirty_to_seventy_keeps_its_ratio_and_no_time_is_lost() -> None:
    small, large = _used(_group(0.3, 1e-3), _group(0.7, 1e-3))
    assert large / small == pytest.approx(7 / 3, rel=0.15)
    assert small + large >= 0.92


def test_equal_shares_are_fair_although_the_kernels_are_not_equal() -> None:
    used = _used(*(_group(1 / 4, kernel, wrong) for kernel, wrong in _UNLIKE))
    assert sum(used) ** 2 / (4 * sum(x * x for x in used)) >= 0.97  # Jain's index


_UNLIKE = [(20e-6, 1), (1e-3, 4), (10e-3, 1), (100e-6, 1 / 4)]


@pytest.mark.parametrize("kernel", [20e-6, 1e-3])
def test_utilization_that_is_told_a_tick_late_still_comes_right(kernel: float) -> None:
    assert _worst(_group(0.3, kernel), _group(0.7, kernel), late=1) <= 2
    assert _worst(_group(0.3, kernel, 8), _group(0.7, kernel, 8), late=1, settle=5) <= 5


def test_a_wrong_estimate_stays_corrected() -> None:
    groups = _group(0.3, 1e-3, 8), _group(0.7, 1e-3, 1 / 8)
    assert _worst(*groups, settle=60, over=60) <= 1


# ---- the two conditions against windup: without either, a simulation fails


def _without_the_driver_s_queue(utilization: float, share: float, backlogged: bool) -> float:
    """`deviation` without the condition that use above the share counts in any case."""
    return utilization / share - 1 if backlogged else 0.0


def _without_demand(utilization: float, share: float, backlogged: bool) -> float:
    """`deviation` without the condition that use below the share counts for waiting groups only."""
    return utilization / share - 1


def _behind_a_full_queue() -> float:
    """A group with small estimates fills the driver's queue while it is alone."""
    late = Group([Process(5e-3, wants=lambda now: now > 6)], 0.7, elastic=True)
    first = Group([Process(5e-3, 1 / 8)], 0.3, elastic=True)
    simulation = Simulation({"first": first, "late": late})
    simulation.run(30)
    return simulation.run(10)["first"]


def _after_little_demand() -> float:
    """A group that wants a tenth of the GPU for 20 s, and then all that it can get."""
    quiet = Group([Process(1e-3, wants=lambda now: now > 20 or now % 1 < 0.1)], 0.3)
    simulation = Simulation({"quiet": quiet, "other": _group(0.7, 1e-3)})
    simulation.run(20)
    return simulation.run(3)["quiet"]


def test_use_above_the_share_counts_although_the_drivers_queue_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert _behind_a_full_queue() == pytest.approx(0.3, abs=0.05)
    monkeypatch.setattr(shares, "deviation", _without_the_driver_s_queue)
    assert _behind_a_full_queue() > 0.4


def test_a_group_that_asked_for_little_gets_no_more_than_its_share_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert _after_little_demand() == pytest.approx(0.3, abs=0.05)
    monkeypatch.setattr(shares, "deviation", _without_demand)
    assert _after_little_demand() > 0.4


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


def test_one_active_elastic_group_has_the_whole_gpu() -> None:
    assert shares.shares_in_force(_shares(a=(0.3, True), b=(0.7, True)), {"a"})["a"] == 1


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


def _at(share: float, kappa: float = 1.0, excess: float = 0.0) -> GroupShare:
    return GroupShare(share=share, in_force=share, kappa=kappa, excess=excess)


def test_kappa_of_an_idle_group_goes_back_to_one() -> None:
    groups = {"large": _at(0.5, 8.0), "small": _at(0.5, 1 / 8)}
    for _ in range(600):
        groups = shares.tick(groups, {})
    assert groups["large"].kappa == pytest.approx(1, abs=0.01)
    assert groups["small"].kappa == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize(("utilization", "bound"), [(1.0, 16.0), (0.0, 1 / 16)])
def test_kappa_stays_within_its_bounds(utilization: float, bound: float) -> None:
    groups = {"a": _at(0.5)}
    for _ in range(100):
        usage = GroupUsage(utilization=utilization, backlogged=True, active=True)
        groups = shares.tick(groups, {"a": usage})
    assert groups["a"].kappa == bound


def test_small_deviations_change_nothing() -> None:
    usage = GroupUsage(utilization=0.51, backlogged=True, active=True)
    assert shares.corrected(_at(0.5), usage).kappa == 1.0


def test_the_window_grows_with_the_kernel() -> None:
    def step(longest: float) -> float:
        usage = GroupUsage(utilization=1.0, backlogged=True, longest_kernel=longest)
        return shares.corrected(_at(0.5), usage).kappa

    assert step(1e-3) == step(50e-3) > step(150e-3) > step(5.0) == step(50.0)


def test_nothing_is_corrected_while_the_driver_does_not_tell_of_the_gpu() -> None:
    group = _at(0.5, kappa=2.0, excess=0.3)
    unknown = GroupUsage(utilization=None, backlogged=True, active=True)
    assert shares.tick({"a": group}, {"a": unknown}) == {"a": group}


def test_a_change_of_the_share_is_no_deviation() -> None:
    """The group used what it might: all of the GPU, and 0.3 of it after its neighbour woke."""
    whole = GroupShare(share=0.3, elastic=True, in_force=1.0)
    other = GroupShare(share=0.7, elastic=True, in_force=0.7)
    busy = GroupUsage(utilization=1.0, active=True)
    woken = shares.tick(
        {"a": whole, "b": other}, {"a": busy, "b": GroupUsage(utilization=0.0, active=True)}
    )
    assert (woken["a"].in_force, woken["a"].kappa) == (0.3, 1.0)
    held = GroupUsage(utilization=0.3, backlogged=True, active=True)
    after = shares.tick(woken, {"a": held, "b": held})
    assert after["a"].kappa == 1.0


@pytest.mark.parametrize("share", [0.0, -0.1, 1.01, float("nan")])
def test_a_share_that_is_no_fraction_of_a_gpu_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="it is a fraction of one GPU"):
        GroupShare(share=share)


# ---- what the region says


def _observe(utilization: float = 0.5, **fields: int) -> GroupUsage:
    nothing = dict.fromkeys(RegionUse.__struct_fields__, 0)
    return observe(_at(0.5), utilization, RegionUse(**{**nothing, **fields}), 1000 * S)


def test_a_launch_of_the_last_200_ms_makes_a_group_active() -> None:
    assert _observe(last_launch=1000 * S - S // 5).active
    assert not _observe(last_launch=1000 * S - S // 4).active


def test_a_group_that_waits_is_active_although_it_does_not_launch() -> None:
    usage = _observe(backlogged_at=1000 * S - S // 10, last_launch=990 * S)
    assert usage.backlogged
    assert usage.active
    assert not _observe(backlogged_at=999 * S).backlogged


def test_a_group_that_pays_for_earlier_use_is_not_backlogged_but_active() -> None:
    waits = {"backlogged_at": 1000 * S, "longest_ns": S, "longest_at": 1000 * S}
    assert _observe(tat=1004 * S, **waits).backlogged
    usage = _observe(tat=1010 * S, **waits)
    assert usage.active
    assert not usage.backlogged


def test_what_a_tenant_writes_into_the_region_stays_within_bounds() -> None:
    most = 2**64 - 1
    usage = _observe(backlogged_at=most, last_launch=most, longest_ns=most, longest_at=1000 * S)
    assert not usage.backlogged
    assert not usage.active
    assert usage.longest_kernel == 60
    assert _observe(longest_ns=S, longest_at=most).longest_kernel == 0


def test_the_longest_kernel_counts_for_half_a_minute() -> None:
    assert _observe(longest_ns=S, longest_at=971 * S).longest_kernel == 1
    assert _observe(longest_ns=S, longest_at=969 * S).longest_kernel == 0


def test_utilization_is_a_fraction_although_samples_overlap() -> None:
    assert _observe(1.2).utilization == 1
    assert _observe(-0.1).utilization == 0


def test_shares_in_force_are_those_that_limits_can_express() -> None:
    groups = _shares(a=(1 / 3, True), b=(1 / 7, False))
    assert shares.shares_in_force(groups, set()) == pytest.approx({"a": 0.3333, "b": 0.1429})
