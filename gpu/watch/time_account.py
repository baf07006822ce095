"""Compares the GPU time that a group paid with the GPU time that the group used.

A group pays an estimate before each launch. The use since any moment has two bounds:

    use of the finished launches  <=  use  <=  use of all launches

A group that used more than it paid must pay the difference. A group that paid more for finished
launches than it used gets the difference back.

The factor kappa = use / estimate corrects the estimates. The two bounds limit kappa, too.

The launches of a killed process never finish. These launches count as finished after `_STILL` ticks
in which the group launched nothing and used no time.

Times are in seconds; points in time are of CLOCK_MONOTONIC.
"""

import math

import msgspec

from gpu.watch.sampled_time import UsedTime

TICKS = 60  # points from which kappa is computed
LONGEST_TICK = 2.0  # longer ticks are too inaccurate to settle
LEAST_KAPPA, MOST_KAPPA = 1 / 16, 16.0
SMALL_DEBT = 0.002  # seconds; a smaller difference is not worth a write of `limits`
SMALL_CHANGE = 0.01  # as a fraction of kappa; smaller changes are not applied

_SURE = 2  # standard deviations; smaller differences may be chance
_MANY = 12  # a part is negligible in a sum that is this many times as large
_FEW = 3  # points; with fewer points the driver's delay matters too much
_FADING = 0.95  # factor of log(kappa) per tick: kappa returns to 1
_STILL = 4  # ticks without use and launches, after which all launches count as finished


class LaunchTimes(msgspec.Struct, frozen=True, kw_only=True):
    """GPU time of a group's launches, as the gates report it."""

    launched: float = 0.0  # estimates of all launches
    finished: float = 0.0  # estimates of finished launches
    paid: float = 0.0  # payments for all launches
    paid_finished: float = 0.0  # payments for finished launches


class Point(msgspec.Struct, frozen=True):
    """The state of an account at the end of a tick."""

    at: float
    used: UsedTime  # payments for finished launches at the account's start, plus use since then
    times: LaunchTimes

    @property
    def unfinished(self) -> float:
        return self.times.launched - self.times.finished


class TimeAccount(msgspec.Struct, frozen=True):
    points: tuple[Point, ...]  # after the last ticks, the oldest first
    fitted: UsedTime = UsedTime()  # `used` after the last tick that was settled or in bounds
    lost: float = 0.0  # estimates of launches that never finish
    lost_paid: float = 0.0  # payments for these launches
    refund: float = 0.0  # GPU time that the group gets back in the next ticks


def begun(times: LaunchTimes, settled: float, at: float) -> TimeAccount:
    """A new account. Earlier use is unknown."""
    return TimeAccount((Point(at, UsedTime(times.paid_finished + settled), times),))


def after_tick(
    account: TimeAccount,
    used: UsedTime,
    times: LaunchTimes,
    at: float,
    *,
    usable: float,
    settled: float,
    kappa: float,
    longest: float,
) -> tuple[TimeAccount, float, float]:
    """Settle a tick. Returns the account, `settled` and `kappa` after the tick.

    `usable` is the largest refund that the group can use now. The rest of a refund waits for later
    ticks. `longest` is the estimate of the group's longest kernel.
    """
    last = account.points[-1]
    if at - last.at > LONGEST_TICK:
        return begun(times, settled, at), settled, kappa
    lost, lost_paid = _lost(account, used, times)
    times = msgspec.structs.replace(
        times, finished=times.finished + lost, paid_finished=times.paid_finished + lost_paid
    )
    point = Point(at, last.used + used, times)
    refund = account.refund
    owed = point.used.seconds - (times.paid + settled - refund)
    paid_too_much = last.times.paid_finished + settled - refund - point.used.seconds
    # A difference within the driver's rounding and sampling errors is not settled.
    unsure = SMALL_DEBT + _doubt(account.fitted, point.used)
    fitted = account.fitted
    if owed > unsure:
        refund -= owed
    elif paid_too_much > unsure:
        refund += paid_too_much
    given = min(refund, usable)
    if max(owed, paid_too_much) > unsure or max(owed, paid_too_much) <= 0:
        fitted = point.used
    points = (*account.points[-TICKS:], point)
    found = _kappa(points, kappa, longest)
    if abs(found / kappa - 1) < SMALL_CHANGE:
        found = kappa
    return TimeAccount(points, fitted, lost, lost_paid, refund - given), settled - given, found


def _doubt(first: UsedTime, last: UsedTime) -> float:
    """The uncertainty of the use between two points, in seconds."""
    chance = _SURE * math.sqrt(max(0.0, last.variance - first.variance))
    return last.rounding - first.rounding + chance


def _lost(account: TimeAccount, used: UsedTime, times: LaunchTimes) -> tuple[float, float]:
    """The estimates of launches that never finish, and the payments for these launches."""
    lost, paid = times.launched - times.finished, times.paid - times.paid_finished
    recent = account.points[-_STILL:]
    still = used.seconds == 0 and all(
        (point.used.seconds, point.times.launched) == (recent[-1].used.seconds, times.launched)
        for point in recent
    )
    if len(recent) == _STILL and still:
        return max(lost, 0.0), max(paid, 0.0)
    return min(account.lost, max(lost, 0.0)), min(account.lost_paid, max(paid, 0.0))


def _kappa(points: tuple[Point, ...], kappa: float, longest: float) -> float:
    """The new kappa, from the use and the estimates between the points."""
    first, before, last = points[0], points[-2], points[-1]
    used = last.used.seconds - first.used.seconds
    doubt = _doubt(first.used, last.used)
    launched = last.times.launched - first.times.finished  # all launches that can be in `used`
    ended = before.times.finished - first.times.launched  # launches that must be in `used`
    counted = last.times.finished - first.times.finished
    part = max(longest, first.unfinished, last.unfinished)  # may be in `used` only in part
    rounding = last.used.rounding - first.used.rounding
    if len(points) > _FEW and used > _MANY * rounding and counted > _MANY * part:
        mean = used / counted
        if abs(mean / kappa - 1) > 2 * part / counted + doubt / used:
            kappa += (mean - kappa) / 2
    if last.used.variance > first.used.variance:
        kappa **= _FADING  # towards 1, unless the bounds below require more
    if ended > 0:
        kappa = min(kappa, (used + doubt) / ended)
    if launched > 0:
        kappa = max(kappa, (used - doubt) / launched)
    return min(max(kappa, LEAST_KAPPA), MOST_KAPPA)
