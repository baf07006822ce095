"""Ceding: a holder lets others have one address of its block, as a sub-block. The code does not
cede yet; docs/cluster-protocol.md has the order of writes that this model shows to be needed.

Two nodes, a block with one address, and the sub-block of this address. Each call is done and
answered, or done and its answer is lost; a crash forgets what a node was about to do. A node may
die, with proof, and return as another instance at once; what its store held is then NOBODY's.
"""

from collections.abc import Iterator
from typing import NamedTuple

from tests.model.explore import Step

NOBODY = -1  # the holder of an object whose holder is proved dead
ACTIVE, PENDING, RECLAIMING = "Active", "Pending", "Reclaiming"
USABLE, RETURNING = "usable", "returning"
FREE, FROM_BLOCK, FROM_SUB_BLOCK = "free", "from the block", "from the sub-block"


class Block(NamedTuple):
    """The covering block. `ceded`: its address is in spec.ceded."""

    holder: int
    ceded: bool = False
    state: str = ACTIVE


class SubBlock(NamedTuple):
    holder: int
    state: str = PENDING


class Node(NamedTuple):
    """A node: rows of its store, whether the address is unusable there, its pod, and what an agent
    has read and is about to act upon: "" after a crash."""

    row: str = ""
    unusable: bool = False
    sub_row: str = ""
    pod: str = FREE
    read: str = ""


class State(NamedTuple):
    """`listed`: the controller found no sub-block and is about to delete the block."""

    block: Block | None
    sub_block: SubBlock | None
    nodes: tuple[Node, Node]
    listed: bool = False


class Order(NamedTuple):
    """The order as it is written. Each field that is turned makes a mutant."""

    uncede_then_look: bool = True
    mark_then_delete: bool = True
    read_cover_then_use: bool = True
    reclaiming_then_list: bool = True


START = State(None, None, (Node(), Node()))


def one_owner(state: State) -> bool:
    """I1."""
    return FREE in (state.nodes[0].pod, state.nodes[1].pod)


def ceded_is_unusable(state: State) -> bool:
    """I5: what is ceded on the API server is unusable at the holder, and not held there."""
    block = state.block
    if block is None or not block.ceded or block.holder == NOBODY:
        return True
    holder = state.nodes[block.holder]
    return holder.row == "" or (holder.unusable and holder.pod != FROM_BLOCK)


def sub_block_is_covered(state: State) -> bool:
    """I6: below an Active sub-block, the holder of the block cannot use the address."""
    block, sub_block = state.block, state.sub_block
    if block is None or sub_block is None or sub_block.state != ACTIVE:
        return True
    if block.state == RECLAIMING or block.holder == NOBODY:
        return True
    holder = state.nodes[block.holder]
    return holder.row == "" or holder.unusable


def used_is_leased(state: State) -> bool:
    """I7: what is deleted is not in use."""
    for number, node in enumerate(state.nodes):
        leased = {FROM_BLOCK: state.block, FROM_SUB_BLOCK: state.sub_block}.get(node.pod)
        if node.pod != FREE and (leased is None or leased.holder != number):
            return False
    return True


INVARIANTS = {
    "I1": one_owner,
    "I5": ceded_is_unusable,
    "I6": sub_block_is_covered,
    "I7": used_is_leased,
}


def steps(state: State, order: Order) -> Iterator[Step[State]]:
    for number, node in enumerate(state.nodes):
        yield "crash", _change(state, number, node._replace(read=""))
        yield "death", _died(state, number)
        yield from _pods(state, number, node)
        yield from _holds_block(state, number, node, order)
        yield from _cedes(state, number, node, order)
        yield from _borrows(state, number, node, order)
    yield from _controller(state, order)


def _change(state: State, number: int, node: Node) -> State:
    other = state.nodes[1 - number]
    return state._replace(nodes=(node, other) if number == 0 else (other, node))


def _died(state: State, number: int) -> State:
    block, sub_block = state.block, state.sub_block
    if block is not None and block.holder == number:
        block = block._replace(holder=NOBODY)
    if sub_block is not None and sub_block.holder == number:
        sub_block = sub_block._replace(holder=NOBODY)
    return _change(state._replace(block=block, sub_block=sub_block), number, Node())


def _pods(state: State, number: int, node: Node) -> Iterator[Step[State]]:
    if node.pod != FREE:
        yield "DEL", _change(state, number, node._replace(pod=FREE))
    elif node.row == USABLE and not node.unusable:
        yield "ADD", _change(state, number, node._replace(pod=FROM_BLOCK))
    elif node.sub_row == USABLE:
        yield "ADD", _change(state, number, node._replace(pod=FROM_SUB_BLOCK))


