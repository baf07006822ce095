"""Row A15: SIGKILL at each crash point of the protocol, and power loss, on a real API server.

Processes, requests and files are real. Each point is tested PODFABRIC_CRASHES (20) times. Crashes
at every other call are tested in tests/unit/ipam/leases/test_crashes.py.
"""

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from cni.spec.errors import CNIError, Code
from ipam.controller.rounds import Rounds
from ipam.leases.block_layout import pool_name
from ipam.leases.lessee import CONFIRM_EVERY
from ipam.leases.objects import AddressBlock, AddressPool, PoolSpec
from ipam.leases.sticky import is_let_go
from kube.resources import ApiError, Meta
from tests.api.crashing import (
    SURVIVED,
    Auditor,
    CrashingNode,
    Die,
    SharedClock,
    after_call,
    after_commit,
    after_reservation,
)
from tests.api.server import ApiServer, name
from tests.unit.ipam.calls import request
from tests.unit.ipam.controller.cluster import read_world
from tests.unit.ipam.leases.audit import audit_settled
from tests.waiting import until

TIMES = int(os.environ.get("PODFABRIC_CRASHES", "20"))
RANGE = "10.83.0.0/27"  # 30 addresses in eight blocks of 4
PODS = 6
BOTH = [False, True]


def is_block(resource: object) -> bool:
    return isinstance(resource, AddressBlock)


# Each is an item of "What a crash leaves" in docs/developers/protocol.md.
POINTS = {
    "POST, before the row": after_call("create", is_block),
    "row, before the address": after_commit("put"),
    "reservation, before the answer": after_reservation,
    "mark returning, before DELETE": after_commit("begin_return"),
    "DELETE, answer lost": after_call("delete", is_block),
}


class Fabric:
    """A pool, two nodes, and the controller, for one turn."""

    def __init__(self, server: ApiServer, root: Path, range_: str) -> None:
        self.server = server
        self.clock = SharedClock()
        self.ipam: dict[str, object] = {"range": range_}
        self.pool = pool_name("", range_)
        spec = PoolSpec(range=range_, block_size=4)
        server.admin.create(AddressPool(metadata=Meta(name=self.pool), spec=spec))
        self.a, self.b = (
            CrashingNode(server, root / each, name(f"crash-{each}"), self.clock)
            for each in ("a", "b")
        )
        self.new_leader()
        self.round()
        self.auditor = Auditor(self.a.objects, self.a, self.b)

    def new_leader(self) -> None:
        self.rounds = Rounds(self.server.admin, clock=self.clock, wall=self.clock)

    def round(self) -> None:
        self.rounds.round(read_world(self.server.admin, self.clock))

    def work(self, times: int = 1, seconds: float = 1.0) -> None:
        """Let the agents do the work that is due."""
        for _ in range(times):
            self.clock.now += seconds
            for node in (self.a, self.b):
                node.lessee.step()
        self.auditor.check()

    def add(self, node: CrashingNode, pod: str, again: bool = True) -> float:
        """Repeat ADD as a runtime does; returns the seconds until it succeeds."""
        began = time.monotonic()

        def added() -> bool:
            try:
                node.add(pod, dict(self.ipam))
            except CNIError as error:
                assert error.code in (Code.TRY_AGAIN, Code.NO_FREE_ADDRESS), error
                self.work()
                return False
            return True

        until(added, what=f"address for {pod}", pause=0.0)
        return time.monotonic() - began

    def look(self, node: CrashingNode, *, power: bool) -> None:
        """Check the state after the kill, or after the loss of power."""
        if power:
            node.lose_power("boot-2")
        else:
            self.auditor.check()

    def back(self, node: CrashingNode, on: CrashingNode, pod: str, *, power: bool) -> float:
        """Start the next agent of the node; returns the seconds until an ADD on `on` succeeds."""
        began = time.monotonic()
        node.restart()
        if power:
            node.store.release_stale()  # as the agent's sweep does
        self.add(on, pod)
        took = time.monotonic() - began
        self.auditor.check()
        return took

    def recover(self, node: CrashingNode, *, power: bool) -> float:
        """Continue after the kill; returns the seconds until an ADD succeeds again."""
        self.look(node, power=power)
        for number in range(PODS):  # the runtime undoes unanswered calls; no server is needed
            node.delete_plainly(f"p{number}", self.ipam)
        return self.back(node, node, "after", power=power)

    def settle(self) -> None:
        """Check that nothing is left of the kill."""
        for node in (self.a, self.b):
            for pod in ("after", "q", *(f"p{number}" for number in range(PODS))):
                node.delete_plainly(pod, self.ipam)
        self.work(1, 30.0)
        self.work(1, CONFIRM_EVERY)
        self.work(3, 20.0)
        audit_settled(self.a.objects, [self.a, self.b])  # type: ignore[arg-type]

    def blocks(self) -> list[AddressBlock]:
        return list(self.server.admin.list(AddressBlock, {"spec.pool": self.pool}).items)

    def end(self) -> None:
        admin = self.server.admin
        for block in self.blocks():
            admin.delete(block)
        admin.delete(admin.get(AddressPool, self.pool))
        for node in (self.a, self.b):
            with suppress(AssertionError):  # a test may have removed it
                self.server.remove_node(node.name, pods=True)


@contextmanager
def fabric_of(
    server: ApiServer,
    root: Path,
    range_: str = RANGE,
) -> Iterator[Fabric]:
    root.mkdir()
    fabric = Fabric(server, root, range_)
    try:
        yield fabric
    finally:
        fabric.end()


