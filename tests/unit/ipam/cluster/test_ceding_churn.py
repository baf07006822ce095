"""Row A10: pods placed at random get addresses as long as the pool has free ones.

The time is simulated, in steps of half a second: the controller makes a round, and each node does
what is due, a little more rarely than real ones. An ADD that fails is tried again when a real one
tries.

    .venv/bin/python -m pytest -s tests/unit/ipam/cluster/test_ceding_churn.py

shows how long ADDs wait, and the load.
"""

import random
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import msgspec
import pytest

from cni.spec.errors import CNIError
from ipam.cluster.objects import ReclaimSpec
from ipam.cluster.wants import PATIENCE, Want
from tests.unit.ipam.cluster.audit import audit
from tests.unit.ipam.cluster.test_ceding import Fabric

pytestmark = pytest.mark.usefixtures("same_uuids")

LONGEST = 6.0  # seconds: no ADD of few nodes waits for so long while an address is free
BORROWS_WITHIN = 3.0  # seconds, for 99 of 100 ADDs that get a sub-block
STEP = 0.5  # seconds
SOON = (0.0, 0.5, 1.0, 1.5)  # seconds after which an ADD tries; then each second (store.py)
SETTLED = 5.0  # seconds after which what was freed can be had elsewhere
WRITES = ("create", "update", "update_status", "delete", "patch")


class Placed(msgspec.Struct):
    """A pod on a node, and since when it waits, or its address."""

    node: str
    since: float
    address: str = ""


class Load(msgspec.Struct):
    """What all clients asked of the API server in so many seconds, and how long ADDs waited.

    `borrowing` are the waits of those that got a sub-block.
    """

    seconds: float
    calls: Counter[tuple[str, str]]
    waits: list[float]
    borrowed: int
    borrowing: list[float]

    @property
    def writes(self) -> int:
        return sum(count for (verb, _), count in self.calls.items() if verb in WRITES)

    def __str__(self) -> str:
        waits, total = self.waits, sum(self.calls.values())
        by_verb = ", ".join(
            f"{verb} {kind} {count}" for (verb, kind), count in self.calls.most_common()
        )
        return (
            f"{len(waits)} ADDs in {self.seconds:.0f} s: "
            f"{_distribution(waits)}; {len(self.borrowing)} that borrowed: "
            f"{_distribution(self.borrowing)}; "
            f"{self.writes} writes ({self.writes / self.seconds:.1f}/s, "
            f"{self.writes / len(waits):.1f} for each ADD), {total} requests "
            f"({total / self.seconds:.1f}/s); {self.borrowed} sub-blocks; {by_verb}"
        )


