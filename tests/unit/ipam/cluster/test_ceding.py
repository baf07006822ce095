"""Nodes, a controller and a pool whose blocks are all leased: who gets the free addresses."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from cni.spec.errors import CNIError, Code
from ipam.addresses import parse
from ipam.blocks import LeasedBlock
from ipam.cluster.block_store import Survey, Surveyed
from ipam.cluster.borrowing import GIVEN_UP, UNWANTED
from ipam.cluster.ceding import REVIEW_EVERY
from ipam.cluster.lessee import LOOK_EVERY
from ipam.cluster.names import pool_name
from ipam.cluster.objects import AddressBlock, AddressRequest, RequestStatus
from ipam.cluster.returns import Empties
from ipam.store import AddressTaken
from tests.unit.ipam.cluster.audit import audit, audit_settled
from tests.unit.ipam.cluster.controller.cluster import Cluster
from tests.unit.ipam.cluster.nodes import ClusterNode

RANGE = "10.64.0.0/28"  # 14 addresses, in four blocks of 4
POOL = "10.64.0.0-28"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


class Fabric:
    """Nodes with real stores, and a controller, whose rounds and steps the test makes."""

    def __init__(
        self,
        stack: ExitStack,
        directory: Path,
        *names: str,
        ceding: bool = True,
        size: int = 4,
        range_: str = RANGE,
        **spec: Any,  # noqa: ANN401 - of the pool
    ) -> None:
        self._stack = stack
        self._directory = directory
        self._range = range_
        self.cluster = Cluster()
        self.api = self.cluster.api
        name = pool_name("", range_)
        self.cluster.pool(range_, name=name, ceding=ceding, block_size=size, **spec)
        self.cluster.round()
        self.nodes = {name: self.node(name) for name in names}

    def node(self, name: str) -> ClusterNode:
        clock = self.cluster.clock
        node = ClusterNode(self.api, self._directory / name, name, clock=clock, kept=True)
        self._stack.callback(node.close)
        return node

    def add(self, name: str, pod: str, address: str = "") -> str:
        how = {"args": f"IP={address}"} if address else {}
        (given,) = self.nodes[name].add(pod, {"range": self._range}, **how)
        return given

    def fill(self, name: str, count: int) -> list[str]:
        return [self.add(name, f"{name}-{number}") for number in range(count)]

    def work(self, times: int = 1, seconds: float = 0.5) -> None:
        """Controller and nodes do what is due, a few times."""
        for _ in range(times):
            self.cluster.now += seconds
            self.cluster.round()
            for node in self.nodes.values():
                node.notice()
                node.lessee.step()
            audit(self.api, list(self.nodes.values()))

    def borrow(self, name: str, pod: str, address: str = "") -> str:
        """An ADD as a runtime has it: the first attempt asks, a later one gets the address."""
        for _ in range(6):
            try:
                return self.add(name, pod, address)
            except CNIError as error:
                assert error.code == Code.TRY_AGAIN, error
            self.work()
        raise AssertionError(f"{name} gets no address for {pod}")

    def borrow_or_none(self, name: str, pod: str) -> str | None:
        """The same of a node that is told that there is none, for a while."""
        for _ in range(6):
            try:
                return self.add(name, pod)
            except CNIError:
                self.work(1, 1.0)
        return None

    def code(self, name: str, pod: str, address: str = "") -> tuple[int, str]:
        with pytest.raises(CNIError) as raised:
            self.add(name, pod, address)
        return raised.value.code, raised.value.message

    def blocks(self) -> list[AddressBlock]:
        return list(self.api.look_at_all(AddressBlock).items)

    def sub_blocks(self) -> dict[str, str]:
        """The nodes of all sub-blocks, by address."""
        return {each.spec.first: each.spec.holder.node for each in self.blocks() if each.spec.cover}

    def ceded(self) -> set[str]:
        return {address for block in self.blocks() for address in block.spec.ceded}

    def requests(self) -> list[AddressRequest]:
        return list(self.api.look_at_all(AddressRequest).items)


@pytest.fixture
def full(stack: ExitStack, tmp_path: Path) -> Fabric:
    return full_fabric(stack, tmp_path)


def full_fabric(stack: ExitStack, directory: Path) -> Fabric:
    """Nodes a to d have one block each, and c has two addresses left: the others have none."""
    fabric = Fabric(stack, directory, "a", "b", "c", "d")
    sizes = {}
    for name in fabric.nodes:
        fabric.add(name, f"{name}-0")
    for block in fabric.blocks():
        last = int(block.spec.first.rpartition(".")[2])
        sizes[block.spec.holder.node] = 3 if last in (0, 12) else 4
    for name, size in sizes.items():
        for number in range(1, size if name != "c" else size - 2):
            fabric.add(name, f"{name}-{number}")
    fabric.work(8, 3.0)
    return fabric


def test_a_node_without_a_free_block_gets_an_address_of_another_nodes_block(full: Fabric) -> None:
    address = full.borrow("a", "one-more")
    assert full.sub_blocks() == {address: "a"}
    assert full.ceded() == {address}
    (block,) = [each for each in full.blocks() if each.spec.ceded]
    assert block.spec.holder.node == "c"
    assert block.spec.cede_wanted == ()
    other = full.borrow("a", "and-another")
    assert set(full.sub_blocks()) == {address, other}
    code, text = full.code("b", "too-many")
    full.work(2)
    code, text = full.code("b", "too-many")
    assert code == Code.NO_FREE_ADDRESS
    assert f"AddressPool {POOL}" in text
    audit_settled(full.api, list(full.nodes.values()))


def test_a_sub_block_goes_back_with_its_pod_and_the_holder_takes_the_address_back(
    full: Fabric,
) -> None:
    address = full.borrow("a", "one-more")
    full.nodes["a"].delete("one-more")
    full.work(3, 3.0)
    assert full.sub_blocks() == {}
    full.work(3, REVIEW_EVERY)
    assert full.ceded() == set()
    given = {full.add("c", "own-1"), full.add("c", "own-2")}
    assert address in given


def test_a_holder_that_needs_it_takes_an_address_back_that_nobody_leases(full: Fabric) -> None:
    address = full.borrow("a", "one-more")
    full.add("c", "own-1")
    full.nodes["a"].delete("one-more")
    full.work(2, 3.0)
    assert full.ceded() == {address}
    assert full.add("c", "own-2") == address
    assert full.ceded() == set()
    assert full.requests() == []


def test_a_node_that_comes_back_keeps_what_it_borrowed_and_what_it_ceded(full: Fabric) -> None:
    address = full.borrow("a", "one-more")
    for node in full.nodes.values():
        full.cluster.change_node(node.name, boot_id="boot-2")
        node.restart("boot-2")
    full.work(3, 30.0)
    assert full.ceded() == {address}
    assert full.nodes["a"].add("again", {"range": RANGE}, container="again") != []
    free = {full.add("c", f"new-{number}") for number in range(2)}
    assert address not in free
    audit_settled(full.api, list(full.nodes.values()))


def test_without_ceding_nobody_borrows_and_the_error_says_who_has_most_free(
    stack: ExitStack, tmp_path: Path
) -> None:
    fabric = Fabric(stack, tmp_path, "a", "b", ceding=False)
    fabric.fill("a", 1)
    held = 0
    while True:
        try:
            fabric.add("b", f"b-{held}")
        except CNIError as error:
            assert error.code == Code.NO_FREE_ADDRESS
            break
        held += 1
    fabric.work(3, 11.0)
    code, text = fabric.code("b", "one-more")
    assert code == Code.NO_FREE_ADDRESS
    assert f"AddressPool {POOL} has no free address for this node:" in text
    assert "of 14 are used" in text
    assert "most of the free addresses by nodes a (" in text
    assert fabric.sub_blocks() == {}
    assert fabric.ceded() == set()
    (asked,) = fabric.requests()
    assert (asked.spec.pool, asked.spec.node) == (POOL, "b")


@pytest.mark.parametrize("ceding", [False, True])
def test_an_address_is_had_soon_after_a_pod_ends_elsewhere(
    stack: ExitStack, tmp_path: Path, ceding: bool
) -> None:
    """Row A11: the node that has the last pod of a block gives the block back, or cedes."""
    fabric = Fabric(stack, tmp_path, "a", "b", ceding=ceding)
    fabric.fill("a", 1)
    held = 0
    while True:
        try:
            fabric.add("b", f"b-{held}")
        except CNIError:
            break
        held += 1
    fabric.nodes["a"].delete("a-0")
    for _ in range(5):
        fabric.work(1, 1.0)
        try:
            assert fabric.add("b", "late")
            break
        except CNIError:
            continue
    else:
        raise AssertionError("no address after 5 s")
    fabric.work(2, 100.0)


def test_an_address_is_had_soon_also_where_the_network_leaves_out_one_of_its_block(
    stack: ExitStack, tmp_path: Path
) -> None:
    """By the count of its holder a block with the broadcast address has always room."""
    fabric = Fabric(stack, tmp_path, "a", "b", range_="10.64.0.0/29")  # two blocks, three of each
    for pod in range(3):
        for name in fabric.nodes:
            fabric.add(name, f"{name}-{pod}")
    fabric.work(2, 1.0)  # its status is told, and the next one comes after ten seconds
    fabric.nodes["a"].delete("a-1")
    fabric.work(3, 1.0)
    assert fabric.borrow("b", "late")


def test_a_block_that_was_kept_empty_goes_back_when_another_node_asks(
    stack: ExitStack, tmp_path: Path
) -> None:
    """It was empty before the pool was full, so its holder has no reason to look."""
    fabric = Fabric(stack, tmp_path, "a", "b", ceding=False)
    fabric.fill("a", 1)
    fabric.nodes["a"].delete("a-0")
    fabric.work(8, 3.0)
    assert any(each.spec.holder.node == "a" for each in fabric.blocks())
    given = []
    for number in range(14):
        given.append(fabric.borrow_or_none("b", f"b-{number}"))
    assert None not in given
    assert len(set(given)) == 14


def test_a_requested_address_is_ceded_if_it_is_free(full: Fabric) -> None:
    free = free_of(full, "c")
    address = full.borrow("a", "by-name", address=free[0])
    assert address == free[0]
    assert full.sub_blocks() == {address: "a"}


def test_a_requested_address_that_a_pod_has_is_111_and_names_the_node(full: Fabric) -> None:
    taken = full.add("c", "own")
    codes = []
    for _ in range(4):
        with pytest.raises(CNIError) as raised:
            full.add("a", "by-name", address=taken)
        codes.append(raised.value.code)
        full.work()
    assert codes[-1] == Code.ADDRESS_TAKEN
    assert isinstance(raised.value, AddressTaken)
    assert "node c has leased" in raised.value.message


def test_a_request_is_deleted_when_it_is_served(full: Fabric) -> None:
    full.borrow("a", "one-more")
    assert full.requests() == []


@pytest.mark.parametrize("answers", [1, 3, 4])
def test_a_request_is_deleted_although_the_controller_answers_it_just_then(
    full: Fabric, answers: int
) -> None:
    """Others wait for the address that is offered to it, so it must not stay."""
    left = answers

    def answered(verb: str, kind: str, _name: str) -> None:
        nonlocal left
        if (verb, kind) == ("delete", AddressRequest.KIND) and left:
            left -= 1
            (request,) = full.requests()
            status = RequestStatus(offers=(f"10.99.0.{left}",))
            full.api.update_status(replace(request, status=status))

    full.nodes["a"].api.faults = answered
    full.borrow("a", "one-more")
    full.work(1, LOOK_EVERY)  # what the borrower has not got done is due then
    assert not left
    assert full.requests() == []


def test_a_request_is_deleted_soon_when_no_pod_asks_any_more(full: Fabric) -> None:
    """What it is offered, no other node gets meanwhile."""
    full.code("a", "one-more")
    full.work(1, 1.0)
    assert [each.spec.node for each in full.requests()] == ["a"]
    full.work(2, UNWANTED)
    assert full.requests() == []


def test_a_request_in_vain_is_kept_for_the_next_attempt(full: Fabric) -> None:
    for number in range(2):
        full.borrow("a", f"last-{number}")
    full.code("b", "too-many")
    full.work(2)
    assert full.code("b", "too-many")[0] == Code.NO_FREE_ADDRESS
    full.work(3, UNWANTED)
    assert [each.spec.node for each in full.requests()] == ["b"]
    full.work(2, GIVEN_UP)
    assert full.requests() == []


def test_a_request_is_deleted_when_the_node_gets_a_whole_block(
    stack: ExitStack, tmp_path: Path
) -> None:
    fabric = Fabric(stack, tmp_path, "a", "b")
    given = {f"b-{number}": address for number, address in enumerate(fabric.fill("b", 14))}
    fabric.work(4, 3.0)
    fabric.code("a", "one-more")
    assert [each.spec.node for each in fabric.requests()] == ["a"]
    for pod, address in given.items():
        if address in {f"10.64.0.{last}" for last in range(4, 8)}:
            fabric.nodes["b"].delete(pod)
    while len(fabric.blocks()) == 4:  # the pool is exhausted, so an empty block goes back
        fabric.work(1, 1.0)
    fabric.add("a", "one-more")
    assert fabric.sub_blocks() == {}
    assert fabric.requests() == []


def test_a_block_that_others_want_goes_back_at_once_unless_it_was_just_claimed() -> None:
    """An ADD of its own node takes an address of a fresh block in a moment."""
    block = LeasedBlock(
        name="default-10.64.0.4-30",
        uid="uid",
        space="default",
        pool=POOL,
        domains=("",),
        first=parse("10.64.0.4"),
        last=parse("10.64.0.7"),
        boot="boot",
        confirmed=100.0,
    )
    empty = Survey(1, (Surveyed(block, 0),))

    def given_back(now: float, *wanted: str) -> list[LeasedBlock]:
        return list(Empties("boot").surplus(empty, now, lambda pool, since: True, wanted))

    assert given_back(101.0, "uid") == []
    assert given_back(103.0, "uid") == [block]
    assert given_back(103.0) == []


def free_of(fabric: Fabric, name: str) -> list[str]:
    """What a node has free in its block, lowest first."""
    (block,) = [each for each in fabric.blocks() if each.spec.holder.node == name]
    last = int(block.spec.first.rpartition(".")[2])
    held = fabric.nodes[name].held()
    every = [f"10.64.0.{number}" for number in range(last, last + 4) if number not in (0, 15)]
    return [address for address in every if address not in held]
