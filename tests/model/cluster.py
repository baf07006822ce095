"""A state of the model of whole blocks: the object of one block of one address, and the machines.

A uid or a resource version matters only in comparison with the object's. So the model keeps the
result of this comparison for each reader: SAME, CHANGED (the object was written since), or GONE (it
was deleted since; another one may exist). Real numbers would only multiply the states.

The same holds for time. A confirmation is RECENT; it is OLD once the controller's wait began after
its request; it is EXPIRED once that wait is over. The model has no other clocks.
"""

from collections.abc import Callable
from typing import NamedTuple

# The change of the object since a writer read it.
SAME, CHANGED, GONE = "same", "changed", "gone"

RECENT, OLD, EXPIRED = "recent", "old", "expired"

# States of the object, and of its row in a node's store.
ACTIVE, RECLAIMING = "Active", "Reclaiming"
USABLE, RETURNING = "usable", "returning"

# A machine's Node object. LAGGING: it shows an earlier boot than the machine's present one.
PRESENT, LAGGING, TAINTED, ABSENT = "present", "lagging", "out-of-service", "absent"

# The address on a machine. FORGOTTEN: a sandbox has it, and the store that recorded it was lost.
FREE, HELD, FORGOTTEN, TWICE = "free", "held", "forgotten", "twice"

# The result of a look at the block. WRITE_FIRST: ours, but Reclaiming or of another boot.
NOTHING, OURS, WRITE_FIRST = "nothing", "ours", "write first"


class Block(NamedTuple):
    """The object on the API server. `instance`: its holder is the machine's present store, not a
    lost one. `boot`: holder.boot is the machine's present boot."""

    holder: int
    instance: bool = True
    boot: bool = True
    state: str = ACTIVE


class Row(NamedTuple):
    """The block in a node's store. `alive`: its uid is that of an object that exists."""

    state: str = USABLE
    alive: bool = True


class Answer(NamedTuple):
    """The API server's action, on its way to the agent. `age` counts from before the request."""

    verb: str
    age: str = RECENT
    since: str = SAME
    saw: str = OURS


class Late(NamedTuple):
    """A change that has not arrived, and for which no node waits any more.

    `instance` and `boot` are those of the block that it writes.
    """

    verb: str
    since: str = SAME
    instance: bool = True
    boot: bool = True


class Machine(NamedTuple):
    """A machine, its Node object, its store (`row`, `confirmed`), its agent and its pods."""

    on: bool = True
    node: str = PRESENT
    row: Row | None = None
    confirmed: str = EXPIRED
    pod: str = FREE
    answer: Answer | None = None
    late: Late | None = None


class Controller(NamedTuple):
    """The leader's progress: idle, fenced, waited, sure (and two that only mutants have)."""

    step: str = "idle"
    since: str = SAME


IDLE = Controller()


class Cluster(NamedTuple):
    """A state. `clones`: the stores of machines 0 and 1 are one instance, which a mutant allows."""

    block: Block | None
    controller: Controller
    machines: tuple[Machine, ...]
    clones: bool = False


def new_cluster(machines: int) -> Cluster:
    return Cluster(None, IDLE, (Machine(),) * machines)


def change(cluster: Cluster, number: int, machine: Machine) -> Cluster:
    """The state with this machine at index `number`."""
    block, controller, machines, clones = cluster
    machines = (*machines[:number], machine, *machines[number + 1 :])
    return Cluster(block, controller, machines, clones)


def each_machine(cluster: Cluster, changed: Callable[[Machine], Machine]) -> Cluster:
    block, controller, machines, clones = cluster
    return Cluster(block, controller, tuple(map(changed, machines)), clones)


# --- What happens to the object --------------------------------------------------------------


def written(cluster: Cluster, block: Block) -> Cluster:
    """The object with a new resource version, so that writes of earlier readers fail."""
    return _seen_before(cluster, CHANGED)._replace(block=block)


def deleted(cluster: Cluster) -> Cluster:
    """The state without the object. A new object with its name will have another uid."""

    def without(machine: Machine) -> Machine:
        return machine._replace(row=machine.row._replace(alive=False)) if machine.row else machine

    return each_machine(_seen_before(cluster, GONE), without)._replace(block=None)


def _seen_before(cluster: Cluster, since: str) -> Cluster:
    def aged(machine: Machine) -> Machine:
        answer, late = machine.answer, machine.late
        if answer is not None and answer.since != GONE and answer.saw != NOTHING:
            answer = answer._replace(since=since)
        if late is not None and late.since != GONE and late.verb != "POST":
            late = late._replace(since=since)
        return machine._replace(answer=answer, late=late)

    controller = cluster.controller
    if controller.step not in ("idle", "suspects", "waits") and controller.since != GONE:
        controller = controller._replace(since=since)
    return each_machine(cluster, aged)._replace(controller=controller)


# --- Time ------------------------------------------------------------------------------------


def wait_begins(cluster: Cluster) -> Cluster:
    """The controller's wait begins: a request before this moment will have expired after the
    wait."""
    return _aged(cluster, RECENT, OLD)


def wait_is_over(cluster: Cluster) -> Cluster:
    return _aged(cluster, OLD, EXPIRED)


def no_wait(cluster: Cluster) -> Cluster:
    """No node waits, so nothing distinguishes these ages."""
    return _aged(cluster, OLD, RECENT)


def _aged(cluster: Cluster, before: str, after: str) -> Cluster:
    def has_age(machine: Machine) -> bool:
        answer = machine.answer
        return machine.confirmed == before or (answer is not None and answer.age == before)

    def aged(machine: Machine) -> Machine:
        if machine.confirmed == before:
            machine = machine._replace(confirmed=after)
        if machine.answer is not None and machine.answer.age == before:
            machine = machine._replace(answer=machine.answer._replace(age=after))
        return machine

    return each_machine(cluster, aged) if any(map(has_age, cluster.machines)) else cluster


# --- Invariants ------------------------------------------------------------------------------


def one_owner(cluster: Cluster) -> bool:
    """I1: no address is in use on two machines, or by two pods of one machine."""
    used = [machine.pod for machine in cluster.machines if machine.pod != FREE]
    return len(used) < 2 and TWICE not in used


def usable_is_leased(cluster: Cluster) -> bool:
    """I2, I3: a node that may hand out has the block on the API server, with its uid and
    instance."""
    block = cluster.block
    return all(
        block is not None
        and machine.row.alive
        and (block.holder == number or (cluster.clones and block.holder + number == 1))
        for number, machine in enumerate(cluster.machines)
        if machine.row and machine.row.state == USABLE and machine.confirmed != EXPIRED
    )


def returning_is_empty(cluster: Cluster) -> bool:
    """I4: no address of a block that is being returned is held."""
    return not any(
        machine.pod == HELD and machine.row and machine.row.state == RETURNING
        for machine in cluster.machines
    )


def used_is_leased(cluster: Cluster) -> bool:
    """I7: no address of a deleted block is in use."""
    return all(
        cluster.block is not None and cluster.block.holder == number
        for number, machine in enumerate(cluster.machines)
        if machine.pod != FREE
    )


def held_is_in_a_block(cluster: Cluster) -> bool:
    """I10: no reservation lies outside of the blocks in the store."""
    return all(machine.row is not None for machine in cluster.machines if machine.pod == HELD)


INVARIANTS = {
    "I1": one_owner,
    "I3": usable_is_leased,
    "I4": returning_is_empty,
    "I7": used_is_leased,
    "I10": held_is_in_a_block,
}
