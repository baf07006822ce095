"""Row A10 in small: pods placed at random get addresses as long as the pool has free ones."""

import random
from contextlib import ExitStack, suppress
from pathlib import Path

from cni.spec.errors import CNIError
from tests.unit.ipam.cluster.test_ceding import Fabric

NODES = 6
PODS = 12  # of 14 addresses, in four blocks for six nodes
ROUNDS = 10
PATIENCE = 5  # seconds


def test_no_add_fails_for_long_while_an_address_is_free(tmp_path: Path) -> None:
    chance = random.Random(14)
    with ExitStack() as stack:
        names = [f"n{number}" for number in range(NODES)]
        fabric = Fabric(stack, tmp_path, *names, size=4)
        placed: dict[str, tuple[str, str]] = {}
        borrowed = 0
        for number in range(ROUNDS):
            for pod in chance.sample(sorted(placed), len(placed) // 3):
                name, _ = placed.pop(pod)
                fabric.nodes[name].delete(pod)
            fabric.work(PATIENCE, 1.0)  # what was freed just now may take that long
            while len(placed) < PODS:
                pod, name = f"p{number}-{len(placed)}", chance.choice(names)
                placed[pod] = name, had_soon(fabric, name, pod)
            addresses = [address for _, address in placed.values()]
            assert len(set(addresses)) == PODS
            borrowed += len(fabric.sub_blocks())
        assert borrowed > 0


def had_soon(fabric: Fabric, name: str, pod: str) -> str:
    """The address of a pod whose ADD the runtime repeats."""
    for _ in range(PATIENCE):
        with suppress(CNIError):
            return fabric.add(name, pod)
        fabric.work(1, 1.0)
    raise AssertionError(f"{pod} on {name} gets no address within {PATIENCE} s")
