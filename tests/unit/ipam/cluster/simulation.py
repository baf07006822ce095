"""Three machines, their pods and the API server, under every fault: for test_stateful.py.

The nodes' stores, their lessees and the controller are the real code. The rest is a simulation in
plain Python: which sandboxes live is the truth that addresses are compared with.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from cni.spec.errors import CNIError, Code
from ipam.addresses import parse
from ipam.blocks import LeasedBlock
from ipam.cluster.api import ApiError
from ipam.cluster.controller.machines import OUT_OF_SERVICE
from ipam.cluster.controller.reclaim import ReclaimCounts
from ipam.cluster.controller.rounds import Rounds, read_world
from ipam.cluster.geometry import interval
from ipam.cluster.names import pool_name
from ipam.cluster.objects import AddressBlock, AddressPool, Holder, Meta, PoolSpec
from ipam.store import Reservation
from tests.fake_api import FakeApi, FakeClient, Fault
from tests.unit.ipam.cluster.nodes import ClusterNode

RANGE = "10.0.0.0/28"
LINK = {"master": "ib0"}
POOL = pool_name("", RANGE)
KEPT_SNAPSHOTS = 6

KILL_BEFORE, KILL_AFTER = "killed before the call", "killed after the call"
Trouble = Fault | str | None
"""What goes wrong with one call."""


class Killed(BaseException):
    """The process dies here."""


class Troubled:
    """A client whose next calls have these troubles."""

    def __init__(self, client: FakeClient) -> None:
        self._client = client
        self._next: list[Trouble] = []
        self._fault: Fault | None = None
        client.faults = lambda verb, kind, name: self._fault

    @contextmanager
    def troubled(self, troubles: Sequence[Trouble]) -> Iterator[None]:
        """The calls in the block, in their order; those behind the last go well."""
        self._next = list(troubles)
        try:
            yield
        finally:
            self._next, self._fault = [], None

    def __getattr__(self, verb: str) -> Any:  # noqa: ANN401 - each verb of ClusterApi
        return lambda *args, **more: self._call(
            verb, partial(getattr(self._client, verb), **more), *args
        )

    def _call(self, verb: str, call: Callable[..., object], *args: object) -> object:
        trouble = self._next.pop(0) if self._next else None
        if trouble == KILL_BEFORE:
            raise Killed
        reads = verb not in ("create", "update", "update_status", "delete")
        self._fault = trouble if isinstance(trouble, Fault) else None
        if reads and self._fault is not None:
            self._fault = Fault.LOST_REQUEST  # a read has no other
        answer = call(*args)
        if trouble == KILL_AFTER:
            raise Killed
        return answer


class Sandbox(msgspec.Struct):
    """A sandbox that was not deleted yet: of a living pod, or of one that is gone."""

    pod: str
    address: str
    alive: bool


class OnDisk(NamedTuple):
    """What the store of a machine says."""

    instance: str
    rows: Sequence[LeasedBlock]
    reservations: Sequence[Reservation]


class SimulatedMachine:
    """A machine with its disk, its clock, its agent and its sandboxes."""

    def __init__(self, world: "World", name: str, disk: Path) -> None:
        self.world = world
        self.name = name
        self.on = True
        self.boots = 1
        self.booted_at = world.now - 1000.0 * (1 + len(world.machines))
        self.sandboxes: dict[str, Sandbox] = {}
        self.snapshots: list[Path] = []
        self.on_disk = OnDisk("", (), ())
        self._made = 0
        self.node = ClusterNode(
            world.api,
            disk,
            name,
            clock=self.uptime,  # type: ignore[arg-type]
            boot=self.boot,
        )
        self.api = Troubled(self.node.api)
        self.node.api = self.api  # type: ignore[assignment]
        self.node.restart()
        self.seen()

    @property
    def boot(self) -> str:
        return f"{self.name}-boot-{self.boots}"

    def uptime(self) -> float:
        """CLOCK_BOOTTIME."""
        return self.world.now - self.booted_at

    # --- calls of the runtime -------------------------------------------------------------------

    def add(self, pod: str, troubles: Sequence[Trouble]) -> None:
        """A sandbox of the pod, in place of the one that it has, whose DEL comes later."""
        for sandbox in self.sandboxes.values():
            if sandbox.pod == pod:
                sandbox.alive = False
        self._made += 1
        container = f"{self.name}-{self._made}"
        address = ""
        with self._agent(troubles):
            try:
                (address,) = self.node.add(pod, {"range": RANGE}, container=container, config=LINK)
            except CNIError as error:
                assert error.code in (Code.TRY_AGAIN, Code.NO_FREE_ADDRESS), error
        self.sandboxes[container] = Sandbox(pod, address, alive=address != "")

    def delete(self, container: str) -> None:
        """DEL, which needs no API server (I9), twice (it is idempotent)."""
        sandbox = self.sandboxes.pop(container)
        down, self.node.api._client.down = self.node.api._client.down, True  # type: ignore
        self.node.delete(sandbox.pod, container)
        self.node.delete(sandbox.pod, container)
        self.node.api._client.down = down  # type: ignore[attr-defined]

    def step(self, troubles: Sequence[Trouble]) -> None:
        """What is due of the lessee's work."""
        with self._agent(troubles):
            self.node.lessee.step()

    def sweep(self) -> None:
        """What an agent does soon after it starts: a power loss may bring back a reservation whose
        DEL had freed it, and no DEL of it comes again."""
        self.node.store.release_stale()

    @contextmanager
    def _agent(self, troubles: Sequence[Trouble]) -> Iterator[None]:
        try:
            with self.api.troubled(troubles):
                yield
        except Killed:
            self.node.restart()

    # --- power, disk ------------------------------------------------------------------------------

    def power_off(self, snapshot: int) -> None:
        """Every sandbox dies, and the disk may lack the last transactions."""
        self.on = False
        for sandbox in self.sandboxes.values():
            sandbox.alive = False
        kept = self.snapshots[-1 - min(snapshot, len(self.snapshots) - 1)]
        _copy(kept, self.node.directory)

    def power_on(self) -> None:
        self.on = True
        self.boots += 1
        self.booted_at = self.world.now - 20.0
        self.node.restart(self.boot)
        self.forget_snapshots()
        self.seen()

    def lose_store(self) -> None:
        """Somebody deletes the directory; the agent starts again."""
        shutil.rmtree(self.node.directory)
        self.node.restart()
        self.forget_snapshots()
        self.seen()

    def copy_store_of(self, other: "SimulatedMachine") -> None:
        """This machine, which is off, gets a copy of the other's disk."""
        _copy(other.node.directory, self.node.directory)
        self.sandboxes.clear()

    def seen(self) -> None:
        """Remember the disk as it is now: a power loss may bring it back."""
        if not self.on or (self.snapshots and _same(self.snapshots[-1], self.node.directory)):
            return
        with self.node.files.transaction() as tables:
            known = tables.instance()
            instance = known.id if known is not None else ""
            self.on_disk = OnDisk(instance, list(tables.blocks()), list(tables.all()))
        kept = self.world.scratch / f"{self.name}-{self.world.number()}"
        _copy(self.node.directory, kept)
        self.snapshots.append(kept)
        while len(self.snapshots) > KEPT_SNAPSHOTS:
            shutil.rmtree(self.snapshots.pop(0))

    def forget_snapshots(self) -> None:
        while self.snapshots:
            shutil.rmtree(self.snapshots.pop())


