"""A GPU that several processes share, with the gate of each group and the agent's controller.

The GPU serves processes in turns, a time slice each; a process without work loses its turn, and the
driver queues `QUEUE` launches of each process. The gate is that of gpu/shim/gate.c in arithmetic,
with estimates that are wrong by a factor. Time passes in steps of `STEP`, at whose beginnings the
gates admit what they would have admitted until then. Times are seconds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gpu.shares import RECENT, TICK, GroupShare, GroupUsage, tick

SLICE = 0.002  # what a process gets of the GPU in a turn
QUEUE = 1024  # launches of a process that the driver holds
BURST = 0.020
STEP = 0.0005

Controller = Callable[[Mapping[str, GroupShare], Mapping[str, GroupUsage]], dict[str, GroupShare]]


@dataclass
class Process:
    """Launches one kernel again and again while `wants` is true of the time."""

    kernel: float  # seconds of GPU time
    wrong: float = 1.0  # what the gate estimates, relative to `kernel`
    wants: Callable[[float], bool] = lambda _: True
    work: float = 0.0  # seconds of GPU time in the driver's queue

    @property
    def room(self) -> int:
        """How many more launches the driver takes."""
        return QUEUE - round(self.work / self.kernel + 0.5)


@dataclass
class Group:
    """The processes of one group: they share `tat`."""

    processes: Sequence[Process]
    share: float
    elastic: bool = False
    tat: float = 0.0
    used: float = 0.0  # seconds of GPU time, in all
    used_in_tick: float = 0.0
    waited: float = -1.0  # when a launch last waited in the gate
    launched: float = -1.0  # when it last launched
    turn: int = 0

    def admit(self, now: float, state: GroupShare) -> None:
        """Let through what the gate lets through now, of each process in turn."""
        members = len(self.processes)
        asked = True
        self.turn += 1
        while asked:
            asked = False
            for index in range(members):
                process = self.processes[(self.turn + index) % members]
                room = process.room
                if room <= 0 or not process.wants(now):
                    continue
                most = room if members == 1 else max(1, room // 8)
                cost = state.kappa * process.kernel * process.wrong
                admitted = self._admitted(now, most, cost, state)
                process.work += admitted * process.kernel
                if admitted:
                    self.launched = now
                asked = asked or (members > 1 and admitted > 0)

    def _admitted(self, now: float, most: int, cost: float, state: GroupShare) -> int:
        share = state.in_force
        if share >= 1:
            return most
        self.tat = min(self.tat, now + state.most_debt)
        base = max(self.tat, now - BURST)
        admitted = 0
        if base <= now:
            admitted = min(most, int((now - base) / (cost / share)) + 1)
            self.tat = min(base + admitted * cost / share, now + state.most_debt)
        if admitted < most:
            self.waited = now
        return admitted


@dataclass
class Simulation:
    """Groups on one GPU, with a controller that is told of their use `late` ticks later."""

    groups: Mapping[str, Group]
    controller: Controller = tick
    late: int = 0
    now: float = 0.0
    states: dict[str, GroupShare] = field(default_factory=dict)
    idle: float = 0.0  # seconds in which the GPU had nothing to do

    def __post_init__(self) -> None:
        states = {
            name: GroupShare(share=group.share, elastic=group.elastic)
            for name, group in self.groups.items()
        }
        idle = {name: GroupUsage(utilization=0.0, at=0.0) for name in self.groups}
        self.states = self.controller(self.controller(states, {}), idle)
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
        self._used.append({name: group.used_in_tick / TICK for name, group in self.groups.items()})
        for group in self.groups.values():
            group.used_in_tick = 0.0
        if len(self._used) <= self.late:
            return
        used = self._used.pop(0)
        usages = {
            name: GroupUsage(
                utilization=min(1.0, used[name]),
                backlogged=self.now - group.waited <= RECENT,
                active=self.now - max(group.waited, group.launched) <= RECENT,
                longest_kernel=max(process.kernel * process.wrong for process in group.processes),
                paid_until=group.tat,
                at=self.now,
            )
            for name, group in self.groups.items()
        }
        self.states = self.controller(self.states, usages)
