"""Row G9 of bench/gpu.sh: groups share a GPU's time, and their processes launch without a pause."""

import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from bench.gpu.place import NVML, BenchGroup, Place, line
from gpu.driver.nvml import Nvml, NvmlError
from gpu.watch import compute_shares
from gpu.watch.compute_shares import GroupShare, GroupUsage
from gpu.watch.sampled_time import SampledTime, UsedTime

MS = 1_000_000  # nanoseconds
KERNELS = {"work_20us": MS // 50, "work_1ms": MS, "work_100ms": 100 * MS}
SETTLING, WINDOW = 3.0, 10.0  # seconds
WITHIN = 0.05  # of the GPU's time; twice that for kernels above 50 ms
LOSS = 0.08  # of the throughput of one process without shares


class Sharing:
    """Tenants of one GPU, and the controller of their shares."""

    def __init__(self, place: Place, name: str, tenants: Mapping[str, tuple[float, int]]) -> None:
        self._place = place
        self.groups = {of: place.group(f"{name}-{of}") for of in tenants}
        self.states = {of: GroupShare(share=share) for of, (share, _) in tenants.items()}
        self._counts = {of: count for of, (_, count) in tenants.items()}
        self._running: dict[str, list[subprocess.Popen[str]]] = {}
        self._driver = _nvml(place)
        self._sampled = SampledTime()
        self._busy: dict[int, int] = {}
        self.is_corrected = place.real is None

    def begin(self, kernel: str, ns: int, ns_of_round: str) -> None:
        """Start every process."""
        self._apply(self.states)
        for of, group in self.groups.items():
            count = self._counts[of]
            self._running[of] = [_working(group, kernel, ns, ns_of_round) for _ in range(count)]

    def done(self) -> dict[str, int]:
        """The number of finished kernels of each tenant."""
        return {of: sum(map(_count, running)) for of, running in self._running.items()}

    def end(self) -> None:
        """Stop every process."""
        for running in self._running.values():
            for process in running:
                process.kill()
                process.communicate()
        if self._driver is not None:
            self._driver.close()

    def run(self, seconds: float) -> None:
        """Correct shares at each tick, as the agent does."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(compute_shares.TICK)
            used, now = self._used(), time.monotonic_ns()
            usages: dict[str, GroupUsage] = {}
            for of in self.states:
                use = self.groups[of].group.use()
                pids = [process.pid for process in self._running[of]]
                seen = UsedTime()
                for pid in pids:
                    seen += (used or {}).get(pid, UsedTime())
                seen += UsedTime(variance=self._sampled.variance)
                usages[of] = compute_shares.observe(seen if used is not None else None, use, now)
            self._apply(
                {
                    of: compute_shares.corrected(self.states[of], usage)
                    for of, usage in usages.items()
                }
            )

    def _apply(self, states: dict[str, GroupShare]) -> None:
        self.states = states
        for of, state in states.items():
            self.groups[of].set_share(state.share, state.kappa, state.settled)

    def _used(self) -> dict[int, UsedTime] | None:
        """The GPU time of each process since the last tick; `None` if the driver did not report
        it."""
        if self._place.node is not None:
            accounts, busy = self._place.node.read(), self._busy
            self._busy = {process.pid: process.gpus[0].busy_ns for process in accounts.processes}
            return {pid: UsedTime((ns - busy.get(pid, 0)) / 1e9) for pid, ns in self._busy.items()}
        if self._driver is None:
            return None
        samples = self._driver.utilization(self._place.gpu.uuid, self._sampled.since_us)
        ours = {process.pid for running in self._running.values() for process in running}
        self.is_corrected |= any(sample.pid in ours for sample in samples)
        return self._sampled.add(samples, time.monotonic())


def measure(place: Place, *, short: bool) -> None:
    """Print a line for each division of the GPU's time and each length of kernels."""
    probe = place.group("g9-alone")
    ns_of_round = probe.say("calibrate").strip()
    divisions: list[tuple[str, dict[str, tuple[float, int]]]] = [
        ("30/70", {"a": (0.3, 1), "b": (0.7, 1)})
    ]
    if not short:
        divisions += [
            ("10/90", {"a": (0.1, 1), "b": (0.9, 1)}),
            ("50/50, four processes against one", {"a": (0.5, 4), "b": (0.5, 1)}),
        ]
    kernels = {"work_5ms": 5 * MS} if short else KERNELS
    window = 2.0 if short else WINDOW
    for kernel, ns in kernels.items():
        work = (kernel, ns, ns_of_round)
        plain = place.group(f"g9-{kernel}-plain")
        counts = {1} | {sum(count for _, count in of.values()) for _, of in divisions}
        rates = {count: _rate(plain, work, count, window) for count in sorted(counts)}
        for number, (what, tenants) in enumerate(divisions):
            sharing = Sharing(place, f"g9-{kernel}-{number}", tenants)
            try:
                sharing.begin(kernel, ns, ns_of_round)
                sharing.run(1.0 if short else SETTLING)
                before, began = sharing.done(), time.monotonic()
                sharing.run(window)
                after, seconds = sharing.done(), time.monotonic() - began
            finally:
                sharing.end()
            done = {of: after[of] - before[of] for of in tenants}
            rate = sum(done.values()) / seconds
            beside = rates[sum(count for _, count in tenants.values())]
            _tell(what, kernel, ns, tenants, done, (rate / rates[1], rate / beside), sharing)


def _tell(
    what: str,
    kernel: str,
    ns: int,
    tenants: Mapping[str, tuple[float, int]],
    done: Mapping[str, int],
    of_plain: tuple[float, float],
    sharing: Sharing,
) -> None:
    total = max(1, sum(done.values()))
    found = {of: count / total for of, count in done.items()}
    within = WITHIN if ns <= 50 * MS else 2 * WITHIN
    well = all(abs(found[of] - share) <= within for of, (share, _) in tenants.items())
    value = "/".join(f"{100 * part:.1f}" for part in found.values())
    if not sharing.is_corrected:
        value += " (not corrected: NVML does not tell of these processes)"
    target = f"±{100 * within:.0f} points, {1 - LOSS:.0%} of the throughput"
    alone, as_many = of_plain
    value += f", {alone:.0%} of one process without shares, {as_many:.0%} of as many processes"
    line(
        "G9",
        f"{what} of {kernel.removeprefix('work_')}",
        value,
        target,
        well and alone >= 1 - LOSS,
    )


def _rate(group: BenchGroup, work: tuple[str, int, str], count: int, seconds: float) -> float:
    """Kernels per second of `count` processes without the shim."""
    running = [_working(group, *work, shim=False) for _ in range(count)]
    time.sleep(min(1.0, seconds))
    before, began = sum(map(_count, running)), time.monotonic()
    time.sleep(seconds)
    rate = (sum(map(_count, running)) - before) / (time.monotonic() - began)
    for process in running:
        process.kill()
        process.communicate()
    return max(rate, 1e-9)


def _working(
    group: BenchGroup, kernel: str, ns: int, ns_of_round: str, *, shim: bool = True
) -> "subprocess.Popen[str]":
    process = group.start("work", kernel, str(ns), ns_of_round, shim=shim)
    assert process.stdout is not None
    if process.stdout.readline() != "begins\n":
        _, error = process.communicate()
        raise RuntimeError(f"{kernel} does not start: {error.strip()}")
    return process


def _count(process: "subprocess.Popen[str]") -> int:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return int(process.stdout.readline())


def _nvml(place: Place) -> Nvml | None:
    if place.real is None:
        return None
    path = place.real.with_name(NVML)
    try:
        return Nvml(Path(path).resolve())
    except (NvmlError, ImportError):
        return None
