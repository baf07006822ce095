"""Random histories of a cluster, faults included: the invariants hold after every step.

    PODFABRIC_HISTORIES=500x100 .venv/bin/python -m pytest tests/unit/ipam/cluster/test_stateful.py

does 500 histories of 100 steps each in place of the few that every run does.
"""

import os
import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from ipam.cluster.objects import AddressBlock
from tests.fake_api import Fault
from tests.unit.ipam.cluster.simulation import (
    KILL_AFTER,
    KILL_BEFORE,
    SimulatedMachine,
    Trouble,
    World,
)
from tests.unit.ipam.conftest import SHARED_MEMORY

HISTORIES, STEPS = map(int, os.environ.get("PODFABRIC_HISTORIES", "16x40").split("x"))

# How often each thing happens, next to the others.
EVENTS = {
    # what a node does
    "add": 24,
    "work": 24,
    "delete": 10,
    "delete_all": 4,
    "gives_back": 8,
    "borrows": 12,
    "takes_back": 4,
    "agent_restarts": 2,
    "sweeps": 3,
    # machines and their Node objects
    "power_loss": 3,
    "power_on": 5,
    "boots_again": 3,
    "kubelet_reports": 3,
    "store_lost": 1,
    "store_copied": 1,
    "node_deleted": 2,
    "tainted": 2,
    "taint_removed": 3,
    # the cluster
    "time_passes": 5,
    "all_is_well_for_a_while": 3,
    "controller_works": 6,
    "another_leader": 1,
    "api_server_away": 1,
    "api_server_back": 4,
    "late_request_arrives": 8,
    "pool_drained": 1,
    "pool_active": 4,
    "max_offline_changed": 2,
}

# At most one call of a step goes wrong: one that came before it would hide the others.
KINDS = (KILL_BEFORE, KILL_AFTER, KILL_AFTER, Fault.LATE, Fault.LATE, *Fault)
troubles: st.SearchStrategy[list[Trouble]] = st.just([]) | st.builds(
    lambda well, trouble: [*[None] * well, trouble], st.integers(0, 4), st.sampled_from(KINDS)
)


class Histories(RuleBasedStateMachine):
    """What may happen to a cluster, at any time and in any order."""

    def __init__(self) -> None:
        super().__init__()
        shared = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        self.scratch = Path(tempfile.mkdtemp(dir=shared))
        self.world = World(self.scratch)

    @initialize(size=st.sampled_from([2, 4, 8]))  # of 8 there are fewer blocks than nodes
    def pool(self, size: int) -> None:
        self.world.make_pool(size)

    def teardown(self) -> None:
        shutil.rmtree(self.scratch)

    @rule(
        what=st.sampled_from([name for name, weight in EVENTS.items() for _ in range(weight)]),
        number=st.integers(0, 2),
        which=st.integers(0, 6),
        troubles=troubles,
    )
    def happens(self, what: str, number: int, which: int, troubles: list[Trouble]) -> None:
        getattr(self, what)(self.world.machines[number], which, troubles)
        self._holds()

    def _holds(self) -> None:
        for machine in self.world.machines:
            machine.seen()
        self.world.check()

    # --- what a node does -----------------------------------------------------------------------

    def add(self, machine: SimulatedMachine, which: int, troubles: list[Trouble]) -> None:
        # Who deletes a Node has drained it: no pod begins there before it is back.
        if machine.on and machine.name in self.world.api.machines:
            machine.add(f"{machine.name}-p{which // 2}", troubles)

    def delete(self, machine: SimulatedMachine, which: int, troubles: list[Trouble]) -> None:
        if machine.on and machine.sandboxes:
            machine.delete(list(machine.sandboxes)[which % len(machine.sandboxes)])

    def delete_all(self, machine: SimulatedMachine, which: int, troubles: list[Trouble]) -> None:
        if machine.on:
            for container in list(machine.sandboxes):
                machine.delete(container)

    def work(self, machine: SimulatedMachine, which: int, troubles: list[Trouble]) -> None:
        if machine.on:
            self.world.now += 3.0 * which
            machine.step(troubles)

    def gives_back(self, machine: SimulatedMachine, which: int, troubles: list[Trouble]) -> None:
        self.delete_all(machine, which, [])
        self.work(machine, 1, [])
        self.work(machine, 1, troubles)

    def borrows(self, machine: SimulatedMachine, which: int, troubles: list[Trouble]) -> None:
        """Pods until no block is free, and what follows; one of the machines has the troubles."""
        for number in range(4):
            self.add(machine, 2 * number, [])
        self.world.round(troubles if which == 0 else ())
        for number, other in enumerate(self.world.machines):
            if other.on:
                other.step(troubles if which == number + 1 else ())
        self.world.now += 1.5
        self.add(machine, which, troubles if which > 3 else [])

    def takes_back(self, machine: SimulatedMachine, which: int, troubles: list[Trouble]) -> None:
        """The holder of a block looks whether others still have what it ceded."""
        self.world.now += 61.0
        self.work(machine, 0, troubles)

    def agent_restarts(
        self, machine: SimulatedMachine, which: int, troubles: list[Trouble]
    ) -> None:
        if machine.on:
            machine.node.restart()

    def sweeps(self, machine: SimulatedMachine, which: int, troubles: list[Trouble]) -> None:
        if machine.on:
            machine.sweep()

    # --- machines and their Node objects --------------------------------------------------------

    def power_loss(self, machine: SimulatedMachine, which: int, troubles: list[Trouble]) -> None:
        if machine.on:
            machine.power_off(which)
            self.world.not_ready(machine)

    def power_on(self, machine: SimulatedMachine, which: int, troubles: list[Trouble]) -> None:
        node = self.world.api.machines.get(machine.name)
        if not machine.on and not (node and node.taints):  # the taint says that it is off
            machine.power_on()
            if which:
                self.world.kubelet_reports(machine)

    def boots_again(self, machine: SimulatedMachine, which: int, troubles: list[Trouble]) -> None:
        self.power_loss(machine, which, [])
        self.power_on(machine, which % 2, [])
        self.work(machine, which, troubles)

    def kubelet_reports(
        self, machine: SimulatedMachine, which: int, troubles: list[Trouble]
    ) -> None:
        if machine.on:
            self.world.kubelet_reports(machine)

    def store_lost(self, machine: SimulatedMachine, which: int, troubles: list[Trouble]) -> None:
        if machine.on:
            machine.lose_store()

    def store_copied(self, machine: SimulatedMachine, which: int, troubles: list[Trouble]) -> None:
        other = self.world.machines[which % len(self.world.machines)]
        if other is not machine and not machine.on:
            machine.copy_store_of(other)

    def node_deleted(self, machine: SimulatedMachine, which: int, troubles: list[Trouble]) -> None:
        if machine.name in self.world.api.machines:
            for sandbox in machine.sandboxes.values():
                sandbox.alive = False  # drained
            del self.world.api.machines[machine.name]

    def tainted(self, machine: SimulatedMachine, which: int, troubles: list[Trouble]) -> None:
        if not machine.on and machine.name in self.world.api.machines:
            self.world.taint(machine, tainted=True)

    def taint_removed(self, machine: SimulatedMachine, which: int, troubles: list[Trouble]) -> None:
        if machine.name in self.world.api.machines:
            self.world.taint(machine, tainted=False)

    # --- the cluster ----------------------------------------------------------------------------

    def time_passes(self, machine: SimulatedMachine, which: int, troubles: list[Trouble]) -> None:
        self.world.now += (1.0, 5.0, 60.0, 450.0, 650.0, 1900.0, 2200.0)[which]

    def all_is_well_for_a_while(
        self, machine: SimulatedMachine, which: int, troubles: list[Trouble]
    ) -> None:
        for _ in range(6):
            self.world.now += (5.0, 30.0, 61.0, 120.0, 300.0, 450.0, 700.0)[which]
            for machine in self.world.machines:
                if machine.on:
                    machine.step(())
            self.world.round(())

    def controller_works(
        self, machine: SimulatedMachine, which: int, troubles: list[Trouble]
    ) -> None:
        self.world.now += which
        self.world.round(troubles)

    def another_leader(
        self, machine: SimulatedMachine, which: int, troubles: list[Trouble]
    ) -> None:
        self.world.new_leader()

    def api_server_away(
        self, machine: SimulatedMachine, which: int, troubles: list[Trouble]
    ) -> None:
        self.world.api.down = True

    def api_server_back(
        self, machine: SimulatedMachine, which: int, troubles: list[Trouble]
    ) -> None:
        self.world.api.down = False

    def late_request_arrives(
        self, machine: SimulatedMachine, which: int, troubles: list[Trouble]
    ) -> None:
        if self.world.api.late:
            self.world.deliver(which)

    def pool_drained(self, machine: SimulatedMachine, which: int, troubles: list[Trouble]) -> None:
        self.world.set_pool_state("Draining")

    def pool_active(self, machine: SimulatedMachine, which: int, troubles: list[Trouble]) -> None:
        self.world.set_pool_state("Active")

    def max_offline_changed(
        self, machine: SimulatedMachine, which: int, troubles: list[Trouble]
    ) -> None:
        self.world.set_max_offline(("4m", "30m", "1h")[which % 3])


