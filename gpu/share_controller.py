"""Applies `shares` to the groups of this node: reads what they did, and writes their limits."""

import logging
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress

from gpu import shares
from gpu.group_limits import GroupError
from gpu.groups import Compute, GroupFiles, Groups
from gpu.region import RegionInvalid, RegionUse
from gpu.sampled_time import ROUNDING, UsedTime
from gpu.shares import GroupShare, GroupUsage
from gpu.time_account import TimeAccount

_log = logging.getLogger(__name__)

_SAME = 1e-6  # of kappa, a share, or seconds: less than limits can express


class ShareController:
    """Corrects the compute shares of all groups, each time that it is called: every `shares.TICK`.

    Kappa, what is settled and the share in force are in the groups' files, so that an agent that
    starts again goes on from there. One thread at a time may call it.
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
        states: dict[str, dict[str, GroupShare]] = defaultdict(dict)  # by GPU, then group
        usages: dict[str, dict[str, GroupUsage]] = defaultdict(dict)
        allocations: dict[str, bytes] = {}
        for group in self._groups.names():
            try:
                files = self._groups.read(group)
            except (GroupError, OSError) as error:
                _log.debug("%s: its compute shares stay as they are: %s", group, error)
                continue
            if not files.allocation:  # the tenant keeps its files from being read
                continue
            uses = self._uses(group, files)
            alive = len({each.host_pid for each in files.processes.values() if each.alive})
            unseen = alive * ROUNDING * shares.TICK  # of each the driver may tell nothing
            now = time.monotonic_ns()
            same = self._allocations.get(group) == files.allocation  # else its files are new
            allocations[group] = files.allocation
            for index, limit in enumerate(files.limits):
                key, entry = (group, limit.uuid), files.in_force[index]
                state = GroupShare(
                    share=min(max(limit.compute_share, shares.LEAST_SHARE), 1.0),
                    elastic=limit.elastic,
                    in_force=entry.share,
                    kappa=entry.kappa,
                    settled=entry.settled_ns / 1e9,
                    account=self._accounts.get(key) if same else None,
                )
                told = None
                if (variance := measured.get(limit.uuid)) is not None:
                    of = used.get(key, UsedTime())
                    told = UsedTime(of.seconds, max(of.rounding, unseen), variance)
                states[limit.uuid][group] = state
                usages[limit.uuid][group] = (
                    shares.observe(told, uses[index], now)
                    if uses is not None
                    else GroupUsage(used=told, active=bool(told and told.seconds), at=now / 1e9)
                )
        self._allocations = allocations
        self._write(states, usages)

    def settle(self) -> None:
        """Give elastic groups their own shares again: without an agent they would keep others'."""
        for group in self._groups.names():
            with suppress(GroupError, OSError):
                if any(limit.elastic for limit in self._groups.read(group).limits):
                    self._groups.settle(group)

    def _uses(self, group: str, files: GroupFiles) -> tuple[RegionUse, ...] | None:
        try:
            with self._groups.region(group, files) as region:
                return region.uses()
        except RegionInvalid as error:
            _log.debug("%s: not known whether its launches wait: %s", group, error)
            return None

    def _write(
        self,
        states: Mapping[str, Mapping[str, GroupShare]],
        usages: Mapping[str, Mapping[str, GroupUsage]],
    ) -> None:
        self._accounts = {}
        changed: dict[str, dict[str, Compute]] = defaultdict(dict)  # by group, then GPU
        for uuid, before in states.items():
            for group, state in shares.tick(before, usages[uuid]).items():
                self._accounts[group, uuid] = state.account
                if _differ(state, before[group]):
                    changed[group][uuid] = Compute(state.in_force, state.kappa, state.settled)
        for group, computes in changed.items():
            try:
                self._groups.set_compute(group, computes)
            except (GroupError, OSError) as error:
                _log.debug("%s: its compute shares stay as they are: %s", group, error)


def _differ(one: GroupShare, other: GroupShare) -> bool:
    return any(
        abs(x - y) > _SAME
        for x, y in (
            (one.in_force, other.in_force),
            (one.kappa, other.kappa),
            (one.settled, other.settled),
        )
    )
