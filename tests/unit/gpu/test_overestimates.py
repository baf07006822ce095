"""Estimates that are far too large are told from a GPU that others keep busy."""

from collections.abc import Sequence

import pytest

from gpu import overestimates, shares
from gpu.overestimates import Overestimate, TimeAccount
from gpu.shares import GroupShare, GroupUsage
from tests.unit.gpu.simulator import Group, Process, Simulation

TICK = 0.5
SHARE = 0.25


def _ticks(paid_for: float, *used: float, busy: float = 1.0) -> list[Overestimate]:
    """After ticks from second 100 on, in the first of which a group paid for seconds of GPU time.

    `used` is the part of the GPU's time that it used in each.
    """
    account = overestimates.begun(SHARE, 90.0, 100.0)
    found: list[Overestimate] = []
    for number, part in enumerate(used, start=1):
        now = 100.0 + number * TICK
        tat = 100.0 + paid_for / SHARE
        found.append(overestimates.after_tick(account, part, max(part, busy), tat, now, TICK))
        account = found[-1].account
    return found


def _nothing(found: Sequence[Overestimate]) -> bool:
    return all((each.factor, each.debt) == (1, None) for each in found)


def test_a_group_that_used_and_launched_nothing_for_two_ticks_owes_what_it_used() -> None:
    *before, last = _ticks(8.0, 1, 1, 0, 0)
    assert _nothing(before)
    assert last.factor == pytest.approx(1 / 8)
    assert last.debt == pytest.approx(1 / SHARE - 4 * TICK)  # a second, of which two are paid
    assert last.account.paid_until == pytest.approx(100 + 1 / SHARE)


def test_after_a_tick_in_which_the_gpu_was_not_always_busy_all_is_done() -> None:
    *before, last = _ticks(8.0, 0.4, 0.4, 0.4, busy=0.5)
    assert _nothing(before)  # the driver may tell of the use in a tick in the next one
    assert last.factor == pytest.approx(0.6 / 8)
    assert last.debt == pytest.approx(0.6 / SHARE - 3 * TICK)


def test_what_others_keep_the_gpu_from_doing_is_waited_for() -> None:
    assert _nothing(_ticks(8.0, *[0.1] * 30))


@pytest.mark.parametrize("busy", [0.0, 1.0])
def test_a_right_estimate_changes_nothing(busy: float) -> None:
    assert _nothing(_ticks(1.0, 1, 1, 0, 0, 0, busy=busy))


def test_a_group_that_used_nothing_at_all_is_not_corrected() -> None:
    """The driver may not tell of it."""
    assert _nothing(_ticks(8.0, 0, 0, 0, 0, busy=0.0))


def test_an_account_is_about_some_seconds_only() -> None:
    assert _ticks(8.0, *[0.5] * 30)[-1].account.used == 10 * 0.5 * TICK


def _account() -> TimeAccount:
    return overestimates.begun(SHARE, 90.0, 100.0)


def _state(**fields: object) -> GroupShare:
    return GroupShare(**{"share": SHARE, "in_force": SHARE, **fields})  # type: ignore[arg-type]


def _usage(**fields: object) -> GroupUsage:
    told = {"utilization": 0.0, "backlogged": True, "paid_until": 132.0, "at": 100.0}
    return GroupUsage(**{**told, **fields})  # type: ignore[arg-type]


def test_debt_from_before_the_agent_looked_counts_as_paid_for_rightly() -> None:
    state = shares.corrected(_state(), _usage(utilization=0.5))
    for number in range(1, 8):
        state = shares.corrected(state, _usage(at=100 + number * TICK), 0.0)
        assert state.most_debt == shares.MOST_DEBT
    assert state.account is not None
    assert state.account.paid_until == 132


@pytest.mark.parametrize(
    "change", [{"in_force": 0.5}, {"in_force": 1.0}], ids=["another share", "the whole GPU"]
)
def test_another_share_begins_another_account(change: dict[str, float]) -> None:
    state = _state(account=_account(), **change)
    after = shares.corrected(state, _usage()).account
    assert after is None or (after.share, after.paid_until) == (0.5, 132)


def test_without_its_region_a_group_has_no_account() -> None:
    usage = GroupUsage(utilization=0.5)
    assert shares.corrected(_state(account=_account()), usage).account is None


@pytest.mark.parametrize("kernel", [1e-3, 50e-3, 0.5, 1.0])
def test_right_estimates_keep_their_factor_beside_many_others(kernel: float) -> None:
    groups = {"half": Group([Process(kernel)], 0.5)}
    groups |= {str(number): Group([Process(kernel)], 0.1) for number in range(5)}
    simulation = Simulation(groups)
    for _ in range(20):
        simulation.run(1)
        assert all(0.8 <= state.kappa <= 1.2 for state in simulation.states.values())
