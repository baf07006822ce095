"""What was lost, put back or deleted while addresses were ceded: none is given twice."""

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from msgspec.structs import replace

from cni.spec.errors import CNIError, Code
from ipam import fsck
from ipam.addresses import parse
from ipam.cluster.ceding import REVIEW_EVERY
from ipam.cluster.lessee import Lessee
from ipam.cluster.objects import AddressBlock
from ipam.store_files import StoreFiles
from tests.fake_api import FakeApi, Fault, Faults
from tests.unit.ipam.cluster.audit import audit, rows_of
from tests.unit.ipam.cluster.nodes import ClusterNode
from tests.unit.ipam.cluster.test_ceding import Fabric, free_of, full_fabric
from tests.waiting import until


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Fabric]:
    """As in test_ceding: only node c has free addresses, two of them."""
    with ExitStack() as stack:
        yield full_fabric(stack, tmp_path)


def once(verb: str, name: str, fault: Fault) -> Faults:
    """The fault, at the next such call."""
    left = [fault]
    return lambda called, _, which: left.pop() if left and (called, which) == (verb, name) else None


def block_of(fabric: Fabric, name: str) -> AddressBlock:
    (block,) = [
        each for each in fabric.blocks() if each.spec.holder.node == name and not each.spec.cover
    ]
    return block


def confirm(node: ClusterNode) -> None:
    node.lessee._confirm_at = node.clock()
    node.lessee.step()


def marked(node: ClusterNode, address: str) -> bool:
    """Whether the node's store has it that others may lease the address."""
    number = parse(address)
    return any(part.first <= number <= part.last for row in rows_of(node) for part in row.ceded)


# --- a store that lacks what was ceded --------------------------------------------------------


def with_an_older_store(full: Fabric) -> tuple[ClusterNode, str]:
    """Node c after a power loss that took the mark of what it ceded to node a."""
    node = full.nodes["c"]
    node.close()
    older = node.directory.with_name("older")
    shutil.copytree(node.directory, older)
    address = full.borrow("a", "one-more")
    assert marked(node, address)
    node.close()
    shutil.rmtree(node.directory)
    shutil.copytree(older, node.directory)
    return node, address


@pytest.mark.parametrize("what", ["cedes", "takes back"])
def test_a_store_without_a_mark_writes_no_list_before_it_has_taken_it_over(
    full: Fabric, what: str
) -> None:
    if what == "takes back":  # another address is ceded, of which the store knows
        full.borrow("b", "short-lived")
    node, address = with_an_older_store(full)
    assert not marked(node, address)
    if what == "takes back":
        full.nodes["b"].delete("short-lived")
        full.nodes["b"].steps(2)
    full.cluster.change_node("c", boot_id="boot-2")
    node.restart("boot-2")
    block = block_of(full, "c")
    # The controller writes to the block just before the node's first confirmation does.
    node.api.faults = once("update", block.metadata.name, Fault.CONFLICT)
    node.lessee.step()
    if what == "cedes":
        (free,) = {each for each in free_of(full, "c") if each != address}
        full.api.put(wanting(block_of(full, "c"), free))
    node.notice()
    full.cluster.now += 1.0
    node.lessee._sharing.ceding._review_at.clear()
    node.lessee.step()
    assert address in full.ceded()
    confirm(node)
    audit(full.api, list(full.nodes.values()))
    assert marked(node, address)


def wanting(block: AddressBlock, *addresses: str) -> AddressBlock:
    return replace(block, spec=replace(block.spec, cede_wanted=addresses))


def test_a_store_that_was_put_back_in_its_boot_writes_no_list(full: Fabric) -> None:
    """The status is ahead of it: it hands out nothing until the next boot, and cedes nothing."""
    node, address = with_an_older_store(full)
    node.restart()
    full.work(3, 3.0)
    assert {row.state for row in rows_of(node)} == {"unconfirmed"}
    (free,) = {each for each in free_of(full, "c") if each != address}
    full.api.put(wanting(block_of(full, "c"), free))
    full.work(3, REVIEW_EVERY)
    assert address in full.ceded()
    full.cluster.change_node("c", boot_id="boot-2")
    node.restart("boot-2")
    full.work(2, 30.0)
    assert marked(node, address)


def test_a_store_that_was_built_again_cedes_nothing_that_a_pod_of_its_node_holds(
    full: Fabric,
) -> None:
    """The object lists as recalled what its holder has taken back, and uses again."""
    address = full.borrow("a", "one-more")
    full.nodes["a"].delete("one-more")
    full.work(2, 3.0)
    assert full.borrow("c", "own", address=address) == address
    assert address in block_of(full, "c").spec.recalled
    node = full.nodes["c"]
    node.close()
    assert fsck.rebuild(node.directory, lambda line: None)
    node.restart()
    (free,) = free_of(full, "c")
    full.api.put(wanting(block_of(full, "c"), free))  # meanwhile another node asks
    full.work()
    assert full.ceded() == {free}
    other = full.borrow("b", "one-more")
    assert other == free
    full.work(4, REVIEW_EVERY)
    assert not marked(node, address)
    assert full.sub_blocks() == {other: "b"}
    assert full.ceded() == {other}


