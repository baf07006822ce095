"""Which adapters the kubelet may hand out: bad at once, good again only once it has lasted.

A port that flaps would otherwise offer and withdraw its HCA by turns. So a fault counts from
`NOTICE` seconds on, and its end from `SETTLE` seconds on, a time that doubles with every fault
of the last minutes.
"""

import re
from collections.abc import Collection, Iterable, Mapping

import msgspec

from host.adapters import Adapter, Port

NOTICE = 0.5  # seconds a fault must last
SETTLE = 2.0  # seconds that it must be over
LONGEST_SETTLE = 60.0
REMEMBERED = 600.0  # seconds that a fault makes the next one's end take longer

_RATE = re.compile(r"([0-9.]+) Gb/sec")


class _State:
    """What is known of one adapter."""

    def __init__(self, fault: str) -> None:
        self.reported = fault  # "" is healthy
        self.seen = fault
        self.since = 0.0  # when `seen` began
        self.faults: list[float] = []  # when it became unhealthy


class Condition(msgspec.Struct, frozen=True):
    """An adapter's health as it is told. `fault` is "" of a healthy one."""

    healthy: bool
    fault: str


class Health:
    """The health of every adapter that was ever seen. One thread at a time may use it."""

    def __init__(self) -> None:
        self._states: dict[str, _State] = {}
        self._best: dict[tuple[str, int], float] = {}  # Gb/s, by RDMA device and port
        self._news: dict[str, str] = {}

    def observe(self, adapters: Iterable[Adapter], listed: Collection[str], now: float) -> bool:
        """Take in what sysfs says at `now`, a monotonic clock's seconds; whether a report changes.

        `listed` are the ids of adapters that are offered or held, and so can be missing.
        """
        there = {adapter.id: adapter for adapter in adapters}
        self._news = {}
        for known in set(there) | set(listed) | set(self._states):
            adapter = there.get(known)
            fault = "it is gone from this node" if adapter is None else self._fault(adapter)
            state = self._states.get(known)
            if state is None:
                self._states[known] = _State(fault)  # what is first seen is believed at once
                self._news[known] = fault
            elif self._advance(state, fault, now):
                self._news[known] = state.reported
        for known in set(self._states) - set(there) - set(listed):
            del self._states[known]
        return bool(self._news)

    def news(self) -> Mapping[str, str]:
        """What the last `observe` changed: the faults by adapter, "" of those that are well."""
        return self._news

    def condition(self, adapter_id: str) -> Condition:
        """An adapter's health; what was never seen is gone."""
        state = self._states.get(adapter_id)
        fault = "it is gone from this node" if state is None else state.reported
        return Condition(healthy=fault == "", fault=fault)

    def pending(self) -> bool:
        """Whether a report will change by time alone, if nothing else does."""
        return any(state.seen != state.reported for state in self._states.values())

    def faults(self) -> Mapping[str, str]:
        """The unhealthy adapters and what is wrong with each."""
        return {known: state.reported for known, state in self._states.items() if state.reported}

    def _advance(self, state: _State, fault: str, now: float) -> bool:
        if bool(fault) != bool(state.seen):
            state.since = now
        state.seen = fault
        if bool(fault) == bool(state.reported):
            changed, state.reported = fault != state.reported, fault
            return changed
        state.faults = [at for at in state.faults if now - at < REMEMBERED]
        wait = NOTICE if fault else min(LONGEST_SETTLE, SETTLE * 2 ** max(0, len(state.faults) - 1))
        if now - state.since < wait:
            return False
        state.reported = fault
        if fault:
            state.faults.append(now)
        return True

    def _fault(self, adapter: Adapter) -> str:
        """What is wrong with an adapter, "" if nothing is."""
        if not adapter.rdma:
            # Either it never had an RDMA device, or that is in a pod: its port cannot be seen here.
            return ""
        faults = []
        for rdma in adapter.rdma:
            if rdma.uverbs is None:
                return f"{rdma.name} has no uverbs device: is the module ib_uverbs loaded?"
            for port in rdma.ports:
                fault = self._port_fault(rdma.name, port)
                if not fault:
                    return ""
                faults.append(fault)
        return "; ".join(faults) or f"{adapter.rdma[0].name} has no port"

    def _port_fault(self, name: str, port: Port) -> str:
        if port.state != "ACTIVE":
            return (
                f"port {port.number} of {name} is {port.state or 'gone'} "
                f"({port.physical_state or 'no physical state'})"
            )
        rate = _RATE.match(port.rate)
        if rate is None:
            return ""
        here = (name, port.number)
        best = self._best[here] = max(self._best.get(here, 0.0), float(rate[1]))
        if float(rate[1]) < best:
            return f"port {port.number} of {name} is degraded: {port.rate}, it had {best:g} Gb/sec"
        return ""
