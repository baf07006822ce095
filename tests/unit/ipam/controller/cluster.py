"""A small cluster with a clock of its own, for the tests of the controller."""

import json
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from ipam.addresses import parse
from ipam.controller.definitions import POOLS_PER_NAMESPACE, read
from ipam.controller.reclaim import Reclaim, ReclaimCounts
from ipam.controller.rounds import Rounds, Seen, World
from ipam.controller.whereabouts_coexistence import Mode
from ipam.leases.block_layout import block_name
from ipam.leases.objects import (
    AddressBlock,
    AddressPool,
    AddressReservation,
    BlockSpec,
    Holder,
    PoolSpec,
    ReclaimSpec,
    StickySpec,
)
from ipam.leases.sticky import is_let_go
from ipam.nv_ipam.pool_import import NvPools
from kube.client import ClusterApi
from kube.informer import Polled, all_nodes
from kube.resources import ApiError, Meta, NetworkDefinition, Node, NotFound
from tests.fake_api import FakeApi, Faults, changed_node, definition
from tests.unit.ipam.leases.nodes import Clock

GONE_AFTER = 10.0
OFFLINE = 30.0
MARGIN = 3.0


def read_world(api: ClusterApi, clock: Callable[[], float]) -> World:
    """Everything, by consistent reads. ApiError."""
    began = clock()
    nodes = all_nodes(api)
    definitions: Iterable[NetworkDefinition] = ()
    with suppress(NotFound):  # the kind is not installed
        definitions = api.list(NetworkDefinition).items
    return World(
        polled=Polled(nodes, began, clock()),
        definitions=tuple(filter(None, map(read, definitions))),
        pools=api.list(AddressPool).items,
        blocks=api.list(AddressBlock).items,
        reservations=api.list(AddressReservation).items,
    )


class Cluster:
    """The API server, the time, and one controller at a time."""

    def __init__(self, faults: Faults | None = None) -> None:
        self.clock = Clock()
        self.api = FakeApi(clock=lambda: self.now)
        self.client = self.api.client("controller", faults)
        self.counts = ReclaimCounts()
        self.seen = Seen()
        self.errors: list[ApiError] = []  # of the last round
        self.pools_per_namespace = POOLS_PER_NAMESPACE
        self.whereabouts: Mode = "None"
        self.other_pools: NvPools | None = None
        self.rounds = self.new_leader()

    @property
    def now(self) -> float:
        return self.clock.now

    @now.setter
    def now(self, now: float) -> None:
        self.clock.now = now

    def new_leader(self) -> Rounds:
        """Another process leads now: it remembers nothing."""
        self.rounds = Rounds(
            self.client,
            clock=lambda: self.now,
            wall=lambda: self.now,
            reclaim=Reclaim(self.client, lambda: self.now, self.counts, MARGIN),
            pools_per_namespace=self.pools_per_namespace,
            whereabouts=self.whereabouts,
            other_pools=self.other_pools,
        )
        return self.rounds

    def world(self) -> World:
        """The objects that the API server has now."""
        return read_world(self.client, lambda: self.now)

    def round(self) -> Seen:
        self.seen = self.rounds.round(self.world())
        self.errors = self.rounds.steps.taken_errors()
        return self.seen

    def run(self, seconds: float, every: float = 1.0) -> None:
        """Rounds while time passes."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + every, end)
            self.round()

    # --- what is there --------------------------------------------------------------------------

    def node(self, name: str, *, boot: str = "boot-1", machine: str | None = None) -> Node:
        """A new Node object of a machine."""
        machine = machine or f"machine-of-{name}"
        return self.api.add_node(name, machine, f"{machine}-uuid", boot)

    def change_node(self, name: str, **changes: Any) -> Node:  # noqa: ANN401 - of a Node
        node = self.api.machines[name] = changed_node(self.api.machines[name], **changes)
        return node

    def remove_node(self, name: str) -> None:
        del self.api.machines[name]

    def define(
        self, ipam: Mapping[str, Any], name: str = "fabric", namespace: str = "team-a"
    ) -> None:
        """A NetworkAttachmentDefinition of an ipoib network."""
        config = {"cniVersion": "1.0.0", "name": name, "type": "ipoib", "ipam": dict(ipam)}
        text = json.dumps(config)
        self.api.definitions.append(definition(text, name, namespace, f"{name}-uid"))

    def pool(self, range_: str = "10.64.0.0/24", **spec: Any) -> AddressPool:  # noqa: ANN401
        """A pool named "pool" that waits for seconds and not for minutes."""
        name = spec.pop("name", "pool")
        short = ReclaimSpec(node_gone_after=f"{GONE_AFTER:.0f}s", max_offline=f"{OFFLINE:.0f}s")
        reclaim = spec.pop("reclaim", short)
        made = AddressPool(
            metadata=Meta(name=name), spec=PoolSpec(range=range_, reclaim=reclaim, **spec)
        )
        return self.api.create(made)

    def block(
        self,
        first: str,
        node: Node,
        instance: str = "",
        *,
        prefix: int = 29,
        space: str = "default",
        pool: str = "pool",
        max_offline: int = int(OFFLINE),
        sticky: StickySpec = StickySpec(),  # noqa: B008 - it is frozen
        probe: bool = False,
    ) -> AddressBlock:
        """A block that the store `instance` on the node leases."""
        holder = Holder(
            instance=instance or f"store-of-{node.name}",
            node=node.name,
            node_uid=node.uid,
            machine_id=node.machine.machine_id,
            system_uuid=node.machine.system_uuid,
            boot=node.machine.boot_id,
        )
        spec = BlockSpec(
            pool=pool,
            range=f"{first}/{prefix}",
            holder=holder,
            nonce=str(uuid.uuid4()),
            max_offline_seconds=max_offline,
            sticky=sticky,
            probe=probe,
        )
        name = block_name(space, parse(first), prefix)
        return self.api.create(AddressBlock(metadata=Meta(name=name), spec=spec))

    # --- what became of it ----------------------------------------------------------------------

    def pool_now(self, name: str = "pool") -> AddressPool:
        return self.api.look(AddressPool, name)

    def condition(self, type_: str, name: str = "pool") -> tuple[str, str]:
        """Status and reason of a condition."""
        for condition in self.pool_now(name).status.conditions:
            if condition.type == type_:
                return condition.status, condition.reason
        raise AssertionError(f"{name} has no condition {type_}")

    def blocks(self) -> dict[str, str]:
        """The states of the blocks that nodes have, by name: not of those that they let go."""
        found = self.api.look_at_all(AddressBlock).items
        kept = (each for each in found if each.spec.sticky.reservation or not is_let_go(each))
        return {each.metadata.name: each.spec.state for each in kept}

    def answer(self, name: str) -> None:
        """Make the block Active again, as a living holder does when its block is fenced."""
        block = self.api.look(AddressBlock, name)
        self.api.update(replace(block, spec=replace(block.spec, state="Active")))
