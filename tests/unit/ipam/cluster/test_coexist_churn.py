"""Random histories beside whereabouts: its nodes act between any two calls of ours, which may die.

No address is in use on both sides, and when all pods have ended nothing of ours is left.
"""

import random
from pathlib import Path

import pytest
from msgspec.structs import replace

from cni.spec.errors import CNIError, Code
from ipam.addresses import parse, text
from ipam.cluster.api import AlreadyExists, NotFound
from ipam.cluster.objects import AddressPool, Meta
from ipam.cluster.whereabouts import placeholders, settling, takeover
from ipam.cluster.whereabouts.objects import (
    IPAllocation,
    IPPool,
    IPPoolSpec,
    OverlappingRangeIPReservation,
    OverlappingReservationSpec,
    entries,
    ippool_name,
    reservation_name,
)
from ipam.cluster.whereabouts.settling import UNUSED
from tests.fake_api import FakeApi, Fault
from tests.unit.ipam.cluster.beside import NAMESPACE
from tests.unit.ipam.cluster.nodes import Clock, ClusterNode, blocks_of, put_pool

pytestmark = pytest.mark.usefixtures("same_uuids")

RANGE, WITHIN = "10.0.0.0/28", "10.0.0.8/29"
SEEDS = range(10)
STEPS = 30


class Killed(BaseException):
    """The end of a process."""


class Theirs:
    """Nodes of whereabouts. A call of their plugin reads first, and writes some steps later."""

    def __init__(self, server: FakeApi, chance: random.Random, *, shared: bool) -> None:
        self._server = server
        self._chance = chance
        self._shared = shared
        self.uses: dict[str, str] = {}  # addresses by pod
        self._begun: list[tuple[str, IPPool, str, bool]] = []
        self._count = 0

    def act(self) -> None:
        """One step of one of them."""
        what = self._chance.random()
        if what < 0.4 and len(self.uses) < 3:
            self._begin()
        elif what < 0.8 and self._begun:
            self._finish(*self._begun.pop(self._chance.randrange(len(self._begun))))
        elif self.uses:
            self.delete(self._chance.choice(sorted(self.uses)))

    def end(self) -> None:
        """All calls are over, and all pods."""
        for begun in self._begun:
            self._finish(*begun)
        for pod in list(self.uses):
            self.delete(pod)

    def _begin(self) -> None:
        range_ = self._chance.choice([RANGE, WITHIN] if self._shared else [RANGE])
        name = ippool_name("", range_)
        try:
            pool = self._server.look(IPPool, name, NAMESPACE)
        except NotFound:
            spec = IPPoolSpec(range=range_, allocations={})
            self._server.put(IPPool(metadata=Meta(name=name, namespace=NAMESPACE), spec=spec))
            return
        taken = {entry.address for entry in entries(pool)}
        first, size = (1, 14) if range_ == RANGE else (9, 6)
        base = parse("10.0.0.0")
        free = [base + each for each in range(first, first + size) if base + each not in taken]
        self._chance.shuffle(free)
        for address in free:
            if self._shared and self._reservation(address) is not None:
                continue
            self._count += 1
            pod = f"theirs{self._count}"
            self._begun.append((pod, pool, text(address), self._shared))
            return

    def _finish(self, pod: str, seen: IPPool, address: str, shared: bool) -> None:
        name = seen.metadata.name
        try:
            now = self._server.look(IPPool, name, NAMESPACE)
        except NotFound:
            return
        if now.metadata.resource_version != seen.metadata.resource_version:
            return  # its patch tests that, and the runtime tries again with another pod of ours
        offset = str(parse(address) - parse(seen.spec.range.partition("/")[0]))
        held = dict(now.spec.allocations or {})
        held[offset] = IPAllocation(id=f"{pod}-1", podref=f"ns/{pod}", ifname="eth0")
        self._server.put(replace(now, spec=replace(now.spec, allocations=held)))
        if shared:
            spec = OverlappingReservationSpec(podref=f"ns/{pod}", ifname="eth0")
            meta = Meta(name=reservation_name("", parse(address)), namespace=NAMESPACE)
            try:
                self._server.store_new(OverlappingRangeIPReservation(metadata=meta, spec=spec))
            except AlreadyExists:
                self._remove(pod, address)  # the ADD failed: DEL, which looks at no podref
                return
        self.uses[pod] = address

    def delete(self, pod: str) -> None:
        self._remove(pod, self.uses.pop(pod))

    def _remove(self, pod: str, address: str) -> None:
        for pool in self._server.look_at_all(IPPool).items:
            held = {
                key: each
                for key, each in (pool.spec.allocations or {}).items()
                if each.id != f"{pod}-1"
            }
            if held != pool.spec.allocations:
                self._server.put(replace(pool, spec=replace(pool.spec, allocations=held)))
        found = self._reservation(parse(address))
        if self._shared and found is not None:
            self._server.remove(type(found), found.metadata.name, NAMESPACE)

    def _reservation(self, address: int) -> OverlappingRangeIPReservation | None:
        try:
            name = reservation_name("", address)
            return self._server.look(OverlappingRangeIPReservation, name, NAMESPACE)
        except NotFound:
            return None


