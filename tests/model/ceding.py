"""Ceding: a holder lets others have one address of its block, as a sub-block.

Nodes, a block with one address, and the sub-block of this address. Each call is done and answered,
or done and its answer is lost, or it arrives when the node has given up on it (`late`); a crash
forgets what a node was about to do. A node may die, with proof, and return as another instance at
once: what its store held is then NOBODY's. Or it loses its store, or gets an older one back, in
another boot, or the store is built again in the same boot: then it goes by the objects that are its
own. What the controller and a borrower know from watches may be of any time: they ask and look
whenever they like, and what decides is read.
"""

from collections.abc import Iterator
from typing import NamedTuple

from tests.model.explore import Step

NOBODY = -1  # the holder of an object whose holder is proved dead
ACTIVE, PENDING, RECLAIMING = "Active", "Pending", "Reclaiming"
USABLE, RETURNING, OLDER = "usable", "returning", "older"
FREE, FROM_BLOCK, FROM_SUB_BLOCK = "free", "from the block", "from the sub-block"
CEDED, RECALLED = "ceded", "recalled"
PUT_CEDED = "PUT ceded"


class Block(NamedTuple):
    """The covering block. `lists` says in which list its address is, "" in none."""

    holder: int
    lists: str = ""
    state: str = ACTIVE


class SubBlock(NamedTuple):
    holder: int
    state: str = PENDING


class Node(NamedTuple):
    """A node: rows of its store, whether the address is marked there, its pod, and what an agent
    has read and is about to act upon: "" after a crash. A row that is OLDER may lack the mark."""

    row: str = ""
    marked: bool = False
    sub_row: str = ""
    pod: str = FREE
    read: str = ""


class Late(NamedTuple):
    """A request about the version of an object that a node has read; any change makes it void."""

    what: str
    by: int


class State(NamedTuple):
    """`listed`: the controller found no sub-block and is about to delete the block. `late` is about
    the block, `late_post` a POST of a sub-block, by that node."""

    block: Block | None
    sub_block: SubBlock | None
    nodes: tuple[Node, ...]
    listed: bool = False
    late: Late | None = None
    late_post: int | None = None


class Order(NamedTuple):
    """The order as it is written. Each field that is turned makes a mutant."""

    recall_then_look: bool = True
    mark_then_delete: bool = True
    read_cover_then_use: bool = True
    read_cover_now: bool = True
    reclaiming_then_list: bool = True
    mark_then_cede: bool = True
    return_without_marks: bool = True
    put_before_unmarking: bool = True
    adopt_what_is_recalled: bool = True
    confirm_then_list: bool = True
    held_is_not_ceded: bool = True


def start(nodes: int) -> State:
    return State(None, None, (Node(),) * nodes)


def one_owner(state: State) -> bool:
    """I1."""
    return sum(node.pod != FREE for node in state.nodes) <= 1


def ceded_is_unusable(state: State) -> bool:
    """I5: what is ceded on the API server is marked at the holder, and not held there."""
    block = state.block
    if block is None or block.lists != CEDED or block.holder == NOBODY:
        return True
    holder = state.nodes[block.holder]
    return holder.row in ("", OLDER) or (holder.marked and holder.pod != FROM_BLOCK)


def sub_block_is_covered(state: State) -> bool:
    """I6: below a sub-block that is used, the holder of the block cannot use the address."""
    block = state.block
    if block is None or block.state == RECLAIMING or block.holder == NOBODY:
        return True
    if not any(node.sub_row == USABLE for node in state.nodes):
        return True
    holder = state.nodes[block.holder]
    return holder.row in ("", OLDER) or holder.marked


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
        if node.read:
            yield f"{number}: crash", _change(state, number, node._replace(read=""))
        yield f"{number}: death", _died(state, number)
        yield from _boots_with_another_store(state, number, node, order)
        yield from _pods(state, number, node)
        yield from _holds_block(state, number, node, order)
        yield from _cedes(state, number, node, order)
        yield from _borrows(state, number, node, order)
    yield from _arrives(state)
    yield from _controller(state, order)


def canonical_steps(state: State, order: Order) -> Iterator[Step[State]]:
    """The same with the nodes in one order: which is which makes no difference."""
    for name, after in steps(state, order):
        yield name, _canonical(after)


def _canonical(state: State) -> State:
    block, sub_block, late = state.block, state.sub_block, state.late
    of_block = NOBODY if block is None else block.holder
    of_sub_block = NOBODY if sub_block is None else sub_block.holder
    of_late = NOBODY if late is None else late.by
    order = sorted(
        range(len(state.nodes)),
        key=lambda number: (
            state.nodes[number],
            number == of_block,
            number == of_sub_block,
            number == of_late,
            number == state.late_post,
        ),
    )
    new = {old: number for number, old in enumerate(order)} | {NOBODY: NOBODY}
    return state._replace(
        block=block and block._replace(holder=new[block.holder]),
        sub_block=sub_block and sub_block._replace(holder=new[sub_block.holder]),
        nodes=tuple(state.nodes[number] for number in order),
        late=late and late._replace(by=new[late.by]),
        late_post=None if state.late_post is None else new[state.late_post],
    )


