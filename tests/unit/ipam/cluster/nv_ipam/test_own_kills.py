"""Mode own: agent or controller dies after any change of an object, of the store or of a file.

What dies before a change dies after the last one. A kill within a transaction is one before or
after it: SQLite sees to that (test_kills.py).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from base import files
from cni.spec.errors import CNIError, Code
from ipam.nv_ipam import importing, pools
from ipam.sqlite_store import SqliteStore
from ipam.store_files import StoreFiles
from ipam.tables import Tables
from tests.fake_api import FakeClient
from tests.unit.ipam.cluster.nv_ipam.nodes import FollowingNode, put_cidrpool, put_ippool
from tests.unit.ipam.cluster.nv_ipam.own import OwnNode
from tests.unit.ipam.cluster.nv_ipam.test_own import World, daemon_writes
from tests.unit.ipam.cluster.test_crashes import Kill, Killed

SUBNET = "10.0.0.0/27"
OLD = "10.0.0.2"  # nv-ipam's daemon, or mode follow, gave it to a pod
NAMED = "10.0.0.9"
WISH = {"args": {"cni": {"ips": [NAMED]}}}
ROUTED = {"poolName": "cidrpool/routed"}
PARTS = 2


class Dying:
    """A cluster of which one process dies at a boundary: node `a` or the controller."""

    def __init__(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch, victim: str, at: int
    ) -> None:
        self.world = World(directory)
        self.victim = victim
        self.kill = Kill(at)
        self.a: FollowingNode | OwnNode
        self.directory = directory / "a"
        if victim == "controller":
            self._arm_client(self.world.controller.client)
            return
        written = files.write_atomically

        def write(path: Any, content: bytes) -> None:  # noqa: ANN401 - a path in either form
            written(path, content)
            if str(path).startswith(f"{self.directory}/"):
                self.kill.boundary()

        monkeypatch.setattr(importing, "write_atomically", write)
        monkeypatch.setattr(pools, "write_atomically", write)

    def follows(self) -> None:
        """The agent of `a` in mode follow."""
        self.a = FollowingNode(self.world.server, self.world.directory, "a", clock=self.world.clock)
        self.a.directory = self.directory
        self.a.restart()
        self._arm()

    def owns(self) -> None:
        """The same in mode own."""
        self.a = self.world.node("a")
        self._arm()

    def _arm(self) -> None:
        if self.victim == "a":
            self._arm_client(self.a.api)
            self.a.files.transaction = self._boundaries(self.a.files)  # type: ignore[method-assign,assignment]

    def _boundaries(self, store: StoreFiles) -> Callable[[], AbstractContextManager[Tables]]:
        inner = store.transaction

        @contextmanager
        def transaction() -> Iterator[Tables]:
            with inner() as tables:
                before = tables.meta.seq
                yield tables
                is_changed = tables.meta.seq != before
            if is_changed:
                self.kill.boundary()

        return transaction

    def _arm_client(self, client: FakeClient) -> None:
        change = FakeClient._change.__get__(client)

        def changed(*arguments: object) -> object:
            answer = change(*arguments)
            self.kill.boundary()
            return answer

        client._change = changed  # type: ignore[method-assign,assignment]

    def on_a(self, act: Callable[[], object]) -> None:
        """Something that the agent of `a` does, or a process beside it. If it dies, it starts
        again, and what it did is tried again, as runtime and operator do."""
        try:
            self._try(act)
        except Killed:
            self.follows() if isinstance(self.a, FollowingNode) else self.owns()
            self.check()
            self._try(act)
        self.check()

    @staticmethod
    def _try(act: Callable[[], object]) -> None:
        try:
            act()
        except CNIError as error:
            assert error.code in (
                Code.TRY_AGAIN,
                Code.NO_FREE_ADDRESS,
                Code.ADDRESS_TAKEN,
            ), error

    def step_a(self) -> None:
        """What the agent of `a` does in a while."""
        self.on_a(lambda: self.a.step())

    def a_adds(self, pod: str, keys: Mapping[str, object] | None = None, **how: object) -> None:
        """ADD; a runtime sends DEL before it tries again."""

        def add() -> None:
            self.a.delete(pod)
            self.a.add(pod, keys, **how)

        self.on_a(add)

    def round(self) -> None:
        """A round of the controller; a new leader begins if it dies."""
        try:
            self.world.controller.round()
        except Killed:
            self.world.controller.restart()
        self.check()

    def b_adds(self, pod: str) -> None:
        """The other node owns the pools, and gets another address."""
        b = self.world.nodes["b"]
        b.step()
        self._try(lambda: b.add(pod))
        self._try(lambda: b.add(f"{pod}-routed", ROUTED))
        self.check()

    def check(self) -> None:
        """No two pods have one address, and none has that of a pod that nv-ipam's daemon knows."""
        mine, others = self.held(), self.held("b")
        assert not mine & others
        assert f"nv-ipam/ippool/pool {OLD}" not in others

    def held(self, node: str = "a") -> set[str]:
        """What the pods of a node hold, by its store."""
        store = StoreFiles(self.world.directory / node, report=lambda line: None, kept=False)
        found = SqliteStore(store, self.a.boot).reservations()
        return {f"{each.domain} {each.address}" for each in found}

    def ends_well(self) -> None:
        """Nothing dies any more, and both nodes get addresses."""
        self.kill.at = -1
        self.world.settle(2)
        for node in (self.a, self.world.nodes["b"]):
            assert isinstance(node, OwnNode)
            assert self.world.add(node, "last")
            self.check()


