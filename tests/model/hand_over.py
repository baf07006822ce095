"""The hand-over of a block between nodes, by the rules of docs/developers/protocol.md.

There is one block, which belongs to a pod or may still be used by a lost machine. Any of the nodes
may run the pod. Each PUT is executed and answered, executed with its answer lost, or arrives late.
It names the version that was read: a change of the block makes every late PUT fail. A node may die,
with proof, and return immediately as another instance; the block's holder is NOBODY then. Or it is
cut off until it hands out nothing more, and comes back. The fence and its wait are those of whole
blocks (whole_blocks.py). As there, a machine whose Node was deleted has no pods any more.
"""

from collections.abc import Iterator
from typing import NamedTuple

from tests.model.explore import Step

NOBODY = -1  # the holder of a block whose holder is proved dead
ACTIVE, DRAINING, RECLAIMING = "Active", "Draining", "Reclaiming"
USABLE, EXPIRED, RETURNING = "usable", "expired", "returning"
TAKE, DRAIN = "take", "drain"


class Block(NamedTuple):
    holder: int
    state: str = ACTIVE


class Node(NamedTuple):
    """The row in its store, whether the pod has the address there, and a PUT that may come late."""

    row: str = ""
    pod: bool = False
    late: str = ""


class State(NamedTuple):
    block: Block
    nodes: tuple[Node, ...]


class Rules(NamedTuple):
    """The written protocol. Each inverted field makes a mutant."""

    mark_then_drain: bool = True
    put_names_version: bool = True
    come_back_by_put: bool = True
    take_what_is_let_go: bool = True
    let_go_after_proof: bool = True


def start(nodes: int) -> State:
    """The first node has the block, and no pod has the address."""
    return State(Block(0), (Node(row=USABLE), *(Node() for _ in range(nodes - 1))))


def one_owner(state: State) -> bool:
    """I1: at most one node's pod has the address."""
    return sum(node.pod for node in state.nodes) <= 1


def usable_is_held(state: State) -> bool:
    """I3: a node that hands out holds the block, and has not released it."""
    return all(
        node.row != USABLE or (state.block.holder == number and state.block.state != DRAINING)
        for number, node in enumerate(state.nodes)
    )


def returning_is_empty(state: State) -> bool:
    """I4: a block that is being returned is empty."""
    return not any(node.row == RETURNING and node.pod for node in state.nodes)


INVARIANTS = {"I1": one_owner, "I3": usable_is_held, "I4": returning_is_empty}


def steps(state: State, rules: Rules) -> Iterator[Step[State]]:
    for number, node in enumerate(state.nodes):
        yield f"{number}: death", _died(state, number)
        yield from _pods(state, number, node)
        yield from _lets_go(state, number, node, rules)
        yield from _takes(state, number, node, rules)
        yield from _late(state, number, node, rules)
    yield from _controller(state, rules)


def _change(state: State, number: int, node: Node) -> State:
    nodes = (*state.nodes[:number], node, *state.nodes[number + 1 :])
    return state._replace(nodes=nodes)


def _put(state: State, block: Block, rules: Rules) -> State:
    """An executed PUT: all pending ones have read another version."""
    nodes = state.nodes
    if rules.put_names_version:
        nodes = tuple(node._replace(late="") for node in nodes)
    return State(block, nodes)


def _died(state: State, number: int) -> State:
    block = state.block
    if block.holder == number:
        block = block._replace(holder=NOBODY)
    return _change(state._replace(block=block), number, Node())


def _pods(state: State, number: int, node: Node) -> Iterator[Step[State]]:
    if node.row == USABLE:
        yield f"{number}: is cut off", _change(state, number, node._replace(row=EXPIRED))
    if node.pod:
        yield f"{number}: DEL", _change(state, number, node._replace(pod=False))
    elif node.row == USABLE:
        yield f"{number}: ADD", _change(state, number, node._replace(pod=True))


def _lets_go(state: State, number: int, node: Node, rules: Rules) -> Iterator[Step[State]]:
    block = state.block
    if node.row == USABLE and not node.pod and rules.mark_then_drain:
        yield f"{number}: mark returning", _change(state, number, node._replace(row=RETURNING))
    ready = RETURNING if rules.mark_then_drain else USABLE
    if node.row == ready and not node.pod and block.holder == number and block.state != DRAINING:
        done = _put(state, Block(number, DRAINING), rules)
        yield f"{number}: PUT Draining, answer lost", done
        yield f"{number}: PUT Draining", _change(done, number, done.nodes[number]._replace(row=""))
        yield f"{number}: PUT Draining, late", _change(state, number, node._replace(late=DRAIN))
    if node.row == EXPIRED and block.holder != number:
        yield f"{number}: sees who has it", _change(state, number, node._replace(row=""))
    if node.row == RETURNING and (block.holder != number or block.state == DRAINING):
        yield f"{number}: forget", _change(state, number, node._replace(row=""))


def _takes(state: State, number: int, node: Node, rules: Rules) -> Iterator[Step[State]]:
    block = state.block
    ours = block.holder == number
    let_go = block.state == DRAINING or not rules.take_what_is_let_go
    if node.row != USABLE and (ours or let_go):
        done = _put(state, Block(number), rules)
        yield f"{number}: PUT Active, answer lost", done
        yield (
            f"{number}: PUT Active",
            _change(done, number, done.nodes[number]._replace(row=USABLE)),
        )
        yield f"{number}: PUT Active, late", _change(state, number, node._replace(late=TAKE))
    if ours and block.state == ACTIVE and node.row == RETURNING and not rules.come_back_by_put:
        yield f"{number}: GET, usable", _change(state, number, node._replace(row=USABLE))
    if ours and block.state == RECLAIMING:
        yield f"{number}: answer the fence", _put(state, Block(number), rules)


def _late(state: State, number: int, node: Node, rules: Rules) -> Iterator[Step[State]]:
    """A PUT arrives after its node gave up on it; the node learns its effect by reading."""
    if node.late:
        block = Block(number, ACTIVE if node.late == TAKE else DRAINING)
        done = _put(state, block, rules)
        after = _change(done, number, done.nodes[number]._replace(late=""))
        yield f"{number}: late PUT {block.state}", after
        yield f"{number}: late PUT is lost", _change(state, number, node._replace(late=""))


def _controller(state: State, rules: Rules) -> Iterator[Step[State]]:
    block = state.block
    if block.state == ACTIVE:
        yield "PUT Reclaiming", _put(state, block._replace(state=RECLAIMING), rules)
    holder = state.nodes[block.holder] if block.holder != NOBODY else Node(row=EXPIRED)
    is_proved = holder.row == EXPIRED and not holder.pod
    if block.state == RECLAIMING and (is_proved or not rules.let_go_after_proof):
        yield "controller: PUT Draining", _put(state, block._replace(state=DRAINING), rules)
