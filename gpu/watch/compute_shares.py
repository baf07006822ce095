"""Corrects the compute shares of groups.

The gate (gpu/shim/gate.c) makes a group pay estimated GPU time before each launch. Every `TICK`
seconds, the agent compares the payments with the GPU time that the driver reports. The agent
settles the difference by a payment or a refund. The factor `kappa` corrects later estimates.

Times are in seconds unless a name ends in ns. Shares are fractions of a GPU.
"""

import logging
import math
import time
from collections.abc import Mapping

import msgspec

from gpu.limits.groups import GroupFiles, Groups
from gpu.limits.limits_file import GroupError
from gpu.limits.region import RegionInvalid, RegionUse
from gpu.watch import time_account
from gpu.watch.sampled_time import ROUNDING, UsedTime
from gpu.watch.time_account import LaunchTimes, TimeAccount

TICK = 0.5  # seconds from one correction to the next

_LONGEST_KERNEL = 60.0  # seconds; the gate's largest estimate
_LONGEST_COUNTS = 30.0  # seconds; an older longest kernel does not count
_LAG = 2.0  # seconds by which the gate lets a group catch up (LAG_NS in gpu/shim/gate.c)
_NS = 10**9
_SAME = 1e-6  # smaller changes of `kappa` or `settled` are not written

_log = logging.getLogger(__name__)


class GroupUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The use of a GPU by one group in a tick."""

    used: UsedTime | None  # `None`: the driver did not report the GPU
    longest_kernel: float = 0.0  # seconds of a recent kernel or graph
    ahead: float = math.inf  # seconds until the gate lets the group launch; negative: it lags
    times: LaunchTimes | None = None  # `None`: the region is unreadable
    at: float | None = None  # the end of the tick by CLOCK_MONOTONIC; `None`: not observed


class GroupShare(msgspec.Struct, frozen=True, kw_only=True):
    """The share of a GPU that one group has, with the corrections."""

    share: float
    kappa: float = 1.0
    settled: float = 0.0  # seconds of GPU time to pay in addition to launches; negative: a refund
    account: TimeAccount | None = None


def observe(used: UsedTime | None, use: RegionUse, now_ns: int) -> GroupUsage:
    """The tenant writes `use`. A false number changes only the share of this tenant."""
    counts = now_ns - _LONGEST_COUNTS * _NS <= use.longest_at <= now_ns
    longest = use.longest_ns / _NS if counts else 0.0
    return GroupUsage(
        used=used,
        longest_kernel=min(longest, _LONGEST_KERNEL),
        ahead=(use.tat - now_ns) / _NS,
        times=LaunchTimes(
            launched=use.launched_ns / _NS,
            finished=use.finished_ns / _NS,
            paid=use.paid_ns / _NS,
            paid_finished=use.paid_finished_ns / _NS,
        ),
        at=now_ns / _NS,
    )


def corrected(group: GroupShare, usage: GroupUsage) -> GroupShare:
    """The group with the corrections for the next tick.

    A group with a damaged region counts as having paid nothing in this tick. A group that never
    paid for a launch is not corrected, because no gate delays its launches.
    """
    account, settled, kappa = group.account, group.settled, group.kappa
    times = usage.times or (account.points[-1].times if account is not None else None)
    if group.share >= 1 or usage.used is None or usage.at is None or times is None:
        account = None  # no gate delays its launches, or the observations are incomplete
    elif account is None or times.launched == 0:
        account = time_account.begun(times, settled, usage.at)
    else:
        account, settled, kappa = time_account.after_tick(
            account,
            usage.used,
            times,
            usage.at,
            usable=group.share * max(0.0, usage.ahead + _LAG),
            settled=settled,
            kappa=kappa,
            longest=usage.longest_kernel,
        )
    return GroupShare(share=group.share, kappa=kappa, settled=settled, account=account)


class ShareController:
    """Corrects the compute shares of all groups. One thread at a time may call it."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._accounts: dict[str, TimeAccount | None] = {}  # by group
        self._allocations: dict[str, bytes] = {}  # by group

    def __call__(
        self, used: Mapping[tuple[str, str], UsedTime], measured: Mapping[str, float]
    ) -> None:
        """Correct the shares after a tick. `used` is by group and GPU.

        `measured` has the variance of each reported GPU's sampled time, in seconds². Groups on
        other GPUs, such as GPUs in MIG mode, are not corrected.
        """
        accounts, allocations = self._accounts, self._allocations
        self._accounts, self._allocations = {}, {}
        for group in self._groups.names():
            try:
                files = self._groups.read(group)
                same = allocations.get(group) == files.allocation  # otherwise the files are new
                self._allocations[group] = files.allocation
                account = accounts.get(group) if same else None
                key = group, files.limit.uuid
                self._correct(group, files, account, used.get(key, UsedTime()), measured)
            except (GroupError, OSError) as error:
                _log.debug("%s: cannot correct its compute share: %s", group, error)

    def _correct(
        self,
        group: str,
        files: GroupFiles,
        account: TimeAccount | None,
        used: UsedTime,
        measured: Mapping[str, float],
    ) -> None:
        limit = files.limit
        before = GroupShare(
            share=limit.compute_share,
            kappa=limit.kappa,
            settled=limit.settled_ns / _NS,
            account=account,
        )
        reported = None
        if (variance := measured.get(files.limit.uuid)) is not None:
            alive = len({known.host_pid for known in files.processes.values() if known.alive})
            unseen = alive * ROUNDING * TICK  # the driver may round the use of a process to 0
            reported = UsedTime(used.seconds, max(used.rounding, unseen), variance)
        try:
            with self._groups.region(group, files) as region:
                usage = observe(reported, region.use(), time.monotonic_ns())
        except RegionInvalid as error:
            _log.debug("%s: cannot read its launches: %s", group, error)
            usage = GroupUsage(used=reported, at=time.monotonic())
        after = corrected(before, usage)
        self._accounts[group] = after.account
        moved = abs(after.kappa - before.kappa), abs(after.settled - before.settled)
        if max(moved) > _SAME:
            self._groups.set_compute(group, after.kappa, after.settled)
