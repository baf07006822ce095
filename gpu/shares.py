"""Compute shares of a GPU: the agent's part, which corrects what the gates of the shims estimate.

The gate (shim/gate.c) delays the launches of a group of containers by what it estimates that they
cost in GPU time. Each `TICK` the agent compares the group's share with the GPU time that the driver
reports, settles the difference, and sets `kappa`, the factor of all estimates of the group
(`time_account`).

Everything here is a pure function of what was seen in a tick: the caller reads the driver and the
region, and writes limits. Times are seconds unless a name says ns. Shares are fractions of one GPU,
from 0 to 1.
"""

import msgspec

from gpu import time_account
from gpu.region import RegionUse
from gpu.sampled_time import UsedTime
from gpu.time_account import LaunchTimes, TimeAccount, after_tick

TICK = 0.5  # seconds from one correction to the next
RECENT = 0.2  # seconds for which a launch, or a wait, makes a group active
DECAY = 0.98  # of an idle group's log(kappa), each tick

_ALMOST_ONE = 1e-3
_LONGEST_KERNEL = 60.0  # seconds; the gate estimates no more
_LONGEST_COUNTS = 30.0  # seconds for which the longest kernel counts
_NS = 10**9


class GroupUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen of one group on one GPU during a tick."""

    used: UsedTime | None  # by all its processes; None: the driver did not tell of this GPU
    active: bool = False  # it launched just now, or waits for it
    longest_kernel: float = 0.0  # seconds: its longest kernel or graph of the last time
    times: LaunchTimes | None = None  # what its launches took and paid; None: not known
    at: float | None = None  # the tick's end, seconds of CLOCK_MONOTONIC; None: it was not seen


class GroupShare(msgspec.Struct, frozen=True, kw_only=True):
    """The share of one group on one GPU, and how far its estimates were corrected."""

    share: float  # what it was allocated, or less while its use of memory is held against it
    kappa: float = 1.0
    settled: float = 0.0  # seconds of GPU time that it owes beside what it paid; negative: less
    account: TimeAccount | None = None  # of what it paid for and used; None: not known


def observe(used: UsedTime | None, use: RegionUse, now_ns: int) -> GroupUsage:
    """What a group did until `now_ns` (CLOCK_MONOTONIC), by the driver and by its region.

    The tenant can write anything into the region: that changes what it gets itself. No kernel is
    longer than the gate could estimate.
    """

    def recent(at: int, seconds: float) -> bool:
        return now_ns - seconds * _NS <= at <= now_ns

    longest = use.longest_ns / _NS if recent(use.longest_at, _LONGEST_COUNTS) else 0.0
    return GroupUsage(
        used=used,
        active=recent(use.backlogged_at, RECENT) or recent(use.last_launch, RECENT),
        longest_kernel=min(longest, _LONGEST_KERNEL),
        times=LaunchTimes(
            launched=use.launched_ns / _NS,
            finished=use.finished_ns / _NS,
            paid=use.paid_ns / _NS,
            paid_finished=use.paid_finished_ns / _NS,
        ),
        at=now_ns / _NS,
    )


def corrected(group: GroupShare, usage: GroupUsage) -> GroupShare:
    """The group with what it owes, and `kappa`, for the next tick.

    A group whose region cannot be read any more, since it spoiled that, has paid nothing. Of one
    that never paid nothing is settled: no gate sees what it launches.
    """
    account = group.account
    times = usage.times or (account.points[-1].times if account is not None else None)
    if group.share >= 1 or usage.used is None or usage.at is None or times is None:
        # Its launches are not delayed, or nothing is known.
        group = msgspec.structs.replace(group, account=None)
    elif account is None or times.launched == 0:
        account = time_account.begun(times, group.settled, usage.at)
        group = msgspec.structs.replace(group, account=account)
    else:
        after = after_tick(
            account,
            usage.used,
            times,
            usage.at,
            settled=group.settled,
            kappa=group.kappa,
            longest=usage.longest_kernel,
        )
        group = msgspec.structs.replace(
            group, kappa=after.kappa, settled=after.settled, account=after.account
        )
    if not usage.active and usage.used is not None and usage.used.seconds == 0:
        kappa = group.kappa**DECAY
        group = msgspec.structs.replace(group, kappa=kappa if abs(kappa - 1) > _ALMOST_ONE else 1.0)
    return group
