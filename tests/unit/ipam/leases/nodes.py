"""A cluster of nodes in one process: real stores, a stand-in for the API server, and one clock."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec

from ipam.leases import block_layout
from ipam.leases.block_layout import pool_name, space_name
from ipam.leases.claim_request import Attempts, Lease
from ipam.leases.lessee import Lessee
from ipam.leases.objects import AddressBlock, AddressPool, Condition, PoolSpec, PoolStatus
from ipam.plugin import AddressPlugin
from ipam.store.sqlite_store import SqliteStore
from ipam.store.store_files import StoreFiles
from ipam.store_choice import Stores
from kube.client import ClusterApi
from kube.resources import Meta
from tests.fake_api import FakeApi, FakeClient, Faults
from tests.unit.ipam.calls import Json, request

RANGE = "10.0.0.0/24"
READY = Condition(
    type="Ready",
    status="True",
    reason="Decided",
    last_transition_time="2026-11-23T07:00:00Z",
    observed_generation=1,
)


class Clock:
    """CLOCK_BOOTTIME of every node."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def put_pool(
    server: FakeApi | ClusterApi,
    range_: str = RANGE,
    *,
    name: str = "",
    shared: bool = True,
    size: int = 16,
    conditions: tuple[Condition, ...] = (READY,),
    **changes: object,
) -> AddressPool:
    """An AddressPool as the controller leaves it; `changes` are fields of its spec."""
    spec = PoolSpec(range=range_, network_name=name, shared=shared)
    space = space_name(name, range_, shared=shared)
    pool = AddressPool(
        metadata=Meta(name=pool_name(name, range_, shared=shared)),
        spec=msgspec.structs.replace(spec, **changes),
        status=PoolStatus(space=space, block_size=size, conditions=conditions),
    )
    if isinstance(server, FakeApi):
        return server.put(pool)
    stored = server.create(pool)
    return server.update_status(msgspec.structs.replace(stored, status=pool.status))


def put_map(server: FakeApi, pool: AddressPool) -> None:
    """Bring the pool's map of leased blocks up to date, as the controller does."""
    pool = server.look(AddressPool, pool.metadata.name)
    blocks = block_layout.of_pool(pool)
    assert blocks is not None
    leased = [
        blocks.index(block_layout.interval(block).first)
        for block in server.look_at_all(AddressBlock, {"spec.pool": pool.metadata.name}).items
    ]
    status = msgspec.structs.replace(
        pool.status, free_map=block_layout.free_map(leased, blocks.total)
    )
    server.put(msgspec.structs.replace(pool, status=status))


def alias(server: FakeApi) -> AddressPool:
    """The private pool of RANGE, in the space of the shared one."""
    pool = put_pool(server, shared=False)
    status = msgspec.structs.replace(pool.status, space=space_name("", RANGE))
    return server.put(msgspec.structs.replace(pool, status=status))


class ClusterNode:
    """A node: its store, its lessee without a thread, and the verbs of the plugin. `server` is a
    stand-in, or the client of an agent whose Node object is there."""

    patience = 0.0  # seconds that an ADD waits for a block

    def __init__(
        self,
        server: FakeApi | ClusterApi,
        directory: Path,
        name: str = "node-a",
        *,
        clock: Clock | None = None,
        faults: Faults | None = None,
        boot: str = "boot-1",
        machine: str = "",
        kept: bool = False,
    ) -> None:
        self.kept = kept  # keep the store's files open, as an agent does: many times as fast
        self.files: StoreFiles = StoreFiles(directory, kept=False)
        self.server = cast(FakeApi, server)
        self.directory = directory
        self.name = name
        self.clock = clock or Clock()
        self.boot = boot
        self.machine = machine or f"machine-of-{name}"
        self.api = cast(FakeClient, server)
        self._attempts: Callable[[Lease], Attempts] = Attempts
        if isinstance(server, FakeApi):
            self.api = server.client(name, faults)
            self._attempts = partial(Attempts, look_at_pool=0.0)
            if name not in server.machines:
                server.add_node(name, self.machine, f"uuid-of-{self.machine}", boot)
        self.forced: set[str] = set()  # blocks that the test deleted by force
        self.restart()

    def restart(self, boot: str = "") -> None:
        """A new agent process, in a new boot if one is given."""
        self.boot = boot or self.boot
        self.close()
        self.files = StoreFiles(self.directory, report=lambda text: None, kept=self.kept)
        self.lessee = Lessee(
            self.api,
            self.files,
            self.name,
            self.boot,
            clock=self.clock,
            attempts=self._attempts,
        )

    def close(self) -> None:
        """Close the store's files."""
        self.files.close()

    @property
    def store(self) -> SqliteStore:
        return SqliteStore(self.files, self.boot)

    @property
    def plugin(self) -> AddressPlugin:
        stores = Stores(
            self.files,
            lambda: "cluster",
            self.lessee,
            clock=self.clock,
            patience=self.patience,
            pool_patience=0.0,
        )
        return AddressPlugin(stores, lambda: self.boot)

    def add(self, pod: str, ipam: Json | None = None, **how: Any) -> list[str]:  # noqa: ANN401
        """ADD for a new sandbox of the pod; its addresses."""
        container = how.pop("container", f"{pod}-1")
        asked = request("ADD", ipam or {"range": RANGE}, container, pod=pod, **how)
        result = self.plugin.reserve(asked)[0]
        return [ip.address.partition("/")[0] for ip in result.ips]

    def delete(self, pod: str, container: str = "", ipam: Json | None = None) -> None:
        """DEL of the pod's first sandbox."""
        self.plugin.delete(request("DEL", ipam, container or f"{pod}-1", pod=pod))

    def steps(self, count: int = 1, seconds: float = 5.0) -> None:
        """Run steps of the lessee, each `seconds` after the last."""
        for _ in range(count):
            self.clock.now += seconds
            self.lessee.step()

    def rows(self) -> dict[str, str]:
        """State by block."""
        with self.files.transaction() as tables:
            return {block.name: block.state for block in tables.blocks()}

    def held(self) -> set[str]:
        return {held.address for held in self.store.reservations()}


def blocks_of(server: FakeApi, node: str = "") -> Sequence[str]:
    """The names of all AddressBlocks, or of one node's."""
    listed = server.look_at_all(AddressBlock, {"spec.holder.node": node} if node else None)
    return [block.metadata.name for block in listed.items]