def told(point: str, power: bool, took: list[float]) -> None:
    """Print a line for runs with -s."""
    loss = ", power lost" if power else ""
    sys.stdout.write(
        f"\n{point}{loss}: {len(took)} kills, ADD again after {max(took):.2f} s at most\n"
    )


def life(node: CrashingNode) -> None:
    """Claim, then return."""
    for number in range(PODS):
        node.add(f"p{number}", {"range": RANGE})
    for number in range(PODS):
        node.delete(f"p{number}")
    node.steps(40, 60.0)


@pytest.mark.long
@pytest.mark.parametrize("power", BOTH, ids=["killed", "power lost"])
@pytest.mark.parametrize("point", POINTS)
def test_a_node_killed_at_a_crash_point_loses_and_doubles_nothing(
    server: ApiServer, tmp_path: Path, point: str, power: bool
) -> None:
    took = []
    for turn in range(TIMES):
        with fabric_of(server, tmp_path / str(turn)) as fabric:
            fabric.add(fabric.b, "q")
            if turn % 2:  # the store knows blocks already
                fabric.add(fabric.a, "after")
                fabric.a.delete("after")
            fabric.a.killed_at(POINTS[point], life)
            took.append(fabric.recover(fabric.a, power=power))
            fabric.settle()
    told(point, power, took)


@pytest.mark.long
def test_a_controller_killed_at_any_change_leaves_the_rest_to_the_next_one(
    server: ApiServer, tmp_path: Path
) -> None:
    """One node is gone for good: its blocks are fenced and freed. Another node lives."""
    took, kills, at = [], 0, 0
    while kills < TIMES:
        with fabric_of(server, tmp_path / f"{kills}-{at}") as fabric:
            fabric.add(fabric.a, "p0")
            fabric.add(fabric.b, "q")
            gone = {each.metadata.name for each in fabric.blocks()}
            gone -= {each.metadata.name for each in fabric.blocks() if of(each, fabric.a)}
            server.remove_node(fabric.b.name, pods=True)
            at += 1
            if dies_at(fabric, at):
                kills += 1
            else:
                at = 0  # the whole life has fewer changes
            fabric.new_leader()
            began = time.monotonic()
            fabric.add(fabric.a, "after")
            took.append(time.monotonic() - began)
            until(partial(freed, fabric, gone), what=f"end of {gone}", pause=0.0)
            audit_settled(fabric.a.objects, [fabric.a])  # type: ignore[arg-type]
    told("controller, anywhere", False, took)


def of(block: AddressBlock, node: CrashingNode) -> bool:
    return block.spec.holder.node == node.name


def freed(fabric: Fabric, gone: set[str]) -> bool:
    """Do five minutes of a leader's work; returns whether the dead node's blocks are free."""
    fabric.clock.now += 300.0
    fabric.a.lessee.step()
    fabric.round()
    theirs = (each for each in fabric.blocks() if of(each, fabric.b) and not is_let_go(each))
    return not gone & {each.metadata.name for each in theirs}


def dies_at(fabric: Fabric, at: int) -> bool:
    """Run a leader's rounds in a child, which dies after change number `at`. Returns False if
    there are fewer changes."""
    child = os.fork()
    if child == 0:
        try:
            server, count = fabric.server, 0
            client = server.client(server.plane.kubeconfig("admin"))

            def counted(call: Callable[..., object]) -> Callable[..., object]:
                def wrapped(*arguments: object) -> object:
                    nonlocal count
                    answer = call(*arguments)
                    count += 1
                    if count == at:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return answer

                return wrapped

            for verb in ("create", "update", "update_status", "delete"):
                setattr(client, verb, counted(getattr(client, verb)))
            rounds = Rounds(client, clock=fabric.clock, wall=fabric.clock)
            for _ in range(15):
                fabric.clock.now += 300.0
                with suppress(ApiError):
                    rounds.round(read_world(client, fabric.clock))
        finally:
            os._exit(SURVIVED)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == SURVIVED
    return os.WIFSIGNALED(status)


@pytest.mark.long
@pytest.mark.parametrize("power", BOTH, ids=["killed", "power lost"])
def test_without_the_agent_dels_go_on_and_an_add_is_code_11(
    server: ApiServer, tmp_path: Path, power: bool
) -> None:
    """The agent is killed at any moment. Without an agent DELs succeed, and an ADD fails with
    code 11."""
    took = []
    for turn in range(TIMES):
        with fabric_of(server, tmp_path / str(turn)) as fabric:
            node = fabric.a
            fabric.add(node, "p0")
            fabric.add(fabric.b, "q")
            node.killed_at(at_any_moment, churn)
            fabric.look(node, power=power)
            for number in range(PODS):
                node.delete_plainly(f"p{number}", fabric.ipam)
            with pytest.raises(CNIError) as ended:
                node.plain().reserve(request("ADD", dict(fabric.ipam), "w-1", pod="w"))
            assert ended.value.code == Code.TRY_AGAIN
            if not power:
                fabric.auditor.check()
            took.append(fabric.recover(node, power=False))
            fabric.settle()
    told("agent gone", power, took)


def at_any_moment(node: CrashingNode, die: Die) -> None:
    """Kill the process from another thread, at a random moment."""
    threading.Timer(random.uniform(0.01, 0.4), die).start()


def churn(node: CrashingNode) -> None:
    """Add and delete pods for longer than the process lives."""
    while True:
        for number in range(1, PODS):
            with suppress(CNIError):
                node.add(f"p{number}", {"range": RANGE})
            node.steps(1, 1.0)
        for number in range(1, PODS):
            node.delete(f"p{number}")
        node.steps(2, 20.0)