class World:
    """The machines, the API server and the controller, at one time."""

    def __init__(self, scratch: Path, machines: int = 3) -> None:
        self.scratch = scratch
        self.now = 100_000.0
        self._number = 0
        self.api = FakeApi(clock=lambda: self.now)
        self.controller_api = Troubled(self.api.client("controller"))
        self.history: dict[tuple[str, int], Holder] = {}
        self.machines: list[SimulatedMachine] = []
        for number in range(machines):
            name = f"node-{number}"
            self.machines.append(SimulatedMachine(self, name, scratch / name))
        self.new_leader()

    def make_pool(self, block_size: int) -> None:
        spec = PoolSpec(range=RANGE, block_size=block_size)
        self.api.create(AddressPool(metadata=Meta(name=POOL), spec=spec))
        self.round(())

    def number(self) -> int:
        self._number += 1
        return self._number

    def new_leader(self) -> None:
        self.rounds = Rounds(
            self.controller_api,
            clock=lambda: self.now,
            wall=lambda: self.now,
            counts=ReclaimCounts(),
        )

    def round(self, troubles: Sequence[Trouble]) -> None:
        """A round of the controller."""
        try:
            with self.controller_api.troubled(troubles):
                api: Any = self.controller_api
                self.rounds.round(read_world(api, lambda: self.now))
        except Killed:
            self.new_leader()
        except ApiError:
            pass  # the rest is left for the next round

    def deliver(self, which: int) -> None:
        """One of the late requests arrives."""
        late = self.api.late.pop(which % len(self.api.late))
        with suppress(ApiError):
            late()

    # --- Node objects -----------------------------------------------------------------------------

    def kubelet_reports(self, machine: SimulatedMachine) -> None:
        """The kubelet writes, or makes, the Node object."""
        if machine.name not in self.api.machines:
            self.api.add_node(machine.name)
        node = self.api.machines[machine.name]
        self.api.machines[machine.name] = replace(
            node,
            machine_id=machine.node.machine,
            system_uuid=f"uuid-of-{machine.node.machine}",
            boot_id=machine.boot,
            ready=True,
        )

    def taint(self, machine: SimulatedMachine, *, tainted: bool) -> None:
        node = self.api.machines[machine.name]
        self.api.machines[machine.name] = replace(node, taints=(OUT_OF_SERVICE,) if tainted else ())

    def not_ready(self, machine: SimulatedMachine) -> None:
        if machine.name in self.api.machines:
            node = self.api.machines[machine.name]
            self.api.machines[machine.name] = replace(node, ready=False)

    def set_max_offline(self, written: str) -> None:
        """An administrator changes for how long nodes go on without the API server."""
        pool = self.api.look(AddressPool, POOL)
        reclaim = replace(pool.spec.reclaim, max_offline=written)
        self.api.put(replace(pool, spec=replace(pool.spec, reclaim=reclaim)))

    def set_pool_state(self, state: str) -> None:
        pool = self.api.look(AddressPool, POOL)
        self.api.put(replace(pool, spec=replace(pool.spec, state=state)))

    # --- the invariants ---------------------------------------------------------------------------

    def check(self) -> None:
        blocks = {each.metadata.name: each for each in self.api.look_at_all(AddressBlock).items}
        self._one_owner()
        self._used_is_leased(blocks.values())
        self._one_holder_per_epoch(blocks.values())
        for machine in self.machines:
            if machine.on:
                self._store_agrees(machine, blocks)

    def _one_owner(self) -> None:
        """I1."""
        users: dict[str, str] = {}
        for machine in self.machines:
            for container, sandbox in machine.sandboxes.items():
                if sandbox.alive:
                    other = users.setdefault(sandbox.address, container)
                    assert other == container, f"I1: {sandbox.address}: {other}, {container}"

    def _used_is_leased(self, blocks: Any) -> None:  # noqa: ANN401 - of AddressBlock
        """I7: no process deletes the block of an address that is in use."""
        for machine in self.machines:
            for sandbox in machine.sandboxes.values():
                if sandbox.alive:
                    address = parse(sandbox.address)
                    holders = [
                        block.spec.holder.node
                        for block in blocks
                        if interval(block).first <= address <= interval(block).last
                        and block.spec.state != "Pending"
                    ]
                    assert holders == [machine.name], f"I7: {sandbox.address}: {holders}"

    def _one_holder_per_epoch(self, blocks: Any) -> None:  # noqa: ANN401
        """I8."""
        for block in blocks:
            key = block.metadata.uid, block.spec.epoch
            known = self.history.setdefault(key, block.spec.holder)
            assert known == block.spec.holder, f"I8: {block.metadata.name}: {known}"

    def _store_agrees(self, machine: SimulatedMachine, blocks: dict[str, AddressBlock]) -> None:
        instance, rows, reservations = machine.on_disk
        for row in rows:
            if row.is_confirmed(machine.boot, machine.uptime()):
                block = blocks.get(row.name)
                assert block is not None, f"I3: {machine.name} may use {row.name}: no object"
                assert block.metadata.uid == row.uid, f"I3: {row.name}: another uid"
                assert block.spec.holder.instance == instance, f"I3: {row.name}: another's"
        for held in reservations:
            if held.boot != machine.boot:
                continue
            address = parse(held.address)
            its = [row for row in rows if row.first <= address <= row.last]
            assert len(its) == 1, f"I10: {machine.name} holds {held.address} outside of its blocks"
            assert its[0].state != "returning", f"I4: {held.address} is held, {its[0].name} returns"


def _copy(from_: Path, to: Path) -> None:
    if to.exists():
        shutil.rmtree(to)
    if from_.exists():
        shutil.copytree(from_, to)
    else:
        to.mkdir(parents=True)


def _content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.glob("*"))}


def _same(one: Path, other: Path) -> bool:
    return one.exists() and other.exists() and _content(one) == _content(other)
