"""The agent dies before or after any call to the API server and any transaction of the lessee.

A kill within a transaction is one before or after it: SQLite sees to that (test_kills.py).
"""

from contextlib import suppress
from pathlib import Path

import pytest
from msgspec.structs import replace

from cni.spec.errors import CNIError
from ipam.leases.lessee import CONFIRM_EVERY
from ipam.leases.objects import AddressBlock
from tests.fake_api import FakeApi, Fault
from tests.unit.ipam.leases.audit import audit, audit_settled
from tests.unit.ipam.leases.boundaries import Kill, Killed, armed, disarmed
from tests.unit.ipam.leases.nodes import ClusterNode, blocks_of, put_pool

pytestmark = pytest.mark.slow


def life(node: ClusterNode) -> None:
    """Claims, a status, a confirmation with a fence, a lost block, and returns."""
    for number in range(5):
        node.add(f"p{number}")
    node.steps(2)
    for each in node.server.look_at_all(AddressBlock, {"spec.holder.node": node.name}).items[:1]:
        node.server.put(fenced(each))
    node.steps(1, CONFIRM_EVERY)
    for number in range(1, 5):
        node.delete(f"p{number}")
    node.steps(3)
    node.forced = set(blocks_of(node.server, node.name)[:1])
    for name in node.forced:
        node.server.remove(AddressBlock, name)
    node.steps(1, CONFIRM_EVERY)
    node.delete("p0")
    node.lessee.leaving = True
    node.steps(3)


def fenced(block: AddressBlock) -> AddressBlock:
    return replace(block, spec=replace(block.spec, state="Reclaiming"))


def cluster(directory: Path) -> tuple[FakeApi, ClusterNode, ClusterNode]:
    server = FakeApi()
    put_pool(server, size=4)
    node = ClusterNode(server, directory / "a", kept=True)
    other = ClusterNode(server, directory / "b", "node-b", clock=node.clock, kept=True)
    other.add("q0")
    return server, node, other


@pytest.fixture(scope="module")
def boundaries(tmp_path_factory: pytest.TempPathFactory) -> int:
    server, node, other = cluster(tmp_path_factory.mktemp("count"))
    kill = Kill()
    armed(node, kill)
    life(node)
    audit(server, [node, other])
    assert blocks_of(server, "node-a") == []
    node.close()
    other.close()
    return kill.count


@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("boot", ["boot-1", "boot-2"])
def test_a_kill_at_any_boundary_loses_and_doubles_nothing(
    memory_path: Path, boundaries: int, part: int, boot: str
) -> None:
    assert boundaries > 50
    for at in range(1 + part, boundaries + 1, 8):
        server, node, other = cluster(memory_path / f"{at}")
        kill = Kill(at)
        armed(node, kill)
        with suppress(Killed):  # the last ones are there only if other claims were lost
            life(node)
        audit(server, [node, other])
        disarmed(node, boot)
        for number in range(5):  # the runtime undoes unanswered calls
            node.delete(f"p{number}")
        node.add("after")
        node.forced = set()
        other.add("q1")
        node.steps(1, 30.0)
        audit(server, [node, other])
        node.steps(1, CONFIRM_EVERY)
        node.steps(3, 20.0)
        audit_settled(server, [node, other])
        node.close()
        other.close()


@pytest.mark.parametrize("fault", list(Fault))
def test_any_call_may_fail(memory_path: Path, fault: Fault) -> None:
    """Each call in its turn fails in this way, the agent lives on."""
    at = 0
    while True:
        at += 1
        server, node, other = cluster(memory_path / f"{fault.name}-{at}")
        count = 0

        def faults(verb: str, kind: str, name: str) -> Fault | None:
            nonlocal count
            count += 1
            return fault if count == at else None  # noqa: B023 - called in this turn

        node.api.faults = faults
        refused = 0
        for number in range(5):
            try:
                node.add(f"p{number}")
            except CNIError:
                refused += 1
        audit(server, [node, other])
        node.steps(1, CONFIRM_EVERY)
        for number in range(5):
            node.delete(f"p{number}")
        node.steps(3)
        audit(server, [node, other])
        server.deliver()
        audit(server, [node, other])
        assert refused <= 5
        node.api.faults = None
        other.add("q1")
        node.add("after")
        node.steps(1, 30.0)
        node.steps(1, CONFIRM_EVERY)
        node.steps(3, 20.0)
        audit_settled(server, [node, other])
        node.close()
        other.close()
        if count < at:
            break
    assert at > 15