def from_follow(dying: Dying) -> None:
    """Node `a` follows nv-ipam's pools, and owns them then. Node b owns them all the time."""
    world = dying.world
    put_ippool(world.server, {"a": ("10.0.0.1", "10.0.0.4")}, SUBNET, per_node_block_size=4)
    put_cidrpool(world.server, {}, "10.8.0.0/28", per_node_network_prefix=30)
    dying.follows()
    world.node("b")
    dying.step_a()
    for pod in ("p1", "p2"):
        dying.a_adds(pod)
    assert f"nv-ipam/ippool/pool {OLD}" in dying.held()
    dying.a_adds("wish", config=WISH)
    dying.round()
    dying.b_adds("q0")
    dying.step_a()
    dying.owns()
    for number in range(2):
        dying.step_a()
        dying.b_adds(f"q1{number}")
        dying.round()
        dying.b_adds(f"q2{number}")
        dying.a_adds(f"r{number}")
        dying.a_adds(f"s{number}", ROUTED)
    dying.on_a(lambda: dying.a.delete("p1"))


def from_daemon(dying: Dying) -> None:
    """nv-ipam's daemon ran on node `a`. Its store is imported while node b leases addresses."""
    world = dying.world
    put_ippool(world.server, {"a": ("10.0.0.1", "10.0.0.4")}, SUBNET, per_node_block_size=4)
    put_cidrpool(
        world.server, {"a": ("10.8.0.4/30", "")}, "10.8.0.0/28", per_node_network_prefix=30
    )
    dying.owns()
    world.node("b")
    assert isinstance(dying.a, OwnNode)
    daemon_writes(dying.a, OLD, subnet=SUBNET)
    dying.round()
    dying.b_adds("q0")
    dying.step_a()
    dying.a_adds("r0")
    dying.on_a(lambda: imports(dying))
    for number in range(2):
        dying.step_a()
        dying.b_adds(f"q1{number}")
        dying.round()
        dying.b_adds(f"q2{number}")
        dying.a_adds(f"s{number}", ROUTED)


def imports(dying: Dying) -> None:
    """As `podfabric ipam import` does."""
    node = dying.a
    assert isinstance(node, OwnNode)
    content = node.daemon_store.read_bytes()
    node.store.load(importing.reservations(node.daemon_store, node.boot))
    ids: list[str] = []
    node.store.look(lambda tables: ids.append(tables.meta.store))
    importing.mark(node.directory, ids[0], content)


LIVES = {"follow": from_follow, "daemon": from_daemon}


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("victim", ["a", "controller"])
@pytest.mark.parametrize("life", LIVES)
def test_a_kill_at_any_boundary_gives_no_address_twice(
    memory_path: Path, life: str, victim: str, part: int
) -> None:
    at = part + 1
    while True:
        with pytest.MonkeyPatch.context() as patch:
            dying = Dying(memory_path / str(at), patch, victim, at)
            LIVES[life](dying)
            is_over = dying.kill.count < at
            dying.ends_well()
        if is_over:
            break
        at += PARTS
    assert at > 8
