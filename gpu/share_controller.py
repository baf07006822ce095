"""Applies `shares` to the groups of this node: reads what they did, and writes their limits."""

import logging
import time
from collections.abc import Mapping

from gpu import shares
from gpu.group_limits import GroupError
from gpu.groups import Compute, GroupFiles, Groups
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
        self._accounts: dict[tuple[str, str], TimeAccount | None] = {}  # by group and GPU
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
                if not files.allocation:  # the tenant keeps its files from being read
                    continue
                same = allocations.get(group) == files.allocation  # else its files are new
                self._allocations[group] = files.allocation
                known = accounts if same else {}
                if changed := self._corrected(group, files, known, used, measured):
                    self._groups.set_compute(group, changed)
            except (GroupError, OSError) as error:
                _log.debug("%s: its compute shares stay as they are: %s", group, error)

    def _corrected(
        self,
        group: str,
        files: GroupFiles,
        accounts: Mapping[tuple[str, str], TimeAccount | None],
        used: Mapping[tuple[str, str], UsedTime],
        measured: Mapping[str, float],
    ) -> dict[str, Compute]:
        """What is to be written of a group, by GPU."""
        uses = self._uses(group, files)
        alive = len({each.host_pid for each in files.processes.values() if each.alive})
        unseen = alive * ROUNDING * shares.TICK  # of each the driver may tell nothing
        now = time.monotonic_ns()
        changed: dict[str, Compute] = {}
        for index, (limit, entry) in enumerate(zip(files.limits, files.in_force, strict=True)):
            key = group, limit.uuid
            before = GroupShare(
                share=entry.share,
                kappa=entry.kappa,
                settled=entry.settled_ns / 1e9,
                account=accounts.get(key),
            )
            told = None
            if (variance := measured.get(limit.uuid)) is not None:
                of = used.get(key, UsedTime())
                told = UsedTime(of.seconds, max(of.rounding, unseen), variance)
            usage = (
                shares.observe(told, uses[index], now)
                if uses is not None
                else GroupUsage(used=told, active=bool(told and told.seconds), at=now / 1e9)
            )
            after = shares.corrected(before, usage)
            self._accounts[key] = after.account
            moved = abs(after.kappa - before.kappa), abs(after.settled - before.settled)
            if max(moved) > _SAME:
                changed[limit.uuid] = Compute(after.kappa, after.settled)
        return changed

    def _uses(self, group: str, files: GroupFiles) -> tuple[RegionUse, ...] | None:
        try:
            with self._groups.region(group, files) as region:
                return region.uses()
        except RegionInvalid as error:
            _log.debug("%s: not known whether its launches wait: %s", group, error)
            return None