class HistoriesThatEndWell(Histories):
    """And at their end, when nothing fails any more, nothing is stuck and nothing is left."""

    def teardown(self) -> None:
        try:
            self._ends_well()
        finally:
            super().teardown()

    def _ends_well(self) -> None:
        """L1 to L4."""
        world = self.world
        world.api.down = False
        world.set_pool_state("Active")
        world.set_max_offline("30m")
        while world.api.late:
            world.deliver(0)
        for machine in world.machines:
            if machine.name in world.api.machines:
                world.taint(machine, tainted=False)
            if not machine.on:
                machine.power_on()
            world.kubelet_reports(machine)
            for container in list(machine.sandboxes):
                machine.delete(container)
        self._all_work(4, 30.0)
        for machine in world.machines:
            machine.power_off(0)  # the one proof for what a lost store held
            machine.power_on()
            machine.sweep()
            world.kubelet_reports(machine)
        self._all_work(4, 30.0)
        self._all_work(12, 300.0)
        for machine in world.machines:
            for _ in range(8):  # another node may have to cede one, or to give its block back
                machine.add(f"{machine.name}-last", ())
                world.check()
                (container,) = machine.sandboxes
                given = machine.sandboxes[container].alive
                machine.delete(container)
                if given:
                    break
                self._all_work(1, 1.5)
            assert given, f"L1: {machine.name} gives no address"
        self._all_work(4, 350.0)
        world.check()
        blocks = world.api.look_at_all(AddressBlock).items
        for machine in world.machines:
            its = [block for block in blocks if block.spec.holder.node == machine.name]
            assert len(its) <= 1, f"L3: {machine.name} keeps {its}"

    def _all_work(self, times: int, seconds: float) -> None:
        for _ in range(times):
            self.world.now += seconds
            for machine in self.world.machines:
                machine.step(())
            self.world.round(())


SETTINGS = settings(
    max_examples=HISTORIES,
    stateful_step_count=STEPS,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

TestHistories = Histories.TestCase
TestHistories.settings = SETTINGS
TestHistoriesThatEndWell = HistoriesThatEndWell.TestCase
TestHistoriesThatEndWell.settings = settings(SETTINGS, max_examples=max(1, HISTORIES // 4))
