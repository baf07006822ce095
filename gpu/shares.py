"""Compute shares of a GPU: the agent's part, which corrects what the gates of the shims estimate.

The gate (shim/gate.c) delays the launches of a group of containers by what it estimates that they
cost in GPU time. Each `TICK` the agent compares the group's share with the GPU time that the driver
reports, and sets `kappa`, the factor of all estimates of the group. Shares are fixed, or elastic:
then what the share of an idle group leaves unused goes to the active groups.

Everything here is a pure function of what was seen in a tick: the caller reads the driver and the
region, and writes limits. Times are seconds unless a name says ns. Shares and utilizations are
fractions of one GPU, from 0 to 1.
"""

from collections.abc import Hashable, Mapping
from typing import TypeVar

import msgspec

from gpu import overestimates
from gpu.overestimates import TimeAccount
from gpu.region import RegionUse

TICK = 0.5  # seconds from one correction to the next
RECENT = 0.2  # seconds for which a launch makes a group active, and a wait makes it backlogged
LEAST_SHARE = 1e-4  # what limits can express: 1/10000
TOLERANCE = 0.03  # of the share: smaller deviations are noise of the driver's samples
LEAST_KAPPA, MOST_KAPPA = 1 / 16, 16.0
MOST_DEBT = 60.0  # seconds that a group may have to wait, whatever was estimated
DECAY = 0.98  # of an idle group's log(kappa), each tick

_SHORTEST_WINDOW, _LONGEST_WINDOW = 2.0, 30.0  # seconds over which utilization is averaged
_KERNELS_IN_WINDOW = 12
_LEAST_STEP, _MOST_STEP = 2 / 3, 3 / 2  # of kappa, in one tick
_LONGEST_KERNEL = 60.0  # seconds; the gate estimates no more
_LONGEST_COUNTS = 30.0  # seconds for which the longest kernel counts
_NS = 10**9

K = TypeVar("K", bound=Hashable)


class GroupUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen of one group on one GPU during a tick."""

    # The sum of its processes' smUtil, of samples newer than the last tick; None: the driver did
    # not tell of this GPU.
    utilization: float | None
    backlogged: bool = False  # at the tick's end launches wait in the gate, or just did
    active: bool = False  # backlogged, or it launched just now
    longest_kernel: float = 0.0  # seconds: its longest kernel or graph of the last time
    # When what it launched is paid for (`tat`), and when that was read: seconds of CLOCK_MONOTONIC.
    paid_until: float = 0.0
    at: float | None = None  # it was not


class GroupShare(msgspec.Struct, frozen=True, kw_only=True):
    """The share of one group on one GPU, and how far its estimates were corrected."""

    share: float  # what it was allocated, or less while its use of memory is held against it
    elastic: bool = False
    in_force: float = 0.0  # what limits say now; 0.0: nothing yet
    kappa: float = 1.0
    excess: float = 0.0  # the mean of utilization/share - 1: 0.5 is half as much again as its share
    account: TimeAccount | None = None  # of what it paid for and used; None: not known
    most_debt: float = MOST_DEBT  # seconds, until the next tick

    def __post_init__(self) -> None:
        if not LEAST_SHARE <= self.share <= 1:
            raise ValueError(
                f"share {self.share:g} must be {LEAST_SHARE:g} to 1: it is a fraction of one GPU"
            )


def observe(
    group: GroupShare, utilization: float | None, use: RegionUse, now_ns: int
) -> GroupUsage:
    """What a group did until `now_ns` (CLOCK_MONOTONIC), by the driver and by its region.

    The tenant can write anything into the region: that changes what it gets itself. No kernel is
    longer than the gate could estimate.

    A group that owes more than a kernel or two pays for what it used earlier. What it uses
    meanwhile says nothing of the estimates, so it does not count as backlogged.
    """

    def recent(at: int, seconds: float) -> bool:
        return now_ns - seconds * _NS <= at <= now_ns

    waits = recent(use.backlogged_at, RECENT)
    longest = use.longest_ns / _NS if recent(use.longest_at, _LONGEST_COUNTS) else 0.0
    longest = min(longest, _LONGEST_KERNEL)
    share = group.in_force or group.share
    owes = (use.tat - now_ns) / _NS
    return GroupUsage(
        utilization=None if utilization is None else min(max(utilization, 0.0), 1.0),
        backlogged=waits and owes <= 2 * group.kappa * longest / share + RECENT,
        active=waits or recent(use.last_launch, RECENT),
        longest_kernel=longest,
        paid_until=use.tat / _NS,
        at=now_ns / _NS,
    )


def tick(groups: Mapping[K, GroupShare], usages: Mapping[K, GroupUsage]) -> dict[K, GroupShare]:
    """The groups of one GPU after a tick: the share in force and kappa of each.

    A group without an entry in `usages` was not seen: it counts as idle. A group that is new here
    (`in_force` 0.0) has nothing to be corrected yet.
    """
    idle = GroupUsage(utilization=0.0)
    busy = sum(usage.utilization or 0.0 for usage in usages.values())
    shares = shares_in_force(groups, {key for key, usage in usages.items() if usage.active})
    return {
        key: msgspec.structs.replace(
            corrected(group, usages.get(key, idle), busy), in_force=shares[key]
        )
        for key, group in groups.items()
    }


def corrected(group: GroupShare, usage: GroupUsage, busy: float = 1.0) -> GroupShare:
    """The group with `kappa` for the next tick, after a tick with the share in force.

    Utilization is averaged over a window that grows with the longest kernel. It is taken relative
    to the share that was in force, so that a change of the share does not count as a deviation.
    `busy` is the part of the GPU's time that all groups used.
    """
    share = group.in_force
    if not 0 < share < 1 or usage.utilization is None:
        # Its launches are not delayed, or nothing is known.
        return msgspec.structs.replace(group, account=None, most_debt=MOST_DEBT)
    group = without_overestimates(group, usage, usage.utilization, busy)
    if not usage.backlogged and usage.utilization <= 0:
        return msgspec.structs.replace(group, kappa=group.kappa**DECAY)
    window = _KERNELS_IN_WINDOW * group.kappa * usage.longest_kernel / share
    weight = TICK / min(max(window, _SHORTEST_WINDOW), _LONGEST_WINDOW)
    excess = (
        group.excess
        + (deviation(usage.utilization, share, usage.backlogged) - group.excess) * weight
    )
    kappa = group.kappa
    if abs(excess) > TOLERANCE and (excess > 0 or usage.backlogged):
        step = min(max(1 + 2 * excess * weight, _LEAST_STEP), _MOST_STEP)
        kappa = min(max(kappa * step, LEAST_KAPPA), MOST_KAPPA)
    return msgspec.structs.replace(group, kappa=kappa, excess=excess)


def without_overestimates(
    group: GroupShare, usage: GroupUsage, utilization: float, busy: float
) -> GroupShare:
    """The group with kappa and debt corrected, if its estimates turn out to be far too large.

    What it owes is written as the most that it may owe, until the next tick: it must not launch
    before that, or the launch would cost no more.
    """
    share, tat, now = group.in_force, usage.paid_until, usage.at
    account = group.account
    if now is None:
        account = None
    elif account is None or account.share != share:
        account = overestimates.begun(share, tat, now)
    elif not usage.backlogged or tat <= now:
        account = overestimates.begun(share, tat, now, slack=TICK)
    else:
        found = overestimates.after_tick(account, utilization, busy, tat, now, TICK)
        debt = MOST_DEBT if found.debt is None else max(found.debt, TICK + RECENT)
        kappa = max(group.kappa * found.factor, LEAST_KAPPA)
        excess = group.excess if found.factor == 1 else 0.0
        return msgspec.structs.replace(
            group, account=found.account, kappa=kappa, excess=excess, most_debt=debt
        )
    return msgspec.structs.replace(group, account=account, most_debt=MOST_DEBT)


def deviation(utilization: float, share: float, backlogged: bool) -> float:
    """How far a group was from its share in a tick, relative to the share.

    Two conditions keep kappa from running away while something else holds the group back
    (anti-windup). Use above the share counts whether or not launches wait in the gate: with
    estimates that are too small the driver's queue is what blocks. Use below the share counts only
    while launches wait in the gate: else the group asks for no more.
    """
    relative = utilization / share - 1
    return relative if relative > 0 or backlogged else 0.0


def shares_in_force(
    groups: Mapping[K, GroupShare], active: frozenset[K] | set[K]
) -> dict[K, float]:
    """The share of each group of one GPU, while just those of `active` launch.

    What the active groups' shares leave of the GPU is divided among those of them that are elastic,
    in proportion to their shares. An idle group has its own share, so that it can start at once.
    """
    used = sum(groups[key].share for key in groups if key in active)
    elastic = sum(groups[key].share for key in groups if key in active and groups[key].elastic)
    left = max(0.0, 1 - used)
    return {
        key: _expressible(
            group.share + left * group.share / elastic
            if group.elastic and key in active
            else group.share
        )
        for key, group in groups.items()
    }


def _expressible(share: float) -> float:
    """A share as limits can say it."""
    return min(max(round(share / LEAST_SHARE), 1) * LEAST_SHARE, 1.0)
