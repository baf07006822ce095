"""How HCAs' ports are: bad at once, good again only once it has lasted.

A port that flaps would otherwise offer and withdraw its HCA by turns. So a fault counts from
`NOTICE` seconds on, and its end from `SETTLE` seconds on, a time that doubles with every fault
of the last minutes.
"""

import re
from collections.abc import Collection, Iterable, Mapping

from host.discovery import HCA, Port

NOTICE = 0.5  # seconds a fault must last
SETTLE = 2.0  # seconds that it must be over
LONGEST_SETTLE = 60.0
GONE = "it is gone from this node"
REMEMBERED = 600.0  # seconds that a fault makes the next one's end take longer

_RATE = re.compile(r"([0-9.]+) Gb/sec")


class _HealthState:
    """What is known of one HCA."""

    def __init__(self, fault: str) -> None:
        self.reported = fault  # "" is healthy
        self.seen = fault
        self.since = 0.0  # when `seen` began
        self.faults: list[float] = []  # when it became unhealthy


class Health:
    """The health of every HCA that was ever seen. One thread at a time may use it."""

    def __init__(self) -> None:
        self.pending = False  # a report will change by time alone, if nothing else does
        self._states: dict[str, _HealthState] = {}
        self._best: dict[tuple[str, int, int], float] = {}  # Gb/s, by HCA, device, port

    def observe(self, hcas: Iterable[HCA], listed: Collection[str], now: float) -> None:
        """Take in what sysfs says at `now`, a monotonic clock's seconds.

        `listed` are the ids of HCAs that are offered or held, and so can be missing.
        """
        there = {hca.id: hca for hca in hcas}
        for known in set(there) | set(listed) | set(self._states):
            hca = there.get(known)
            fault = GONE if hca is None else self._fault(hca)
            state = self._states.get(known)
            if state is None:
                self._states[known] = _HealthState(fault)  # what is first seen is believed at once
            else:
                _advance(state, fault, now)
        for known in set(self._states) - set(there) - set(listed):
            del self._states[known]
        self._best = {key: best for key, best in self._best.items() if key[0] in there}
        self.pending = any(state.seen != state.reported for state in self._states.values())

    def reports(self) -> Mapping[str, str]:
        """What is wrong with each HCA, GONE among it; "" of those that are well."""
        return {known: state.reported for known, state in self._states.items()}

    def _fault(self, hca: HCA) -> str:
        """What is wrong with an HCA's ports, "" if one of them is well."""
        if not hca.rdma:
            # It never had one, or that is in a pod, where its port cannot be seen from here.
            return ""
        faults = []
        for position, rdma in enumerate(hca.rdma):
            for port in rdma.ports:
                fault = self._port_fault((hca.id, position, port.number), rdma.name, port)
                if not fault:
                    return ""
                faults.append(fault)
        return "; ".join(faults) or f"{hca.rdma[0].name} has no port"

    def _port_fault(self, here: tuple[str, int, int], name: str, port: Port) -> str:
        if port.state != "ACTIVE":
            return (
                f"port {port.number} of {name} is {port.state or 'gone'} "
                f"({port.physical_state or 'no physical state'})"
            )
        rate = _RATE.match(port.rate)
        if rate is None:
            return ""
        best = self._best[here] = max(self._best.get(here, 0.0), float(rate[1]))
        if float(rate[1]) < best:
            return f"port {port.number} of {name} is degraded: {port.rate}, it had {best:g} Gb/sec"
        return ""


def _advance(state: _HealthState, fault: str, now: float) -> None:
    if bool(fault) != bool(state.seen):
        state.since = now
    state.seen = fault
    if bool(fault) == bool(state.reported):
        state.reported = fault
        return
    state.faults = [at for at in state.faults if now - at < REMEMBERED]
    wait = NOTICE if fault else min(LONGEST_SETTLE, SETTLE * 2 ** max(0, len(state.faults) - 1))
    if now - state.since >= wait:
        state.reported = fault
        if fault:
            state.faults.append(now)
