"""One tick of the controller of compute shares: what it sees of a group, and what it settles."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu.limits.region import RegionUse
from gpu.watch import compute_shares, time_account
from gpu.watch.compute_shares import GroupShare, GroupUsage, observe
from gpu.watch.sampled_time import UsedTime
from gpu.watch.time_account import LaunchTimes

S = 10**9  # nanoseconds


def _at(share: float, kappa: float = 1.0) -> GroupShare:
    return GroupShare(share=share, kappa=kappa)


def _ticks(group: GroupShare, *seen: tuple[float, float, float]) -> GroupShare:
    """The group after ticks in which it used a part of the time, launched, and finished so much."""
    launched = finished = 0.0
    for tick, (used, more, done) in enumerate([(0.0, 0.0, 0.0), *seen]):
        launched, finished = launched + more, finished + done
        times = LaunchTimes(
            launched=launched, finished=finished, paid=launched, paid_finished=finished
        )
        usage = GroupUsage(
            used=UsedTime(used * compute_shares.TICK),
            times=times,
            at=100 + tick * compute_shares.TICK,
        )
        group = compute_shares.corrected(group, usage)
    return group


@pytest.mark.parametrize(("used", "launched", "bound"), [(1.0, 1e-3, 16.0), (0.0, 10, 1 / 16)])
def test_kappa_stays_within_its_bounds(used: float, launched: float, bound: float) -> None:
    assert _ticks(_at(0.5), *[(used, launched, launched)] * 100).kappa == bound


def test_small_deviations_change_nothing() -> None:
    assert _ticks(_at(0.5), *[(0.502, 0.25, 0.25)] * 2).kappa == 1


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
        usage = GroupUsage(used=used, times=times, at=tick * compute_shares.TICK)
        group = compute_shares.corrected(group, usage)
    return group


def test_what_may_be_rounded_is_not_settled() -> None:
    """Of each of many processes the driver may tell half of a hundredth more than it used."""
    group = _rounded_up(_at(0.5), 100, 0.04)
    assert (group.settled, group.kappa) == (0, 1)
    assert _rounded_up(_at(0.5), 100, 0.1).settled > 1


def test_launches_of_killed_processes_count_as_finished_once_the_group_is_still() -> None:
    """They would make the bounds wide for ever."""
    lost = (0.0, 3.0, 0.0)
    still = [(0.0, 0.0, 0.0)] * 5
    runs = [(0.8, 0.05, 0.05)] * (time_account.TICKS + 10)  # estimates are eight times too small
    kept = _ticks(_at(0.5), *[(0.1, 0.05, 0.05)] * 4, lost, *runs[:30])
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
        usage = GroupUsage(used=UsedTime(0.25), times=times, at=tick * compute_shares.TICK)
        group = compute_shares.corrected(group, usage)
    assert (group.settled, group.kappa) == (0, 1)


def test_what_is_launched_and_not_finished_is_neither_owed_nor_given_back() -> None:
    assert _ticks(_at(0.5), *[(0.0, 10.0, 0.0), (0.5, 0.0, 0.0)] * 10).settled == 0


def test_use_that_was_not_told_for_a_while_is_not_settled_later() -> None:
    group = _ticks(_at(0.5), (0.5, 0.25, 0.25))
    unknown = GroupUsage(used=None, at=110.0)
    group = compute_shares.corrected(group, unknown)
    again = _ticks(group, (0.5, 0.25, 0.25), (0.5, 0.25, 0.25))
    assert (again.kappa, again.settled) == (1, 0)


def test_a_change_of_the_share_is_settled_neither_way() -> None:
    """The group used what it might: nearly all of the GPU, and 0.3 of it afterwards."""
    group = _ticks(_at(0.9999), (1.0, 0.5, 0.5), (1.0, 0.5, 0.5))
    held = msgspec.structs.replace(group, share=0.3)
    times = LaunchTimes(launched=1.15, finished=1.15, paid=1.15, paid_finished=1.15)
    usage = GroupUsage(used=UsedTime(0.15), times=times, at=101.5)
    after = compute_shares.corrected(held, usage)
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
        usage = GroupUsage(used=UsedTime(used), times=times, at=tick * compute_shares.TICK)
        group = compute_shares.corrected(group, usage)
        assert time_account.LEAST_KAPPA <= group.kappa <= time_account.MOST_KAPPA
        assert abs(group.settled) <= 2**63 / 1e9


def _observe(**fields: int) -> GroupUsage:
    nothing = dict.fromkeys(RegionUse.__struct_fields__, 0)
    return observe(UsedTime(), RegionUse(**{**nothing, **fields}), 1000 * S)


def test_what_a_tenant_writes_into_the_region_stays_within_bounds() -> None:
    most = 2**64 - 1
    usage = _observe(backlogged_at=most, last_launch=most, longest_ns=most, longest_at=1000 * S)
    assert usage.longest_kernel == 60
    assert _observe(longest_ns=S, longest_at=most).longest_kernel == 0


def test_the_longest_kernel_counts_for_half_a_minute() -> None:
    assert _observe(longest_ns=S, longest_at=971 * S).longest_kernel == 1
    assert _observe(longest_ns=S, longest_at=969 * S).longest_kernel == 0
