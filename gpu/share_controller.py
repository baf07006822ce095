"""Applies `shares` to the groups of this node: reads what they did, and writes their limits."""

import logging
import time
from collections.abc import Mapping

from gpu import shares
from gpu.group_limits import GroupError
from gpu.groups import GroupFiles, Groups
from gpu.region import RegionInvalid, RegionUse
from gpu.sampled_time import ROUNDING, UsedTime
from gpu.shares import GroupShare, GroupUsage
from gpu.time_account import TimeAccount

_log = logging.getLogger(__name__)

_SAME = 1e-6  # of kappa, or seconds: less than limits can express


class ShareController:
    """Corrects the compute shares of all groups, each time that it is called: every `shares.TICK`.

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
            unseen = alive * ROUNDING * shares.TICK  # of each the driver may tell nothing
            told = UsedTime(used.seconds, max(used.rounding, unseen), variance)
        use, now = self._use(group, files), time.monotonic_ns()
        usage = (
            shares.observe(told, use, now)
            if use is not None
            else GroupUsage(used=told, active=bool(told and told.seconds), at=now / 1e9)
        )
        after = shares.corrected(before, usage)
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
