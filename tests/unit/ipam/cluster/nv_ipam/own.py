"""Nodes whose pools of nv-ipam are podfabric's own, and the controller, in one process."""

from collections.abc import Iterable
from pathlib import Path

from ipam.cluster.api import ApiError
from ipam.cluster.controller.rounds import Rounds, Seen, read_world
from ipam.cluster.nv_ipam.follower import PoolFollower
from ipam.cluster.nv_ipam.leased_beside import LeasedBeside
from ipam.cluster.nv_ipam.objects import NvCIDRPool, NvIPPool
from ipam.cluster.nv_ipam.own_claims import OwnClaims
from ipam.cluster.nv_ipam.owner import PoolOwner
from ipam.cluster.nv_ipam.service import why_not_joined
from ipam.cluster.objects import AddressPool
from ipam.nv_ipam.own import OwnNvIpam
from ipam.nv_ipam.pools import ROUTED
from ipam.plugin import AddressPlugin
from ipam.scope import Stores
from ipam.store import Reservation
from tests.fake_api import FakeApi, Faults
from tests.unit.ipam.cluster.nodes import Clock, ClusterNode
from tests.unit.ipam.cluster.nv_ipam.nodes import NAMESPACE, Looked, NodeVerbs


class Controller:
    """The controller of podfabric, one leader at a time."""

    def __init__(self, server: FakeApi, clock: Clock, faults: Faults | None = None) -> None:
        self.client = server.client("controller", faults)
        self.clock = clock
        self.errors: list[ApiError] = []
        self.restart()

    def restart(self) -> None:
        """A new leader, which remembers nothing."""
        self.rounds = Rounds(self.client, clock=self.clock, wall=self.clock, nv_ipam=NAMESPACE)

    def round(self) -> Seen:
        seen = self.rounds.round(read_world(self.client, self.clock, NAMESPACE))
        self.errors = self.rounds.steps.taken_errors()
        return seen


class OwnNode(NodeVerbs):
    """A node: its store, its lessee and its pools' owner without threads, and the plugin."""

    def __init__(
        self,
        server: FakeApi,
        directory: Path,
        name: str,
        *,
        clock: Clock | None = None,
        faults: Faults | None = None,
    ) -> None:
        self.server = server
        self.name = name
        self.boot = "boot-1"
        self.state = directory / f"{name}-cni"
        self.state.mkdir(parents=True, exist_ok=True)
        self.directory = directory / name
        self.directory.mkdir(parents=True, exist_ok=True)
        self.leases = ClusterNode(server, self.directory, name, clock=clock, faults=faults)
        self.api = self.leases.api
        self.clock = self.leases.clock
        self.restart()

    def restart(self) -> None:
        """A new agent process."""
        self.leases.restart()
        self.files = self.leases.files
        self.owner = PoolOwner(
            self.api,
            self.files,
            self.name,
            self.boot,
            self.ippools,
            self.daemon_store,
            self.clock,
            self.cidrpools,
        )
        self.follower = PoolFollower(
            self.api,
            self.files,
            self.name,
            self.boot,
            (self.ippools, self.cidrpools),
            lambda key: Looked(self.server, key),
            self.clock,
            ROUTED,
            lambda: why_not_joined(self.daemon_store, self.files),
            LeasedBeside(self.api, NAMESPACE, self.clock),
        )
        self.nv_ipam = OwnNvIpam(
            self.directory,
            self.directory / "nv-ipam.conf",
            OwnClaims(self.leases.lessee, self.owner.why_not),
            self.follower,
            clock=self.clock,
            patience=0.0,
            pool_patience=0.0,
        )

    @property
    def daemon_store(self) -> Path:
        """The file of nv-ipam's daemon, on this node."""
        return self.state / "nv-ipam/store"

    def ippools(self) -> tuple[NvIPPool, ...] | None:
        """What a watch shows; None while the API server is away."""
        if self.api.down or self.server.down:
            return None
        return self.server.look_at_all(NvIPPool, namespace=NAMESPACE).items

    def cidrpools(self) -> tuple[NvCIDRPool, ...] | None:
        if self.api.down or self.server.down:
            return None
        return self.server.look_at_all(NvCIDRPool, namespace=NAMESPACE).items

    @property
    def plugin(self) -> AddressPlugin:
        return AddressPlugin(Stores(self.files), lambda: self.boot, nv_ipam=lambda: self.nv_ipam)

    def step(self, seconds: float = 5.0) -> None:
        """What the agent does in a while."""
        self.clock.now += seconds
        self.owner.step()
        if self.cidrpools() is not None:
            self.follower.step()
        self.leases.lessee.step()

    def imports(self, reservations: Iterable[Reservation]) -> None:
        """What `podfabric ipam import` puts into the store."""
        self.store.load(tuple(reservations))


def own_pool(server: FakeApi) -> AddressPool:
    """The only AddressPool."""
    (pool,) = server.look_at_all(AddressPool).items
    return pool