def _change(state: State, number: int, node: Node) -> State:
    nodes = list(state.nodes)
    nodes[number] = node
    return state._replace(nodes=tuple(nodes))


def _put(state: State, block: Block | None) -> State:
    """The block is written: requests about an earlier version of it are void."""
    return state._replace(block=block, late=None, listed=False)


def _died(state: State, number: int) -> State:
    block, sub_block = state.block, state.sub_block
    if block is not None and block.holder == number:
        block = block._replace(holder=NOBODY)
    if sub_block is not None and sub_block.holder == number:
        sub_block = sub_block._replace(holder=NOBODY)
    late_post = None if state.late_post == number else state.late_post
    late = None if state.late and state.late.by == number else state.late
    state = state._replace(block=block, sub_block=sub_block, late=late, late_post=late_post)
    return _change(state, number, Node())


def _boots_with_another_store(
    state: State, number: int, node: Node, order: Order
) -> Iterator[Step[State]]:
    """The machine boots: its pods are dead. The store is lost, or has its block but not the mark.

    Before it uses a block it writes it, and takes over what the object lists. So does a store that
    is built again while its pods live.
    """
    if node != Node():
        yield f"{number}: boot without store", _change(state, number, Node())
    block = state.block
    ours = block is not None and block.holder == number
    if node.row == USABLE and node.marked and node.sub_row == "" and ours:
        older = _change(state, number, Node(row=OLDER))
        yield f"{number}: boot with an older store", older
    if block is not None and ours and block.state == ACTIVE:
        taken_over = _is_taken_over(block, order)
        if node.row == OLDER:
            written = _put(state, block)
            known = node._replace(row=USABLE, marked=taken_over)
            yield f"{number}: PUT block", _change(written, number, known)
            if not order.confirm_then_list:
                yield f"{number}: PUT as the row has it", _put(state, block._replace(lists=""))
        if node.row == USABLE and taken_over and not node.marked:
            built = node._replace(marked=True, read="")
            yield f"{number}: store built again, PUT block", _change(state, number, built)


def _is_taken_over(block: Block, order: Order) -> bool:
    return block.lists == CEDED or (block.lists == RECALLED and order.adopt_what_is_recalled)


def _pods(state: State, number: int, node: Node) -> Iterator[Step[State]]:
    if node.pod != FREE:
        yield f"{number}: DEL", _change(state, number, node._replace(pod=FREE))
    elif node.row == USABLE and not node.marked:
        yield f"{number}: ADD", _change(state, number, node._replace(pod=FROM_BLOCK))
    elif node.sub_row == USABLE:
        yield f"{number}: ADD", _change(state, number, node._replace(pod=FROM_SUB_BLOCK))


def _holds_block(state: State, number: int, node: Node, order: Order) -> Iterator[Step[State]]:
    """Claim, return, and what a start finds."""
    block = state.block
    ours = block is not None and block.holder == number
    if block is None and node.row == "":
        posted = _put(state, Block(number))
        yield f"{number}: POST block, answer lost", posted
        yield f"{number}: POST block", _change(posted, number, node._replace(row=USABLE))
    if block is not None and ours and node.row == "" and block.state == ACTIVE:
        found = node._replace(row=USABLE, marked=_is_taken_over(block, order))
        yield f"{number}: block unknown here, PUT", _change(_put(state, block), number, found)
    if block is not None and ours and block.state == RECLAIMING:
        yield f"{number}: PUT Active", _put(state, block._replace(state=ACTIVE))
    if ours and node.row == USABLE and node.pod != FROM_BLOCK:
        is_empty = not node.marked or not order.return_without_marks
        if order.mark_then_delete and is_empty:
            yield f"{number}: mark returning", _change(state, number, node._replace(row=RETURNING))
        elif is_empty:
            yield f"{number}: DELETE block, answer lost", _put(state, None)
    if node.row == RETURNING:
        gone = _put(state, None) if ours else state
        yield f"{number}: DELETE block, answer lost", gone
        forgotten = node._replace(row="", marked=False)
        yield f"{number}: DELETE block", _change(gone, number, forgotten)


