"""The protocol of docs/developers/protocol.md for whole blocks, as steps from state to state.

An answer may be lost at any time: then the agent has forgotten its call, as after a crash. A change
may be late: the agent gave up, and the change takes effect at any later time, or never. A watch or
a cache may be arbitrarily old. So here it may report anything at any time: agents look at the
block, and the controller fences it, without a reason.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

from tests.model.cluster import (
    ABSENT,
    EXPIRED,
    FORGOTTEN,
    FREE,
    GONE,
    HELD,
    IDLE,
    LAGGING,
    NOTHING,
    OURS,
    PRESENT,
    RECENT,
    RECLAIMING,
    RETURNING,
    SAME,
    TAINTED,
    TWICE,
    USABLE,
    WRITE_FIRST,
    Answer,
    Block,
    Cluster,
    Controller,
    Late,
    Machine,
    Row,
    change,
    deleted,
    no_wait,
    wait_begins,
    wait_is_over,
    written,
)
from tests.model.explore import Step


class Rules(NamedTuple):
    """The written protocol. Each inverted field makes a mutant."""

    row_before_address: bool = True
    mark_before_delete: bool = True
    delete_names_uid: bool = True
    delete_names_version: bool = True
    only_put_ends_returning: bool = True
    unknown_block_is_written: bool = True
    time_before_request: bool = True
    new_boot_is_written: bool = True
    adopted_in_another_boot_only: bool = True
    clone_becomes_another_instance: bool = True
    watch_confirms_nothing: bool = True
    reclaiming_confirms_nothing: bool = True
    fence_then_wait: bool = True
    absent_node_is_waited_for: bool = True
    proof_after_fence: bool = True
    shown_boot_is_the_present_one: bool = True
    reclaim_names_version: bool = True
    # A promise of administrators. Without it nothing on the API server helps.
    deleted_nodes_have_stopped: bool = True
    tainted_nodes_are_off: bool = True


AS_WRITTEN = Rules()


class WholeBlocks:
    """Steps under these rules. `most` bounds the pending late changes and answers."""

    def __init__(self, rules: Rules = AS_WRITTEN, most: int = 1) -> None:
        self.rules = rules
        self.most = most

    def steps(self, cluster: Cluster) -> Iterator[Step[Cluster]]:
        for name, after in self._every(cluster):
            yield name, self._plain(after)

    def _every(self, cluster: Cluster) -> Iterator[Step[Cluster]]:
        for number, machine in enumerate(cluster.machines):
            yield from self._faults(cluster, number, machine)
            if machine.late is not None:
                yield from self._arrives(cluster, number, machine, machine.late)
            if machine.on:
                yield from self._pods(cluster, number, machine)
                if machine.answer is not None:
                    yield from self._answered(cluster, number, machine, machine.answer)
                else:
                    yield from self._calls(cluster, number, machine)
        yield from self._controller(cluster)

    # --- the node ----------------------------------------------------------------------------

    def _pods(self, cluster: Cluster, number: int, machine: Machine) -> Iterator[Step[Cluster]]:
        """ADD and DEL: the store decides, without the API server."""
        row = machine.row
        may = row is not None and row.state == USABLE and machine.confirmed != EXPIRED
        if may and machine.pod != HELD:
            pod = HELD if machine.pod == FREE else TWICE
            yield "ADD", change(cluster, number, machine._replace(pod=pod))
        if machine.pod in (HELD, FORGOTTEN):
            yield "DEL", change(cluster, number, machine._replace(pod=FREE))

    def _calls(self, cluster: Cluster, number: int, machine: Machine) -> Iterator[Step[Cluster]]:
        """The agent begins a call, or marks a row. It has one call at a time."""
        row = machine.row
        if row is None:
            if cluster.block is None:
                made = cluster._replace(block=Block(number))
                yield from self._done("POST", made, number)
            yield from self._given_up("POST", cluster, number)
            if cluster.block == Block(number):
                yield "DELETE unused", deleted(cluster)
                yield from self._given_up("DELETE", cluster, number)
        elif row.state == USABLE and machine.pod == FREE and self.rules.mark_before_delete:
            marked = machine._replace(row=row._replace(state=RETURNING), confirmed=EXPIRED)
            yield "mark returning", change(cluster, number, marked)
        elif row.state == RETURNING or (row.state == USABLE and machine.pod == FREE):
            yield from self._delete(cluster, number, machine)
        saw = self._seen(cluster, number)
        if self._may_answer(cluster) and (row is not None or saw != NOTHING):
            looks = machine._replace(answer=Answer("GET", saw=saw))
            yield "GET", change(cluster, number, looks)
        if not self.rules.watch_confirms_nothing and row is not None and row.state == USABLE:
            yield "an old event", change(cluster, number, machine._replace(confirmed=RECENT))

    def _delete(self, cluster: Cluster, number: int, machine: Machine) -> Iterator[Step[Cluster]]:
        """DELETE, with the uid in the row, and the version of a GET directly before."""
        row = machine.row
        assert row is not None
        done = deleted(cluster) if row.alive or not self.rules.delete_names_uid else cluster
        forgets = done.machines[number]._replace(row=None, confirmed=EXPIRED)
        yield "DELETE", change(done, number, forgets)
        if done is not cluster:
            yield "DELETE, answer lost", done
        if row.alive or not self.rules.delete_names_uid:
            yield from self._given_up("DELETE", cluster, number)

    def _seen(self, cluster: Cluster, number: int) -> str:
        """The result of a consistent read now."""
        block, machine = cluster.block, cluster.machines[number]
        if block is None or not self._is_holder(cluster, number):
            return NOTHING
        if not block.instance:
            adoptable = not block.boot or not self.rules.adopted_in_another_boot_only
            return WRITE_FIRST if adoptable and machine.node != ABSENT else NOTHING
        if block.state == RECLAIMING and self.rules.reclaiming_confirms_nothing:
            return WRITE_FIRST
        if not (block.boot and block.holder == number) and self.rules.new_boot_is_written:
            return WRITE_FIRST
        if machine.row == Row(RETURNING) and self.rules.only_put_ends_returning:
            return WRITE_FIRST
        known = machine.row is not None and machine.row.alive
        return OURS if known or not self.rules.unknown_block_is_written else WRITE_FIRST

    def _is_holder(self, cluster: Cluster, number: int) -> bool:
        holder = cluster.block.holder if cluster.block else -1
        return holder == number or (cluster.clones and holder + number == 1)

    def _answered(
        self, cluster: Cluster, number: int, machine: Machine, answer: Answer
    ) -> Iterator[Step[Cluster]]:
        """The agent gets the answer, or loses it."""
        idle = machine._replace(answer=None)
        yield f"{answer.verb} is not answered", change(cluster, number, idle)
        if answer.saw == NOTHING:
            lost = idle._replace(row=None, confirmed=EXPIRED)
            yield "GET: not ours", change(cluster, number, lost)
        elif answer.saw == WRITE_FIRST:
            if machine.node != ABSENT and cluster.block is not None:
                yield from self._put(change(cluster, number, idle), number, cluster.block)
        else:
            age = answer.age if self.rules.time_before_request else RECENT
            leased = idle._replace(row=Row(USABLE, answer.since != GONE), confirmed=age)
            yield f"{answer.verb} answered", change(cluster, number, leased)
            if answer.verb == "POST" and not self.rules.row_before_address:
                yield "address, then row", change(cluster, number, idle._replace(pod=HELD))

    def _put(self, cluster: Cluster, number: int, block: Block) -> Iterator[Step[Cluster]]:
        """PUT of the block that was just read: Active, with our instance and boot."""
        holder = number if cluster.clones else block.holder
        yield from self._done("PUT", written(cluster, Block(holder)), number)
        yield from self._given_up("PUT", cluster, number)

    def _done(self, verb: str, done: Cluster, number: int) -> Iterator[Step[Cluster]]:
        """The API server has executed the call. It answers, or the answer is lost."""
        yield f"{verb}, answer lost", done
        if self._may_answer(done):
            answering = done.machines[number]._replace(answer=Answer(verb))
            yield verb, change(done, number, answering)

    def _given_up(self, verb: str, cluster: Cluster, number: int) -> Iterator[Step[Cluster]]:
        """The agent stops waiting, and the request is still on its way."""
        if sum(machine.late is not None for machine in cluster.machines) < self.most:
            waiting = cluster.machines[number]._replace(late=Late(verb))
            yield f"{verb} is late", change(cluster, number, waiting)

    def _may_answer(self, cluster: Cluster) -> bool:
        return sum(machine.answer is not None for machine in cluster.machines) < self.most

    def _arrives(
        self, cluster: Cluster, number: int, machine: Machine, late: Late
    ) -> Iterator[Step[Cluster]]:
        """A late change arrives. `_plain` has dropped those whose preconditions cannot hold."""
        arrived = change(cluster, number, machine._replace(late=None))
        yield f"{late.verb} never arrives", arrived
        block = cluster.block
        if late.verb == "POST" and block is None:
            made = Block(number, late.instance, late.boot)
            yield "POST arrives", arrived._replace(block=made)
        elif late.verb == "PUT" and block is not None:
            yield "PUT arrives", written(arrived, Block(number, late.instance, late.boot))
        elif late.verb == "DELETE" and block is not None:
            yield "DELETE arrives", deleted(arrived)

    # --- the controller ----------------------------------------------------------------------

    def _controller(self, cluster: Cluster) -> Iterator[Step[Cluster]]:
        block, (step, _) = cluster.block, cluster.controller
        if step != "idle":
            yield "another leader", cluster._replace(controller=IDLE)
        if block is None:
            return
        if step == "idle" and self.rules.fence_then_wait and self.rules.proof_after_fence:
            yield "fence", wait_begins(self._fenced(cluster, block, "fenced"))
        elif step == "idle" and self.rules.proof_after_fence:
            yield "wait", wait_begins(cluster._replace(controller=Controller("waits")))
        elif step == "idle" and self._proof(cluster, block):
            yield "proof", wait_begins(cluster._replace(controller=Controller("suspects")))
        elif step == "waits":
            yield "fence", wait_is_over(self._fenced(cluster, block, "waited"))
        elif step == "suspects":
            yield "fence", self._fenced(cluster, block, "sure")
        elif step == "fenced":
            yield "wait is over", wait_is_over(self._goes_on(cluster, "waited"))
        if step in ("fenced", "waited") and self._proof(cluster, block):
            yield "proof", self._goes_on(cluster, "sure")
        if step == "sure":
            yield "reclaimed", deleted(cluster)._replace(controller=IDLE)
            yield "reclaimed, answer lost", deleted(cluster)

    def _fenced(self, cluster: Cluster, block: Block, step: str) -> Cluster:
        if block.state != RECLAIMING:
            cluster = written(cluster, block._replace(state=RECLAIMING))
        return cluster._replace(controller=Controller(step))

    def _goes_on(self, cluster: Cluster, step: str) -> Cluster:
        return cluster._replace(controller=cluster.controller._replace(step=step))

    def _proof(self, cluster: Cluster, block: Block) -> bool:
        """Whether the API server's present state proves that the holder's sandboxes are dead."""
        holder, rules = cluster.machines[block.holder], self.rules
        waited = cluster.controller.step == "waited" or not rules.absent_node_is_waited_for
        if holder.node == TAINTED:
            return True
        if holder.node == ABSENT:
            stopped = holder.pod == FREE or not rules.deleted_nodes_have_stopped
            return waited and stopped
        if holder.node == LAGGING and not rules.shown_boot_is_the_present_one:
            return not block.instance and block.boot
        return holder.on and holder.node == PRESENT and not block.instance and not block.boot

    # --- everything else ---------------------------------------------------------------------

    def _faults(self, cluster: Cluster, number: int, machine: Machine) -> Iterator[Step[Cluster]]:
        """Power, disks and Node objects."""
        if machine.on:
            off = machine._replace(on=False, confirmed=EXPIRED, pod=FREE, answer=None)
            off = off._replace(late=machine.late and machine.late._replace(boot=False))
            dead = change(cluster, number, off)
            if cluster.block is not None and cluster.block.holder == number:
                dead = dead._replace(block=cluster.block._replace(boot=False))
            for row in _kept_by_disk(machine.row):
                yield "power loss", change(dead, number, off._replace(row=row))
        elif machine.node != TAINTED or not self.rules.tainted_nodes_are_off:
            node = LAGGING if machine.node == PRESENT else machine.node
            yield "power on", change(cluster, number, machine._replace(on=True, node=node))
        yield from self._store_lost(cluster, number, machine)
        if not self.rules.clone_becomes_another_instance and number < 2 and not machine.on:
            copied = machine._replace(row=cluster.machines[1 - number].row)
            yield "store copied", change(cluster, number, copied)._replace(clones=True)
        for name, before, node in (
            ("Node deleted", PRESENT, ABSENT),
            ("Node deleted", LAGGING, ABSENT),
            ("Node created", ABSENT, PRESENT),
            ("kubelet reports", LAGGING, PRESENT),
            ("taint", PRESENT, TAINTED),
            ("taint removed", TAINTED, PRESENT),
        ):
            if machine.node == before and (node != TAINTED or not machine.on):
                yield name, change(cluster, number, machine._replace(node=node))

    def _store_lost(
        self, cluster: Cluster, number: int, machine: Machine
    ) -> Iterator[Step[Cluster]]:
        """The store is deleted, or replaced by another machine's: it is another instance."""
        new = machine._replace(row=None, confirmed=EXPIRED, answer=None)
        new = new._replace(late=machine.late and machine.late._replace(instance=False))
        if machine.pod == HELD:
            new = new._replace(pod=FORGOTTEN)
        lost = change(cluster, number, new)
        if cluster.block is not None and cluster.block.holder == number:
            lost = lost._replace(block=cluster.block._replace(instance=False))
        yield "store lost", lost

    def _plain(self, cluster: Cluster) -> Cluster:
        """The representative of all states that behave alike."""
        controller, rules = cluster.controller, self.rules
        if controller.since == GONE or (controller.since != SAME and rules.reclaim_names_version):
            cluster = cluster._replace(controller=IDLE)
        block, controller, machines, clones = cluster
        holder = block.holder if block is not None else -1
        plain = tuple(
            self._plain_machine(machine, number == holder or clones)
            for number, machine in enumerate(machines)
        )
        cluster = Cluster(block, controller, plain, clones)
        if controller.step in ("idle", "waited", "sure"):
            cluster = no_wait(cluster)
        return _sorted(cluster) if not clones else cluster

    def _plain_machine(self, machine: Machine, leases: bool) -> Machine:
        if not leases and not (machine.on and machine.node in (PRESENT, LAGGING)):
            # The Node can become this at once, and its earlier value does not matter.
            node = PRESENT if machine.on else LAGGING
            machine = machine._replace(on=True, node=node)
        answer, late, rules = machine.answer, machine.late, self.rules
        if (
            machine.row is not None
            and not machine.row.alive
            and machine.confirmed == EXPIRED
            and machine.pod != HELD
            and rules.delete_names_uid
        ):
            machine = machine._replace(row=None)  # the row has no effect either way
        if answer is not None and answer.saw == WRITE_FIRST and answer.since != SAME:
            machine = machine._replace(answer=None)  # its PUT would fail
        elif answer is not None and answer.saw != OURS and answer.age != RECENT:
            machine = machine._replace(answer=answer._replace(age=RECENT))  # it confirms nothing
        if late is None or late.verb == "POST":
            return machine
        useless = late.since == GONE or rules.delete_names_version
        if late.verb == "DELETE" and not rules.delete_names_uid:
            useless = False
        if late.since != SAME and (useless or late.verb == "PUT"):
            return machine._replace(late=None)
        return machine


def _kept_by_disk(row: Row | None) -> list[Row | None]:
    """The rows that may remain after a power loss: the last transactions may be unwritten."""
    kept: list[Row | None] = [row]
    if row is None:
        kept.append(Row(USABLE, alive=False))
    elif row.state == RETURNING:
        kept.append(row._replace(state=USABLE))
    else:
        kept.append(None)
    return kept


_key = functools.cache(repr)  # the same in every run, unlike a hash


def _sorted(cluster: Cluster) -> Cluster:
    """The state with sorted machines: they have no names, so their order has no meaning."""
    holder = cluster.block.holder if cluster.block else -1
    machines = cluster.machines
    order = sorted(range(len(machines)), key=lambda n: (_key(machines[n]), n == holder))
    if order == list(range(len(order))):
        return cluster
    block = cluster.block
    if block is not None:
        block = block._replace(holder=order.index(holder))
    return cluster._replace(block=block, machines=tuple(machines[number] for number in order))