class History:
    """One random history of two nodes of ours beside theirs."""

    def __init__(self, seed: int, directory: Path, *, shared: bool) -> None:
        self.chance = random.Random(seed)
        self.server = FakeApi()
        self.ipam = {"range": RANGE, "enable_overlapping_ranges": shared}
        self.pool = put_pool(self.server, RANGE, shared=shared, size=4, compat="Coexist")
        self.theirs = Theirs(self.server, self.chance, shared=shared)
        clock = Clock()
        self.nodes = [
            ClusterNode(
                self.server,
                directory / each,
                each,
                clock=clock,
                faults=self._call,
                compat="Coexist",
            )
            for each in ("node-a", "node-b")
        ]
        self.uses: dict[str, tuple[ClusterNode, str, str]] = {}  # container, address by pod
        self._is_quiet = False
        self._count = 0

    def _call(self, verb: str, kind: str, name: str) -> Fault | None:
        """Before each call of ours."""
        if self._is_quiet:
            return None
        for _ in range(self.chance.randrange(3)):
            self.theirs.act()
        what = self.chance.random()
        if what < 0.02:
            raise Killed
        if what < 0.06:
            return self.chance.choice([Fault.LOST_ANSWER, Fault.LOST_REQUEST])
        return None

    def step(self) -> None:
        node = self.chance.choice(self.nodes)
        what = self.chance.random()
        mine = [pod for pod in sorted(self.uses) if self.uses[pod][0] is node]
        if what < 0.35 and len(self.uses) < 6:
            self._count += 1
            self._add(node, f"ours{self._count}")
        elif what < 0.55 and mine:
            self._delete(self.chance.choice(mine))
        elif what < 0.65 and mine:  # the pod gets a new sandbox
            pod = self.chance.choice(mine)
            self._delete(pod)
            self._add(node, pod)
        elif what < 0.7:
            pool = self.server.look(AddressPool, self.pool.metadata.name)
            mirror = not pool.spec.mirror
            self.server.put(replace(pool, spec=replace(pool.spec, mirror=mirror)))
        else:
            self._work(node)
        self.require_apart()

    def _add(self, node: ClusterNode, pod: str) -> None:
        self._count += 1
        container = f"{pod}-{self._count}"
        try:
            (address,) = node.add(pod, dict(self.ipam), container=container)
        except CNIError as error:
            assert error.code in (Code.TRY_AGAIN, Code.NO_FREE_ADDRESS), error
        except Killed:
            node.restart()
        else:
            self.uses[pod] = node, container, address
            self.require_apart()
            return
        node.delete(pod, container, dict(self.ipam))

    def _delete(self, pod: str) -> None:
        node, container, _ = self.uses.pop(pod)
        node.delete(pod, container, dict(self.ipam))

    def _work(self, node: ClusterNode) -> None:
        try:
            node.steps(1, self.chance.choice([2.0, 15.0, 320.0]))
        except Killed:
            node.restart()

    def require_apart(self) -> None:
        ours = {address: pod for pod, (_, _, address) in self.uses.items()}
        assert len(ours) == len(self.uses)
        twice = {pod: ours[each] for pod, each in self.theirs.uses.items() if each in ours}
        assert not twice, f"{twice} of {self.uses} and {self.theirs.uses}"

    def end(self) -> None:
        """All pods end; nothing of ours is left."""
        for pod in list(self.uses):
            self._delete(pod)
        self._is_quiet = True
        self.theirs.end()
        for node in self.nodes:
            node.lessee.leaving = True
        for seconds in (30.0, 30.0, UNUSED, 320.0, 320.0, 30.0, 30.0, 30.0, 320.0, 30.0, 30.0):
            for node in self.nodes:
                node.lessee.leaving = True
                node.steps(1, seconds)
        assert blocks_of(self.server) == []
        left = [
            (pool.metadata.name, entry)
            for pool in self.server.look_at_all(IPPool).items
            for entry in entries(pool)
        ]
        assert left == []
        reserved = self.server.look_at_all(OverlappingRangeIPReservation).items
        assert [each.spec.podref for each in reserved if "ours" in each.spec.podref] == []


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_no_address_is_in_use_on_both_sides_and_nothing_is_left(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, shared: bool
) -> None:
    for module in (placeholders, settling, takeover):  # they wait a little where others forestall
        monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    history = History(seed, memory_path, shared=shared)
    for _ in range(STEPS):
        history.step()
    history.end()
