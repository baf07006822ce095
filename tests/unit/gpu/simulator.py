"""A GPU that several processes share, with the gate of each group and the agent's controller.

The GPU serves processes in turns, a time slice each; a process without work loses its turn, and the
driver queues `QUEUE` launches of each process. The gate is that of gpu/shim/gate.c in arithmetic,
with estimates that are wrong by a factor; each process has one stream. Time passes in steps of
`STEP`, at whose beginnings the gates admit what they would have admitted until then. Times are
seconds.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gpu.watch.compute_shares import TICK, GroupShare, GroupUsage, corrected
from gpu.watch.sampled_time import UsedTime
from gpu.watch.time_account import LaunchTimes

SLICE = 0.002  # what a process gets of the GPU in a turn
QUEUE = 1024  # launches of a process that the driver holds
BURST = 0.020
LAG = 2.0  # by which a group whose work is not finished may catch up
HELD = 0.2  # for which a wait tells that there is work
UNFINISHED = 0.050  # as estimated: a process with more launches nothing
MOST_DEBT = 60.0
STEP = 0.0005
_TIMES = LaunchTimes.__struct_fields__

Controller = Callable[[Mapping[str, GroupShare], Mapping[str, GroupUsage]], dict[str, GroupShare]]


@dataclass
class Process:
    """Launches one kernel again and again while `wants` is true of the time."""

    kernel: float  # seconds of GPU time
    wrong: float = 1.0  # what the gate estimates, relative to `kernel`
    wants: Callable[[float], bool] = lambda _: True
    work: float = 0.0  # seconds of GPU time in the driver's queue
    launched: int = 0
    finished: int = 0
    # Launches that are not known to be finished: how many, and what was paid for each.
    unfinished: deque[tuple[int, float]] = field(default_factory=deque)
    blocked: bool = False  # its stream had too much unfinished work at the last look

    @property
    def estimate(self) -> float:
        """The time that the gate assumes for one launch."""
        return self.kernel * self.wrong

    @property
    def queued(self) -> int:
        """Launches that are not finished."""
        return math.ceil(self.work / self.kernel - 1e-9)

    def room(self, share: float) -> int:
        """How many more launches the gate or the driver takes."""
        if share >= 1:
            return QUEUE - self.queued
        return min(QUEUE, int(UNFINISHED / self.estimate) + 1) - self.queued

    def launch(self, count: int, paid: float) -> None:
        """Give launches to the driver, for which this was paid together."""
        self.work += count * self.kernel
        self.launched += count
        self.unfinished.append((count, paid / count))

    def finish(self) -> tuple[int, float]:
        """How many launches are finished that were not before, and what was paid for them."""
        done = left = self.launched - self.queued - self.finished
        self.finished += done
        paid = 0.0
        while left > 0:
            count, each = self.unfinished.popleft()
            taken = min(count, left)
            if taken < count:
                self.unfinished.appendleft((count - taken, each))
            left -= taken
            paid += taken * each
        return done, paid


@dataclass
class Group:
    """The processes of one group: they share `tat`."""

    processes: Sequence[Process]
    share: float
    tat: float = 0.0
    settled: float = 0.0  # as far as `tat` has it
    times: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_TIMES, 0.0))
    used: float = 0.0  # seconds of GPU time, in all
    used_in_tick: float = 0.0
    waited: float = -1.0  # when a launch last waited in the gate
    launched: float = -1.0  # when it last launched
    turn: int = 0

    def admit(self, now: float, state: GroupShare) -> None:
        """Let through what the gate lets through now, of each process in turn."""
        members = len(self.processes)
        self.turn += 1
        for process in self.processes:
            done, paid = process.finish()
            self.times["finished"] += done * process.estimate
            self.times["paid_finished"] += paid
        asked = True
        while asked:
            asked = False
            for index in range(members):
                process = self.processes[(self.turn + index) % members]
                admitted = self._of_process(now, process, state) if process.wants(now) else 0
                asked = asked or (members > 1 and admitted > 0)

    def _of_process(self, now: float, process: Process, state: GroupShare) -> int:
        room = process.room(state.share)
        if room <= 0:
            process.blocked = True
            self.waited = now
            return 0
        most = room if len(self.processes) == 1 else max(1, room // 8)
        held = now - self.waited <= HELD
        busy = process.blocked or process.queued > 0 or held
        admitted, paid = self._admitted(now, most, process.estimate, state, busy=busy)
        if admitted:
            process.blocked = False
            process.launch(admitted, paid)
            self.launched = now
            self.times["launched"] += admitted * process.estimate
            self.times["paid"] += paid
        return admitted

    def _admitted(
        self, now: float, most: int, estimate: float, state: GroupShare, *, busy: bool
    ) -> tuple[int, float]:
        """How many launches may go, and what they pay together."""
        share = state.share
        if share >= 1:
            return most, 0.0
        self.tat = min(self.tat + (state.settled - self.settled) / share, now + MOST_DEBT)
        self.settled = state.settled
        base = max(self.tat, now - (LAG if busy else BURST))
        if base > now:
            self.waited = now
            return 0, 0.0
        cost = state.kappa * estimate / share
        admitted = min(most, int((now - base) / cost) + 1)
        self.tat = min(base + admitted * cost, now + MOST_DEBT)
        if admitted < most:
            self.waited = now
        return admitted, (self.tat - base) * share


def each_corrected(
    states: Mapping[str, GroupShare], usages: Mapping[str, GroupUsage]
) -> dict[str, GroupShare]:
    """The groups after a tick."""
    return {name: corrected(state, usages[name]) for name, state in states.items()}


@dataclass
class Simulation:
    """Groups on one GPU, with a controller that sees their use `late` ticks later."""

    groups: Mapping[str, Group]
    controller: Controller = each_corrected
    late: int = 0
    now: float = 0.0
    states: dict[str, GroupShare] = field(default_factory=dict)
    idle: float = 0.0  # seconds in which the GPU had nothing to do

    def __post_init__(self) -> None:
        states = {name: GroupShare(share=group.share) for name, group in self.groups.items()}
        idle = {name: GroupUsage(used=UsedTime(), times=LaunchTimes(), at=0.0) for name in states}
        self.states = self.controller(states, idle)
        self._order = [
            (group, process) for group in self.groups.values() for process in group.processes
        ]
        self._current, self._left = 0, SLICE
        self._next_tick = TICK
        self._used: list[dict[str, float]] = []

    def run(self, seconds: float) -> dict[str, float]:
        """Let time pass; the fraction of the GPU's time that each group used of it."""
        before = {name: group.used for name, group in self.groups.items()}
        end = self.now + seconds
        while self.now < end - STEP / 2:
            for name, group in self.groups.items():
                state = self.states[name]
                group.admit(self.now, state)
            self._serve()
            self.now += STEP
            if self.now >= self._next_tick - STEP / 2:
                self._tick()
        return {name: (group.used - before[name]) / seconds for name, group in self.groups.items()}

    def _serve(self) -> None:
        """Let the GPU work for a step, in slices."""
        left = STEP
        without_work = 0
        while left > 1e-12 and without_work < len(self._order):
            group, process = self._order[self._current]
            spent = min(left, self._left, process.work)
            if spent > 0:
                process.work = max(0.0, process.work - spent)
                group.used += spent
                group.used_in_tick += spent
                left -= spent
                self._left -= spent
                without_work = 0
            if process.work < 1e-12:
                process.work = 0.0
                without_work += 1
            if self._left <= 1e-12 or process.work <= 0:
                self._current = (self._current + 1) % len(self._order)
                self._left = SLICE
        self.idle += left

    def _tick(self) -> None:
        self._next_tick += TICK
        self._used.append({name: group.used_in_tick for name, group in self.groups.items()})
        for group in self.groups.values():
            group.used_in_tick = 0.0
        if len(self._used) <= self.late:
            return
        used = self._used.pop(0)
        usages = {
            name: GroupUsage(
                used=UsedTime(used[name]),
                longest_kernel=max(process.estimate for process in group.processes),
                ahead=group.tat - self.now,
                times=LaunchTimes(**group.times),
                at=self.now,
            )
            for name, group in self.groups.items()
        }
        self.states = self.controller(self.states, usages)


def alike(share: float, kernel: float, wrong: float = 1.0, processes: int = 1) -> Group:
    """A group of processes with the same kernel."""
    return Group([Process(kernel, wrong) for _ in range(processes)], share)


def parts_of_time(
    *groups: Group, settle: float = 3, over: float = 10, late: int = 0
) -> list[float]:
    """The fraction of the GPU's time that each group had, measured after `settle` seconds."""
    simulation = Simulation({str(index): group for index, group in enumerate(groups)}, late=late)
    simulation.run(settle)
    return list(simulation.run(over).values())


def worst_error(*groups: Group, settle: float = 3, over: float = 10, late: int = 0) -> float:
    """The largest difference between what a group had and its share, in hundredths of the GPU."""
    had = parts_of_time(*groups, settle=settle, over=over, late=late)
    return max(abs(part - group.share) * 100 for part, group in zip(had, groups, strict=True))