def p99(waits: list[float]) -> float:
    """What 99 of 100 waited at most."""
    return sorted(waits)[(len(waits) * 99 - 1) // 100]


def _distribution(waits: list[float]) -> str:
    counts = ", ".join(f"{wait:g} s: {count}" for wait, count in sorted(Counter(waits).items()))
    return f"p99 {p99(waits):g} s ({counts})"


class Churn:
    """Pods on the nodes of a fabric."""

    def __init__(self, fabric: Fabric, longest: float) -> None:
        self._fabric = fabric
        self._longest = longest
        self._chance = random.Random(14)
        self.placed: dict[str, Placed] = {}
        self._made = 0
        self.load = Load(0.0, Counter(), [], 0, [])
        for name, node in fabric.nodes.items():
            attempts = node.lessee._attempts
            attempts.waiting = partial(  # type: ignore[method-assign]
                self._waiting, name, attempts.waiting
            )

    def run(self, pods: int, rounds: int, share: float) -> Load:
        """Rounds in which that share of the pods ends, and others begin elsewhere."""
        before, began = self._calls(), self._fabric.cluster.now
        for _ in range(rounds):
            for pod in self._chance.sample(sorted(self.placed), int(len(self.placed) * share)):
                self._fabric.nodes[self.placed.pop(pod).node].delete(pod)
            self._work(SETTLED)
            self._begin(pods)
            self.load.borrowed += len(self._fabric.sub_blocks())
            audit(self._fabric.api, list(self._fabric.nodes.values()))
        self.load.calls = self._calls() - before
        self.load.seconds = self._fabric.cluster.now - began
        return self.load

    def _begin(self, pods: int) -> None:
        """Place pods until there are so many, and wait until each has an address of its own."""
        names = list(self._fabric.nodes)
        while len(self.placed) < pods:
            self._made += 1
            now = self._fabric.cluster.now
            self.placed[f"p{self._made}"] = Placed(self._chance.choice(names), now)
        while waiting := [name for name, pod in self.placed.items() if not pod.address]:
            for name in waiting:
                self._add(name, self.placed[name])
            self._work(STEP)
        assert len({pod.address for pod in self.placed.values()}) == pods

    def _add(self, name: str, pod: Placed) -> None:
        waited = self._fabric.cluster.now - pod.since
        if waited not in SOON and waited % 1.0 != 0.5:
            return
        with suppress(CNIError):
            pod.address = self._fabric.add(pod.node, name)
            self.load.waits.append(waited)
            if pod.address in self._fabric.sub_blocks():
                self.load.borrowing.append(waited)
        assert pod.address or waited < self._longest, (
            f"{name} on {pod.node}: none after {waited:g} s"
        )

    def _waiting(self, name: str, asking: Callable[[Want], int], want: Want) -> int:
        """How many ADDs of a node wait. Those that begin together ask together, and the lessee
        leases for all; here each asks alone."""
        waiting = sum(pod.node == name and not pod.address for pod in self.placed.values())
        return waiting if asking(want) else 0

    def _work(self, seconds: float) -> None:
        fabric = self._fabric
        for _ in range(round(seconds / STEP)):
            fabric.cluster.now += STEP
            fabric.cluster.round()
            for block in fabric.blocks():  # what each node's watch shows
                if block.spec.cede_wanted:
                    fabric.nodes[block.spec.holder.node].lessee._sharing.notice(block.metadata.name)
            for node in fabric.nodes.values():
                node.lessee.step()

    def _calls(self) -> Counter[tuple[str, str]]:
        """Without the reads of the controller: a real one follows a watch."""
        by_controller = self._fabric.cluster.client.calls
        every = Counter({key: by_controller[key] for key in by_controller if key[0] in WRITES})
        for node in self._fabric.nodes.values():
            every.update(node.api.calls)
        return every


def churn(
    directory: Path,
    range_: str,
    nodes: int,
    pods: int,
    exclude: tuple[str, ...] = (),
    longest: float = LONGEST,
    rounds: int = 10,
) -> Load:
    """Rounds in which a third of the pods ends and others begin, in blocks of 4."""
    with ExitStack() as stack:
        names = [f"n{number}" for number in range(nodes)]
        fabric = Fabric(
            stack, directory, *names, range_=range_, exclude=exclude, reclaim=ReclaimSpec()
        )
        load = Churn(fabric, longest).run(pods, rounds, share=1 / 3)
        print(f"{range_}, {nodes} nodes, {pods} pods: {load}")  # noqa: T201 - pytest -s shows it
        return load


def test_no_add_fails_for_long_while_an_address_is_free(tmp_path: Path) -> None:
    """In small: 12 pods of 14 addresses, in four blocks for six nodes."""
    load = churn(tmp_path, "10.64.0.0/28", nodes=6, pods=12)
    assert load.borrowed > 0


@pytest.mark.parametrize(
    ("range_", "pods", "exclude"),
    [
        ("10.64.0.0/26", 60, ("10.64.0.1", "10.64.0.2")),
        ("10.64.0.0/24", 200, ()),
    ],
    ids=["60 addresses, 60 pods", "254 addresses, 200 pods"],
)
def test_no_add_fails_for_long_on_a_whole_fabric(
    tmp_path: Path, range_: str, pods: int, exclude: tuple[str, ...]
) -> None:
    """No ADD fails: each gets its address while it waits.

    Some 500 ADDs borrow in so many rounds, enough for a p99.
    """
    load = churn(
        tmp_path, range_, nodes=64, pods=pods, exclude=exclude, longest=PATIENCE, rounds=30
    )
    assert load.borrowed > 0
    assert p99(load.borrowing) < BORROWS_WITHIN