def _cedes(state: State, number: int, node: Node, order: Order) -> Iterator[Step[State]]:
    """The holder cedes, and takes back. Its own flags come first."""
    block = state.block
    if block is None or block.holder != number or node.row != USABLE or block.state != ACTIVE:
        return
    if not node.marked and node.pod != FROM_BLOCK and order.mark_then_cede:
        yield f"{number}: mark", _change(state, number, node._replace(marked=True, read=""))
    if not node.marked and not order.mark_then_cede:
        ceded = _put(state, block._replace(lists=CEDED))
        yield f"{number}: PUT ceded, not marked", ceded
    may_cede = node.pod != FROM_BLOCK or not order.held_is_not_ceded
    if node.marked and block.lists != CEDED and node.read == "" and may_cede:
        yield f"{number}: PUT ceded", _put(state, block._replace(lists=CEDED))
        yield f"{number}: PUT ceded, late", state._replace(late=Late(PUT_CEDED, number))
    if node.marked and node.read == "":
        if order.recall_then_look:
            recalled = _put(state, block._replace(lists=RECALLED))
            looking = _change(recalled, number, node._replace(read="recalled"))
            yield f"{number}: PUT recalled", looking
            if not order.put_before_unmarking and block.lists == "":
                saw = node._replace(read="recalled")
                yield f"{number}: the object does not list it", _change(state, number, saw)
        elif state.sub_block is None:
            saw = node._replace(read="no sub-block")
            yield f"{number}: GET sub-block: none", _change(state, number, saw)
    if node.marked and node.read == "recalled" and state.sub_block is None:
        unmarked = node._replace(marked=False, read="")
        yield f"{number}: GET sub-block: none, unmark", _change(state, number, unmarked)
    if node.marked and node.read == "no sub-block":  # the mutant
        recalled = _put(state, block._replace(lists=RECALLED))
        unmarked = node._replace(marked=False, read="")
        yield f"{number}: PUT recalled, unmark", _change(recalled, number, unmarked)


def _borrows(state: State, number: int, node: Node, order: Order) -> Iterator[Step[State]]:
    """The borrower posts first, then reads the block that covers it, then uses the sub-block.

    The holder of the block may borrow too. A read that is not of now may be outdated.
    """
    block, sub_block = state.block, state.sub_block
    idle = node.sub_row == "" and node.pod == FREE and node.read == ""
    if sub_block is None and idle:
        yield f"{number}: POST sub-block", state._replace(sub_block=SubBlock(number))
    if state.late_post is None and idle:
        yield f"{number}: POST sub-block, late", state._replace(late_post=number)
    ours = sub_block is not None and sub_block.holder == number
    if sub_block is not None and ours and sub_block.state == PENDING and node.sub_row == "":
        ceded = block is not None and block.lists == CEDED and block.state == ACTIVE
        if node.read == "":
            saw = "ceded" if ceded or not order.read_cover_then_use else "not ceded"
            yield f"{number}: GET block", _change(state, number, node._replace(read=saw))
            if not order.read_cover_now:
                stale = node._replace(read="ceded")
                yield f"{number}: GET block from a cache", _change(state, number, stale)
        elif node.read == "ceded":
            active = state._replace(sub_block=sub_block._replace(state=ACTIVE))
            given_up = node._replace(read="")
            yield f"{number}: PUT sub-block, answer lost", _change(active, number, given_up)
            used = node._replace(sub_row=USABLE, read="")
            yield f"{number}: PUT sub-block", _change(active, number, used)
        elif node.read == "not ceded":
            gone = state._replace(sub_block=None)
            yield f"{number}: DELETE sub-block", _change(gone, number, node._replace(read=""))
    if sub_block is not None and ours and sub_block.state == ACTIVE and node.sub_row == "":
        ceded = block is not None and block.lists == CEDED and block.state == ACTIVE
        if ceded:
            found = node._replace(sub_row=USABLE, read="")
            yield f"{number}: sub-block unknown here, PUT", _change(state, number, found)
        else:
            gone = state._replace(sub_block=None)
            yield f"{number}: sub-block unknown here, DELETE", gone
    if node.sub_row == USABLE and node.pod != FROM_SUB_BLOCK:
        marked = node._replace(sub_row=RETURNING)
        yield f"{number}: mark sub-block returning", _change(state, number, marked)
    if node.sub_row == RETURNING:
        gone = state._replace(sub_block=None) if ours else state
        yield f"{number}: DELETE sub-block, answer lost", gone
        yield f"{number}: DELETE sub-block", _change(gone, number, node._replace(sub_row=""))


def _arrives(state: State) -> Iterator[Step[State]]:
    """A request arrives that its sender has given up on."""
    if state.late is not None and state.block is not None:
        ceded = state.block._replace(lists=CEDED)
        yield "the late PUT arrives", _put(state, ceded)
    if state.late_post is not None and state.sub_block is None:
        posted = state._replace(sub_block=SubBlock(state.late_post), late_post=None)
        yield "the late POST arrives", posted


def _controller(state: State, order: Order) -> Iterator[Step[State]]:
    """What proof of death frees: sub-blocks at once, a block when it has no sub-block any more.

    It fences whomever it likes: a holder that lives answers.
    """
    block, sub_block = state.block, state.sub_block
    if sub_block is not None and sub_block.holder == NOBODY:
        yield "reclaim sub-block", state._replace(sub_block=None)
    if state.listed:
        yield "another leader", state._replace(listed=False)
    if block is None:
        return
    if block.state != RECLAIMING:
        fenced = _put(state, block._replace(state=RECLAIMING))
        yield "PUT Reclaiming", fenced._replace(listed=state.listed)
    if block.holder != NOBODY:
        return
    if sub_block is None and (block.state == RECLAIMING or not order.reclaiming_then_list):
        yield "LIST: no sub-block", state._replace(listed=True)
    if state.listed and block.state == RECLAIMING:
        yield "reclaim block", _put(state, None)._replace(listed=False)