# --- a sub-block that somebody deleted --------------------------------------------------------


def without_sub_block(full: Fabric) -> tuple[ClusterNode, AddressBlock]:
    """Node a, whose pod has an address of c's block. Its sub-block was deleted by force."""
    full.borrow("a", "one-more")
    (sub_block,) = [each for each in full.blocks() if each.spec.cover]
    full.api.remove(AddressBlock, sub_block.metadata.name)
    return full.nodes["a"], sub_block


def states(node: ClusterNode, name: str) -> set[str]:
    return {row.state for row in rows_of(node) if row.name == name}


def test_a_deleted_sub_block_is_leased_again_while_its_address_is_ceded(full: Fabric) -> None:
    node, sub_block = without_sub_block(full)
    confirm(node)
    assert full.sub_blocks() == {sub_block.spec.first: "a"}
    assert states(node, sub_block.metadata.name) == {"usable"}


def taken_back(full: Fabric, sub_block: AddressBlock) -> None:
    full.cluster.now += 2 * REVIEW_EVERY
    full.nodes["c"].lessee.step()
    assert full.add("c", "own", sub_block.spec.first) == sub_block.spec.first


def fenced(full: Fabric, sub_block: AddressBlock) -> None:
    """The cover's holder is lost. The controller may have looked for sub-blocks already."""
    block = block_of(full, "c")
    full.api.put(replace(block, spec=replace(block.spec, state="Reclaiming")))


@pytest.mark.parametrize("meanwhile", [taken_back, fenced])
@pytest.mark.parametrize("fault", [None, Fault.LOST_ANSWER])
def test_a_deleted_sub_block_is_lost_when_its_address_may_be_anothers(
    full: Fabric, meanwhile: Callable[[Fabric, AddressBlock], None], fault: Fault | None
) -> None:
    node, sub_block = without_sub_block(full)
    name = sub_block.metadata.name
    meanwhile(full, sub_block)
    node.api.faults = once("create", name, fault) if fault else None
    confirm(node)
    full.cluster.now += 5.0
    confirm(node)
    assert full.sub_blocks() == {}
    assert states(node, name) == {"lost"}
    assert "AddressBlockLost" in {event.reason for event in full.api.events}


# --- an agent that is replaced, and one without an API server -----------------------------------


def test_a_lessee_that_was_closed_changes_nothing_that_the_next_one_may_have_changed(
    full: Fabric,
) -> None:
    """An answer came too late: the next agent leases already."""
    node = full.nodes["c"]
    address = full.borrow("a", "one-more")
    full.nodes["a"].delete("one-more")
    full.work(2, 3.0)
    former, name = node.lessee, block_of(full, "c").metadata.name
    looking = former._sharing.ceding._is_leased

    def replaced(*arguments: object) -> bool:
        answer = looking(*arguments)  # type: ignore[arg-type]
        former.close()
        return answer

    former._sharing.ceding._is_leased = replaced  # type: ignore[method-assign, assignment]
    instance = block_of(full, "c").spec.holder.instance
    with pytest.raises(CNIError) as raised:
        former._sharing.ceding.take_back(name, instance)
    assert raised.value.code == Code.TRY_AGAIN
    assert marked(node, address)


def test_a_lessee_that_cannot_cede_waits_before_it_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told of a block while the API server goes away."""
    monkeypatch.setattr("ipam.cluster.lessee.LOOK_EVERY", 600.0)
    server = FakeApi()
    server.add_node("node-a", "machine", "uuid", "boot-1")
    files = StoreFiles(tmp_path, report=lambda text: None)
    lessee = Lessee(server.client("node-a"), files, "node-a", "boot-1")
    steps: list[bool] = []
    stepped = threading.Condition()
    step = lessee.step

    def counted() -> float:
        wait = step()
        with stepped:
            steps.append(lessee._in_touch)
            stepped.notify_all()
        return min(wait, 600.0)

    lessee.step = counted  # type: ignore[method-assign]
    lessee.start()
    try:
        until(lambda: any(steps))
        server.down = True
        lessee._in_touch = False
        before = len(steps)
        lessee._sharing.notice("blue.10.0.0.0-30")
        until(lambda: len(steps) > before)
        with stepped:  # a defect makes thousands of steps a second
            assert not stepped.wait_for(lambda: len(steps) > before + 50, timeout=1.0)
    finally:
        lessee.close()
        files.close()
