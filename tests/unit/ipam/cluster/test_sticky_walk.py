"""Sticky addresses through random histories of pods, nodes, reservations and lost answers."""

import random
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from cni.spec.errors import CNIError
from ipam.cluster.objects import AddressBlock, AddressReservation
from tests.fake_api import Fault
from tests.unit.ipam.cluster.audit import audit
from tests.unit.ipam.cluster.controller.cluster import Cluster
from tests.unit.ipam.cluster.nodes import ClusterNode, put_pool
from tests.unit.ipam.cluster.test_sticky import IPAM, reserve

pytestmark = pytest.mark.usefixtures("same_uuids")

PODS = ["web-0", "web-1", "db-0"]
STEPS = 80
FAULTS = [Fault.LOST_ANSWER, Fault.LOST_REQUEST, Fault.CONFLICT]


class Walk:
    """Three nodes and a controller. A pod may come again before its former sandbox is gone."""

    def __init__(self, seed: int, directory: Path, stack: ExitStack) -> None:
        self.random = random.Random(seed)
        self.cluster = Cluster()
        put_pool(self.cluster.api, size=1, block_size=1)
        self.failing = 0.0
        self.nodes = []
        for name in "abc":
            node = ClusterNode(
                self.cluster.api,
                directory / name,
                f"node-{name}",
                clock=self.cluster.clock,
                kept=True,
                faults=self.fault,
            )
            stack.callback(node.close)
            self.nodes.append(node)
        self.number = 0
        self.living: dict[str, tuple[ClusterNode, str, str]] = {}  # by sandbox: pod and address
        self.kept: dict[str, str] = {}  # what a reservation keeps for a pod
        self.asked: set[str] = set()  # pods with a reservation, those whose ADD failed too

    def fault(self, verb: str, kind: str, name: str) -> Fault | None:
        return self.random.choice(FAULTS) if self.random.random() < self.failing else None

    @property
    def reserved(self) -> set[str]:
        """The sets that have a reservation."""
        found = self.cluster.api.look_at_all(AddressReservation).items
        return {each.spec.owner.name for each in found}

    def add(self, pod: str, node: ClusterNode) -> None:
        """The runtime's attempts at a new sandbox: a pod runs on one node, or was forced away."""
        self.number += 1
        sandbox = f"{pod}-{self.number}"
        is_reserved = pod.partition("-")[0] in self.reserved
        if is_reserved:
            self.asked.add(pod)
        with suppress(CNIError):
            (address,) = node.add(pod, IPAM, container=sandbox, uid=f"uid-{self.number}")
            others = [(pod, each) for _, pod, each in self.living.values()]
            assert address not in [each for _, each in others], f"{address} is given twice"
            self.living[sandbox] = (node, pod, address)
            if is_reserved:
                assert self.kept.setdefault(pod, address) == address, f"{pod} has another address"
            others_kept = {each for name, each in self.kept.items() if name != pod}
            assert address not in others_kept, f"{address} is another pod's"
            return
        node.delete(pod, sandbox)

    def delete(self, sandbox: str) -> None:
        node, pod, _ = self.living.pop(sandbox)
        node.delete(pod, sandbox)

    def reserve_or_not(self) -> None:
        """Reservations come when no pod of the set has an address, and go at any time."""
        owner = self.random.choice(["web", "db"])
        if owner in self.reserved:
            self.cluster.api.remove(AddressReservation, owner, "ns")
            self.kept = {pod: at for pod, at in self.kept.items() if not pod.startswith(owner)}
            self.asked = {pod for pod in self.asked if not pod.startswith(owner)}
        elif not any(pod.startswith(owner) for _, pod, _ in self.living.values()):
            self.settle()  # what the former reservation had is free
            reserve(self.cluster.api, owner, owner=owner)

    def settle(self) -> None:
        failing, self.failing = self.failing, 0.0
        for _ in range(6):
            self.pause(10.0)
        self.failing = failing

    def pause(self, seconds: float) -> None:
        self.cluster.now += seconds
        for node in self.nodes:
            node.lessee.step()
        self.cluster.round()

    def step(self) -> None:
        act = self.random.random()
        self.failing = self.random.choice([0.0, 0.0, 0.1])
        if act < 0.4:
            self.add(self.random.choice(PODS), self.random.choice(self.nodes))
        elif act < 0.7 and self.living:
            self.delete(self.random.choice(sorted(self.living)))
        elif act < 0.75:
            self.reserve_or_not()
        elif act < 0.8:
            node = self.random.choice(self.nodes)
            node.restart()
        else:
            self.pause(self.random.choice([1.0, 5.0, 30.0]))
        audit(self.cluster.api, self.nodes)


@pytest.mark.parametrize("seed", range(12))
def test_a_pods_address_is_its_own_and_stays(seed: int, memory_path: Path) -> None:
    with ExitStack() as stack:
        walk = Walk(seed, memory_path, stack)
        reserve(walk.cluster.api)
        for _ in range(STEPS):
            walk.step()
        for sandbox in list(walk.living):
            walk.delete(sandbox)
        walk.failing = 0.0
        walk.settle()
        blocks = walk.cluster.api.look_at_all(AddressBlock).items
        named = [block.spec.sticky.pod for block in blocks if block.spec.sticky.pod]
        assert len(named) == len(set(named)), "each pod has one block"
        # An ADD that fails after its block was made leaves the block to the pod's next ADD.
        assert walk.kept.keys() <= set(named) <= walk.asked, "and no other pod has any"
        assert {block.spec.state for block in blocks if block.spec.sticky.pod} <= {"Draining"}
        for pod, address in walk.kept.items():
            assert walk.nodes[0].add(pod, IPAM, container=f"{pod}-last") == [address]
