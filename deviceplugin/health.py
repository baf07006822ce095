"""Reports the health of HCAs by the state of their ports.

A fault is reported after `NOTICE` seconds, and its end after `SETTLE` seconds. This second wait
doubles with each recent fault, so that a flapping port causes few reports.
"""

import re
from collections.abc import Collection, Iterable, Mapping

from host.sysfs.discovery import HCA, Port

NOTICE = 0.5  # seconds a fault must last
SETTLE = 2.0  # seconds without a fault before the HCA is healthy again
LONGEST_SETTLE = 60.0
GONE = "it is gone from this node"
REMEMBERED = 600.0  # seconds for which a fault lengthens the wait after later faults
A_DAY = 86400.0  # seconds for which a fault is counted

_RATE = re.compile(r"([0-9.]+) Gb/sec")


class _HealthState:
    """The health of one HCA. The fault of a healthy HCA is `None`."""

    def __init__(self, fault: str | None) -> None:
        self.reported = fault
        self.seen = fault
        self.since = 0.0  # when `seen` changed between healthy and faulty
        self.faults: list[float] = []  # the times when it was reported as faulty


class FaultStates:
    """Faults by key, with the waits of this module. One thread at a time may use an instance."""

    def __init__(self) -> None:
        self.pending = False  # a report will change after some time, without a change of a port
        self._states: dict[str, _HealthState] = {}

    def reports(self) -> Mapping[str, str | None]:
        """The reported fault of each key; `None` without a fault."""
        return {key: state.reported for key, state in self._states.items()}

    def _observe(self, faults: Mapping[str, str | None], now: float) -> None:
        """Update from the present `faults`. Keys that `faults` lacks are forgotten."""
        for key, fault in faults.items():
            state = self._states.get(key)
            if state is None:
                self._states[key] = _HealthState(fault)  # the first fault counts at once
            else:
                _advance(state, fault, now)
        for key in self._states.keys() - faults.keys():
            del self._states[key]
        self.pending = any(state.seen != state.reported for state in self._states.values())


class Health(FaultStates):
    """The health of all HCAs by id. A report is a text, GONE, or `None` for a healthy HCA."""

    def __init__(self) -> None:
        super().__init__()
        self._best: dict[tuple[str, int, int], float] = {}  # Gb/s, by HCA, device, port

    def observe(self, hcas: Iterable[HCA], listed: Collection[str], now: float) -> None:
        """Update from the present `hcas` at the time `now` (time.monotonic()).

        An offered or held HCA (`listed`) that is not in `hcas` is reported as GONE.
        """
        present = {hca.id: hca for hca in hcas}
        faults: dict[str, str | None] = dict.fromkeys(listed, GONE)
        faults |= {hca_id: self._fault(hca) for hca_id, hca in present.items()}
        self._observe(faults, now)
        self._best = {key: best for key, best in self._best.items() if key[0] in present}

    def counts(self, now: float) -> Mapping[str, int]:
        """The number of faults of each HCA in the last 24 hours, without HCAs that had none."""
        recent = {
            hca_id: sum(now - at < A_DAY for at in state.faults)
            for hca_id, state in self._states.items()
        }
        return {hca_id: count for hca_id, count in recent.items() if count}

    def _fault(self, hca: HCA) -> str | None:
        """The fault of an HCA's ports; `None` if at least one port is healthy."""
        if not hca.rdma:  # the HCA has none, or a pod's namespace hides it
            return None
        faults = []
        for position, rdma in enumerate(hca.rdma):
            for port in rdma.ports:
                fault = self._port_fault((hca.id, position, port.number), rdma.name, port)
                if fault is None:
                    return None
                faults.append(fault)
        return "; ".join(faults) or f"{hca.rdma[0].name} has no port"

    def _port_fault(self, here: tuple[str, int, int], name: str, port: Port) -> str | None:
        if port.state != "ACTIVE":
            return (
                f"port {port.number} of {name} is {port.state or 'gone'} "
                f"({port.physical_state or 'no physical state'})"
            )
        rate = _RATE.match(port.rate)
        if rate is None:
            return None
        best = self._best[here] = max(self._best.get(here, 0.0), float(rate[1]))
        if float(rate[1]) < best:
            return f"port {port.number} of {name} is degraded: {port.rate}, before {best:g} Gb/sec"
        return None


def _advance(state: _HealthState, fault: str | None, now: float) -> None:
    if (fault is None) != (state.seen is None):
        state.since = now
    state.seen = fault
    if (fault is None) == (state.reported is None):
        state.reported = fault
        return
    state.faults = [at for at in state.faults if now - at < A_DAY]
    recent = sum(now - at < REMEMBERED for at in state.faults)
    settle = min(LONGEST_SETTLE, SETTLE * 2 ** max(0, recent - 1))
    if now - state.since >= (settle if fault is None else NOTICE):
        state.reported = fault
        if fault is not None:
            state.faults.append(now)
