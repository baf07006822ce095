"""Judges from Node objects whether the holder of a block is dead.

There are three proofs:

- the taint out-of-service
- a new boot of the same machine, with another store
- a Node object that stays missing

After the first two, the holder's pods have ended. After the third, `reclaim` fences the block and
waits, until the holder can reserve no address. A Node that is not ready proves nothing. A missing
fact proves nothing.
"""

import enum
from collections import defaultdict
from collections.abc import Iterable

from ipam.leases.objects import AddressBlock, Holder
from kube.resources import Node

OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"


class Standing(enum.Enum):
    """The state of a holder. The text completes "its node ..."."""

    WELL = "is there"
    SILENT = "is not ready, which proves nothing"
    REPLACED = "may be another machine under the same name, which proves nothing"
    OUT_OF_SERVICE = "is tainted out-of-service"
    REBOOTED = "has booted again, with another store"
    GONE = "is gone"


PROOFS = frozenset((Standing.OUT_OF_SERVICE, Standing.REBOOTED, Standing.GONE))
POWERED_OFF = frozenset((Standing.OUT_OF_SERVICE, Standing.REBOOTED))
"""Proofs that every pod sandbox of the holder has ended. The holder's blocks need no wait."""


class Machines:
    """The machines of a cluster. The holders of blocks show which store runs on which machine."""

    def __init__(self, nodes: Iterable[Node], leases: Iterable[AddressBlock]) -> None:
        self._named = {node.name: node for node in nodes}
        self._of_machine: defaultdict[tuple[str, str], list[Node]] = defaultdict(list)
        for node in self._named.values():
            ids = node.machine
            if ids.machine_id and ids.system_uuid:
                self._of_machine[ids.machine_id, ids.system_uuid].append(node)
        # The stores of each machine and boot.
        self._living: defaultdict[tuple[str, str, str], set[str]] = defaultdict(set)
        for holder in {lease.holder for lease in leases}:
            self._living[holder.machine_id, holder.system_uuid, holder.boot].add(holder.instance)

    @property
    def count(self) -> int:
        return len(self._named)

    def has(self, name: str) -> bool:
        return name in self._named

    def standing(self, holder: Holder) -> Standing:
        node = self._named.get(holder.node)
        machine = self._of_machine.get((holder.machine_id, holder.system_uuid), [])
        # Another machine may have the name now. The taint of that machine proves nothing.
        if node is None or _surely_another(node, holder):
            return self._on(machine, holder) if machine else Standing.GONE
        if node.has_taint(OUT_OF_SERVICE) and not node.is_ready and _surely_same(node, holder):
            return Standing.OUT_OF_SERVICE
        return self._on([node], holder) if _may_be_same(node, holder) else Standing.REPLACED

    def _on(self, nodes: list[Node], holder: Holder) -> Standing:
        """The standing of a holder whose machine is one of these Nodes."""
        node = nodes[0]
        # Before the first Ready of a boot, the Node shows an earlier boot.
        if len(nodes) == 1 and node.is_ready and _surely_another_boot(node, holder):
            living = self._living[holder.machine_id, holder.system_uuid, node.machine.boot_id]
            if living and holder.instance not in living:
                return Standing.REBOOTED
        return Standing.WELL if node.is_ready else Standing.SILENT


def _surely_same(node: Node, holder: Holder) -> bool:
    if holder.node_uid and node.uid == holder.node_uid:
        return True
    ids = (holder.machine_id, holder.system_uuid)
    return all(ids) and ids == (node.machine.machine_id, node.machine.system_uuid)


def _may_be_same(node: Node, holder: Holder) -> bool:
    if _surely_same(node, holder):
        return node.machine.machine_id in ("", holder.machine_id) or not holder.machine_id
    return not holder.node_uid  # the agent that wrote the block did not know the uid


def _surely_another(node: Node, holder: Holder) -> bool:
    """Whether system UUID and uid both differ. The machine id does not count, because clones share
    it, and a new installation changes it."""
    system_uuid = node.machine.system_uuid
    known = bool(system_uuid and holder.system_uuid)
    return known and system_uuid != holder.system_uuid and node.uid != holder.node_uid


def _surely_another_boot(node: Node, holder: Holder) -> bool:
    return (
        bool(holder.machine_id and holder.system_uuid and holder.boot and node.machine.boot_id)
        and (node.machine.machine_id, node.machine.system_uuid)
        == (holder.machine_id, holder.system_uuid)
        and node.machine.boot_id != holder.boot
    )