def _holds_block(state: State, number: int, node: Node, order: Order) -> Iterator[Step[State]]:
    """Claim, return, and what a start finds."""
    block = state.block
    ours = block is not None and block.holder == number
    if block is None and node.row == "":
        posted = state._replace(block=Block(number))
        yield "POST block, answer lost", posted
        yield "POST block", _change(posted, number, node._replace(row=USABLE, unusable=False))
    if block is not None and ours and node.row == "":
        found = node._replace(row=USABLE, unusable=block.ceded)
        yield "LIST: block unknown here", _change(state, number, found)
    if block is not None and ours and node.row == USABLE and node.pod != FROM_BLOCK:
        if order.mark_then_delete and not block.ceded and not node.unusable:
            yield "mark returning", _change(state, number, node._replace(row=RETURNING))
        elif not block.ceded and not node.unusable:
            yield "DELETE block, answer lost", state._replace(block=None)
    if node.row == RETURNING:
        gone = state._replace(block=None) if ours else state
        yield "DELETE block, answer lost", gone
        yield "DELETE block", _change(gone, number, node._replace(row="", unusable=False))


def _cedes(state: State, number: int, node: Node, order: Order) -> Iterator[Step[State]]:
    """The holder cedes, and takes back. Its own flags come first."""
    block = state.block
    if block is None or block.holder != number or node.row != USABLE:
        return
    if not node.unusable and node.pod != FROM_BLOCK:
        yield "mark unusable", _change(state, number, node._replace(unusable=True, read=""))
    if node.unusable and not block.ceded and node.read == "":
        yield "PUT ceded", state._replace(block=block._replace(ceded=True))
        absent = state.sub_block is None
        if absent and order.uncede_then_look:
            saw = node._replace(read="no sub-block")
            yield "GET sub-block: none", _change(state, number, saw)
    if node.unusable and block.ceded and order.uncede_then_look:
        yield "PUT ceded without it", state._replace(block=block._replace(ceded=False))
    elif node.unusable and block.ceded and state.sub_block is None and node.read == "":
        saw = node._replace(read="no sub-block")
        yield "GET sub-block: none", _change(state, number, saw)
    if node.unusable and node.read == "no sub-block":
        usable = _change(state, number, node._replace(unusable=False, read=""))
        if order.uncede_then_look:
            yield "mark usable", usable
        else:
            yield "PUT ceded without it, usable", usable._replace(block=block._replace(ceded=False))


def _borrows(state: State, number: int, node: Node, order: Order) -> Iterator[Step[State]]:
    """The borrower posts first, then reads the block that covers it, then uses the sub-block."""
    block, sub_block = state.block, state.sub_block
    if sub_block is None and node.row == "" and node.sub_row == "":
        yield "POST sub-block", state._replace(sub_block=SubBlock(number))
    ours = sub_block is not None and sub_block.holder == number
    if sub_block is not None and ours and sub_block.state == PENDING and node.sub_row == "":
        ceded = block is not None and block.ceded and block.state == ACTIVE
        saw = "ceded" if ceded or not order.read_cover_then_use else "not ceded"
        if node.read == "":
            yield "GET block", _change(state, number, node._replace(read=saw))
        elif node.read == "ceded":
            active = state._replace(sub_block=sub_block._replace(state=ACTIVE))
            yield "PUT sub-block, answer lost", active
            used = node._replace(sub_row=USABLE, read="")
            yield "PUT sub-block", _change(active, number, used)
        elif node.read == "not ceded":
            gone = state._replace(sub_block=None)
            yield "DELETE sub-block", _change(gone, number, node._replace(read=""))
    if sub_block is not None and ours and sub_block.state == ACTIVE and node.sub_row == "":
        found = node._replace(sub_row=USABLE, read="")
        yield "LIST: sub-block unknown here", _change(state, number, found)
    if node.sub_row == USABLE and node.pod != FROM_SUB_BLOCK:
        yield "mark sub-block returning", _change(state, number, node._replace(sub_row=RETURNING))
    if node.sub_row == RETURNING:
        gone = state._replace(sub_block=None) if ours else state
        yield "DELETE sub-block, answer lost", gone
        yield "DELETE sub-block", _change(gone, number, node._replace(sub_row=""))


def _controller(state: State, order: Order) -> Iterator[Step[State]]:
    """What proof of death frees: sub-blocks at once, a block when it has no sub-block any more."""
    block, sub_block = state.block, state.sub_block
    if sub_block is not None and sub_block.holder == NOBODY:
        yield "reclaim sub-block", state._replace(sub_block=None)
    if state.listed:
        yield "another leader", state._replace(listed=False)
    if block is None or block.holder != NOBODY:
        return
    if block.state != RECLAIMING:
        yield "PUT Reclaiming", state._replace(block=block._replace(state=RECLAIMING))
    if sub_block is None and (block.state == RECLAIMING or not order.reclaiming_then_list):
        yield "LIST: no sub-block", state._replace(listed=True)
    if state.listed and block.state == RECLAIMING:
        yield "reclaim block", state._replace(block=None, listed=False)
