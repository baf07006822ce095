"""The holder or the borrower dies at any boundary of a call while an address is ceded and back.

As in test_crashes.py: before and after each call to the API server and each transaction.
"""

from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from cni.spec.errors import CNIError
from ipam.cluster.ceding import REVIEW_EVERY
from ipam.cluster.objects import AddressBlock
from tests.unit.ipam.cluster.audit import audit_settled
from tests.unit.ipam.cluster.nodes import ClusterNode
from tests.unit.ipam.cluster.test_ceding import Fabric
from tests.unit.ipam.cluster.test_crashes import Kill, Killed, armed, disarmed

HOLDER, BORROWER = "a", "b"
BLOCKS = 8  # addresses: two blocks, of which the holder gets both


def fabric_of(stack: ExitStack, directory: Path) -> Fabric:
    """The holder has every block, with a pod in each, and the controller knows it."""
    fabric = Fabric(stack, directory, HOLDER, BORROWER, size=BLOCKS)
    for number in range(9):
        fabric.add(HOLDER, f"a-{number}")
    fabric.work(3, 11.0)
    return fabric


def attempt(fabric: Fabric, pod: str) -> bool:
    """ADDs of the borrower until one gets an address."""
    for _ in range(6):
        with suppress(CNIError):
            fabric.add(BORROWER, pod)
            return True
        fabric.work(1, 1.5)
    return False


def life(fabric: Fabric, pod: str) -> None:
    """An address is ceded, borrowed, confirmed, returned and taken back."""
    assert attempt(fabric, pod)
    fabric.work(2, 10.0)
    fabric.nodes[BORROWER].delete(pod)
    fabric.work(3, 3.0)
    fabric.work(3, REVIEW_EVERY)


@pytest.fixture(scope="module", params=[HOLDER, BORROWER])
def who(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def boundaries(who: str, tmp_path_factory: pytest.TempPathFactory) -> int:
    with ExitStack() as stack:
        fabric = fabric_of(stack, tmp_path_factory.mktemp("count"))
        kill = Kill()
        armed(fabric.nodes[who], kill)
        life(fabric, "p")
        return kill.count


@pytest.mark.parametrize("boot", ["boot-1", "boot-2"], ids=["same boot", "next boot"])
def test_a_kill_at_any_boundary_leaves_each_address_with_one_node(
    who: str, boundaries: int, boot: str, tmp_path: Path
) -> None:
    assert boundaries > 30
    for at in range(1, boundaries + 1):
        with ExitStack() as stack:
            fabric = fabric_of(stack, tmp_path / str(at))
            node = fabric.nodes[who]
            armed(node, Kill(at))
            with suppress(Killed):
                life(fabric, "p")
            if boot != node.boot:
                fabric.cluster.change_node(node.name, boot_id=boot)
            disarmed(node, boot)
            goes_on(fabric, node, at)


def goes_on(fabric: Fabric, node: ClusterNode, at: int) -> None:
    """All goes on after the kill, and nothing is left of it."""
    fabric.work(2, 5.0)
    fabric.nodes[BORROWER].delete("p")
    life(fabric, "again")
    fabric.work(4, REVIEW_EVERY)
    assert fabric.sub_blocks() == {}, at
    assert fabric.ceded() == set(), at
    states = {each.spec.state for each in fabric.api.look_at_all(AddressBlock).items}
    assert states == {"Active"}, at
    audit_settled(fabric.api, [node])
