"""Compares what a group paid for GPU time with what it used of it.

The gate makes a group pay before it launches, by estimate. The driver tells what was used, up to a
tick later. What a group used lies between two sums, from any moment on:

    what its finished launches used  <=  what it used  <=  what all its launches will use

So a group that used more than it paid for owes the rest, and one that paid more for its finished
launches than it used gets the rest back: that is settled, each tick. In the same way the two sums
of its estimates bound the factor kappa that makes them right.

A process that is killed leaves launches that are never finished. They count as finished once the
group has launched and used nothing for a while.

Times are seconds, of CLOCK_MONOTONIC where they are points in time.
"""

import math

import msgspec

from gpu.watch.sampled_time import UsedTime

TICKS = 60  # for which kappa is found
LONGEST_TICK = 2.0  # a longer one is not known well enough to settle it
LEAST_KAPPA, MOST_KAPPA = 1 / 16, 16.0
SMALL_DEBT = 0.002  # GPU time that is not settled: limits are not written for less
SMALL_CHANGE = 0.01  # of kappa, which is not made

_SURE = 2  # standard deviations: less may be chance
_MANY = 12  # parts of a sum, so that one of them more or less is little
_FEW = 3  # points, among which what the driver tells late counts too much
_FADING = 0.95  # of log(kappa) in a tick, as far as it may be chance
_STILL = 4  # ticks without use and launches, after which nothing is unfinished


class LaunchTimes(msgspec.Struct, frozen=True, kw_only=True):
    """GPU time of a group's launches, as its gates say: since its files were made."""

    launched: float = 0.0  # as estimated
    finished: float = 0.0  # of that, of launches that are known to be finished
    paid: float = 0.0  # what was paid for all launches
    paid_finished: float = 0.0  # and for the finished ones


class Point(msgspec.Struct, frozen=True):
    """How far an account was at the end of a tick."""

    at: float
    used: UsedTime  # since the account began; from what was paid for finished launches then
    times: LaunchTimes

    @property
    def unfinished(self) -> float:
        """GPU time of launches that are not finished, as estimated."""
        return self.times.launched - self.times.finished


class TimeAccount(msgspec.Struct, frozen=True):
    """What a group used and launched."""

    points: tuple[Point, ...]  # after the last ticks, the oldest one first
    fitted: UsedTime = UsedTime()  # `used` after the last tick whose use lay within the bounds
    # Of launches that are never finished: as estimated, and as paid for.
    lost: float = 0.0
    lost_paid: float = 0.0


class Settlement(msgspec.Struct, frozen=True):
    """What follows from an account after a tick."""

    account: TimeAccount
    settled: float  # GPU time that the group owes beside what it paid, in all; negative: less
    kappa: float


def begun(times: LaunchTimes, settled: float, at: float) -> TimeAccount:
    """The account of a group whose use is not known until now."""
    return TimeAccount((Point(at, UsedTime(times.paid_finished + settled), times),))


def after_tick(
    account: TimeAccount,
    used: UsedTime,
    times: LaunchTimes,
    at: float,
    *,
    settled: float,
    kappa: float,
    longest: float,
) -> Settlement:
    """Settle a tick in which the group used so much.

    `longest` is what its longest kernel is estimated at.
    """
    last = account.points[-1]
    if at - last.at > LONGEST_TICK:
        return Settlement(begun(times, settled, at), settled, kappa)
    lost, lost_paid = _lost(account, used, times)
    times = msgspec.structs.replace(
        times, finished=times.finished + lost, paid_finished=times.paid_finished + lost_paid
    )
    point = Point(at, last.used + used, times)
    owed = point.used.seconds - (times.paid + settled)
    paid_too_much = last.times.paid_finished + settled - point.used.seconds
    # What the driver rounds and samples adds up as long as it may be all that is wrong.
    unsure = SMALL_DEBT + _doubt(account.fitted, point.used)
    fitted = account.fitted
    if owed > unsure:
        settled += owed
    elif paid_too_much > unsure:
        settled -= paid_too_much
    if max(owed, paid_too_much) > unsure or max(owed, paid_too_much) <= 0:
        fitted = point.used
    points = (*account.points[-TICKS:], point)
    found = _kappa(points, kappa, longest)
    if abs(found / kappa - 1) < SMALL_CHANGE:
        found = kappa
    return Settlement(TimeAccount(points, fitted, lost, lost_paid), settled, found)


def _doubt(first: UsedTime, last: UsedTime) -> float:
    """How far the use between two points may be from what the driver told, seconds."""
    chance = _SURE * math.sqrt(max(0.0, last.variance - first.variance))
    return last.rounding - first.rounding + chance


def _lost(account: TimeAccount, used: UsedTime, times: LaunchTimes) -> tuple[float, float]:
    """Launches that are never finished: as estimated, and as paid for."""
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
    """The factor that makes estimates right, as far as these points tell."""
    first, before, last = points[0], points[-2], points[-1]
    used = last.used.seconds - first.used.seconds
    doubt = _doubt(first.used, last.used)
    launched = last.times.launched - first.times.finished  # all that can have used it
    ended = before.times.finished - first.times.launched  # all that has, whenever the driver told
    counted = last.times.finished - first.times.finished
    part = max(longest, first.unfinished, last.unfinished)  # of which it may have used any part
    rounding = last.used.rounding - first.used.rounding
    if len(points) > _FEW and used > _MANY * rounding and counted > _MANY * part:
        mean = used / counted
        if abs(mean / kappa - 1) > 2 * part / counted + doubt / used:
            kappa += (mean - kappa) / 2
    if last.used.variance > first.used.variance:
        kappa **= _FADING  # no more correction than what was used asks for
    if ended > 0:
        kappa = min(kappa, (used + doubt) / ended)
    if launched > 0:
        kappa = max(kappa, (used - doubt) / launched)
    return min(max(kappa, LEAST_KAPPA), MOST_KAPPA)
