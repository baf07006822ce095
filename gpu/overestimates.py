"""Finds estimates of a group's kernels that are far too large, and the debt that they made.

The correction in `shares` averages over a dozen kernels at the group's share. A group that pays for
seconds where its kernels take a tenth of that would wait for most of a minute until then. What it
paid is in its region (`tat`, shim/gate.h), and what it used the driver tells. The two are
comparable once all that it launched is done. That is so after a tick in which the GPU was not
always busy, or after two in which the group used and launched nothing. The driver may tell of a
tick's use in the next one: so what was paid for until two ticks before is compared.

Times are seconds, of CLOCK_MONOTONIC where they are points in time.
"""

import msgspec

FAR = 0.5  # less than this part of what was paid for was used
BUSY = 0.8  # of a tick: a GPU that is used more may have work for all of it
_IDLE = 2  # ticks
_LONGEST = 20  # ticks that an account is about


class TimeAccount(msgspec.Struct, frozen=True, kw_only=True):
    """What a group paid for, and used, since a moment at which all it had launched was paid for."""

    share: float  # in force meanwhile: another one begins another account
    paid_until: float  # `tat` at that moment
    paid_for: float  # until when what it used is paid for
    before: tuple[float, float]  # `tat` two ticks ago, and after the last tick
    slack: float = 0.0  # of `paid_until`: a group that did not wait may have begun later
    used: float = 0.0  # GPU time
    ticks: int = 0
    idle: int = 0  # ticks in a row until now in which it used nothing, and launched nothing


class Overestimate(msgspec.Struct, frozen=True, kw_only=True):
    """What follows from an account after a tick."""

    account: TimeAccount
    factor: float = 1.0  # of kappa
    debt: float | None = None  # all that the group owes, if more was found in `tat`


def begun(share: float, tat: float, now: float, slack: float = 0.0) -> TimeAccount:
    """The account of a group whose use is not known until now."""
    until = max(tat, now)
    return TimeAccount(
        share=share, paid_until=until, paid_for=until, before=(until, until), slack=slack
    )


def after_tick(
    account: TimeAccount, utilization: float, busy: float, tat: float, now: float, tick: float
) -> Overestimate:
    """The account of a group that waited to launch at the end of a tick of so many seconds.

    `utilization` is the part of the GPU's time that it used in the tick, `busy` that of all groups.
    """
    earlier, last = account.before
    used = account.used + utilization * tick
    paid_for = max(account.paid_for, now - tick) + utilization * tick / account.share
    idle = account.idle + 1 if utilization <= 0 and tat == last else 0
    known = TimeAccount(
        share=account.share,
        paid_until=account.paid_until,
        paid_for=paid_for,
        before=(last, tat),
        slack=account.slack,
        used=used,
        ticks=account.ticks + 1,
        idle=idle,
    )
    restarted = msgspec.structs.replace(
        known, paid_until=tat, before=(tat, tat), slack=0.0, used=0.0, ticks=0
    )
    paid = (earlier - account.paid_until - account.slack) * account.share
    if not (busy < BUSY or idle >= _IDLE) or not 0 < used < FAR * paid:
        return Overestimate(account=known if known.ticks < _LONGEST else restarted)
    if tat != earlier:
        return Overestimate(account=restarted, factor=used / paid)
    debt = max(paid_for - now, 0.0)
    until = min(tat, now + debt)
    restarted = msgspec.structs.replace(restarted, paid_until=until, before=(until, until))
    return Overestimate(account=restarted, factor=used / paid, debt=debt)
