"""Compute shares of a GPU: the agent's part, which corrects what the gates of the shims estimate.

The gate (shim/gate.c) delays the launches of a group of containers by what it estimates that they
cost in GPU time. Each `TICK` the agent compares the group's share with the GPU time that the driver
reports, settles the difference, and sets `kappa`, the factor of all estimates of the group
(`time_account`).

`corrected` is a pure function of what was seen in a tick; `ShareController` reads the regions, and
writes limits. Times are seconds unless a name says ns. Shares are fractions of a GPU.
"""

import logging
import time
from collections.abc import Mapping

import msgspec

from gpu.limits.groups import GroupFiles, Groups
from gpu.limits.limits_file import GroupError
from gpu.limits.region import RegionInvalid, RegionUse
from gpu.watch import time_account
from gpu.watch.sampled_time import ROUNDING, UsedTime
from gpu.watch.time_account import LaunchTimes, TimeAccount, after_tick

TICK = 0.5  # seconds from one correction to the next

_LONGEST_KERNEL = 60.0  # seconds; the gate estimates no more
_LONGEST_COUNTS = 30.0  # seconds for which the longest kernel counts
_NS = 10**9
_SAME = 1e-6  # of kappa, or seconds: less than limits can express

_log = logging.getLogger(__name__)


class GroupUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen of one group on one GPU during a tick."""

    used: UsedTime | None  # by all its processes; None: the driver did not tell of this GPU
    longest_kernel: float = 0.0  # seconds: its longest kernel or graph of the last time
    times: LaunchTimes | None = None  # what its launches took and paid; None: not known
    at: float | None = None  # the tick's end, seconds of CLOCK_MONOTONIC; None: it was not seen


class GroupShare(msgspec.Struct, frozen=True, kw_only=True):
    """The share of one group on one GPU, and how far its estimates were corrected."""

    share: float
    kappa: float = 1.0
    settled: float = 0.0  # seconds of GPU time that it owes beside what it paid; negative: less
    account: TimeAccount | None = None  # of what it paid for and used; None: not known


def observe(used: UsedTime | None, use: RegionUse, now_ns: int) -> GroupUsage:
    """What a group did until `now_ns` (CLOCK_MONOTONIC), by the driver and by its region.

    The tenant can write anything into the region: that changes what it gets itself. No kernel is
    longer than the gate could estimate.
    """

    counts = now_ns - _LONGEST_COUNTS * _NS <= use.longest_at <= now_ns
    longest = use.longest_ns / _NS if counts else 0.0
    return GroupUsage(
        used=used,
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
    return group


class ShareController:
    """Corrects the compute shares of all groups, each time that it is called: every `TICK`.

    Kappa and what is settled are in the groups' files, so that an agent that starts again goes on
    from there. One thread at a time may call it.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._accounts: dict[str, TimeAccount | None] = {}  # by group
        self._allocations: dict[str, bytes] = {}  # that the groups had then

    def __call__(
        self, used: Mapping[tuple[str, str], UsedTime], measured: Mapping[str, float]
    ) -> None:
        """Correct shares after a tick, in which groups used so much of GPUs (by group and UUID).

        The driver told of the GPUs of `measured`, each with the variance of what it told (seconds²,
        of any group); a group that is not in `used` used none of them.
        On others, as those in MIG mode, nothing is corrected: no use was seen there, which would
        look like estimates that are too large.

        A group whose files cannot be read, since it goes or spoiled them, keeps what it has; the
        others do not wait for it.
        """
        accounts, allocations = self._accounts, self._allocations
        self._accounts, self._allocations = {}, {}
        for group in self._groups.names():
            try:
                files = self._groups.read(group)
                same = allocations.get(group) == files.allocation  # else its files are new
                self._allocations[group] = files.allocation
                account = accounts.get(group) if same else None
                key = group, files.limit.uuid
                self._correct(group, files, account, used.get(key, UsedTime()), measured)
            except (GroupError, OSError) as error:
                _log.debug("%s: its compute shares stay as they are: %s", group, error)

    def _correct(
        self,
        group: str,
        files: GroupFiles,
        account: TimeAccount | None,
        used: UsedTime,
        measured: Mapping[str, float],
    ) -> None:
        entry = files.in_force
        before = GroupShare(
            share=entry.share,
            kappa=entry.kappa,
            settled=entry.settled_ns / 1e9,
            account=account,
        )
        told = None
        if (variance := measured.get(files.limit.uuid)) is not None:
            alive = len({each.host_pid for each in files.processes.values() if each.alive})
            unseen = alive * ROUNDING * TICK  # of each the driver may tell nothing
            told = UsedTime(used.seconds, max(used.rounding, unseen), variance)
        use, now = self._use(group, files), time.monotonic_ns()
        usage = observe(told, use, now) if use is not None else GroupUsage(used=told, at=now / 1e9)
        after = corrected(before, usage)
        self._accounts[group] = after.account
        moved = abs(after.kappa - before.kappa), abs(after.settled - before.settled)
        if max(moved) > _SAME:
            self._groups.set_compute(group, after.kappa, after.settled)

    def _use(self, group: str, files: GroupFiles) -> RegionUse | None:
        try:
            with self._groups.region(group, files) as region:
                return region.use()
        except RegionInvalid as error:
            _log.debug("%s: not known whether its launches wait: %s", group, error)
            return None
