"""Nodes that follow nv-ipam's pools, and a stand-in for nv-ipam's controller, in one process.

The stand-in cuts an IPPool as nv-ipam does (pkg/ipam-controller/allocator): entries that fit stay;
then nodes in alphabetical order get the first free run of the grid.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cni.spec.errors import CNIError
from cni.spec.result import Result
from ipam.addresses import parse, parse_interval, text
from ipam.cluster.nv_ipam.follower import PoolFollower
from ipam.cluster.nv_ipam.leased_beside import LeasedBeside
from ipam.cluster.nv_ipam.neighbours import SharesWatch
from ipam.cluster.nv_ipam.objects import (
    NvCIDRPool,
    NvCIDRPoolEntry,
    NvCIDRPoolSpec,
    NvCIDRPoolStatus,
    NvIPPool,
    NvIPPoolEntry,
    NvIPPoolSpec,
    NvIPPoolStatus,
)
from ipam.cluster.objects import AddressShare, Meta
from ipam.nv_ipam.plugin import NvIpam
from ipam.nv_ipam.pools import NodePool, NodePools, PoolsFile
from ipam.plugin import AddressPlugin
from ipam.scope import Stores
from ipam.sqlite_store import SqliteStore
from ipam.store_files import StoreFiles
from tests.fake_api import FakeApi, Faults
from tests.unit.ipam.calls import request
from tests.unit.ipam.cluster.nodes import Clock

NAMESPACE = "nvidia-network-operator"
NETWORK = "net"


def put_ippool(
    server: FakeApi,
    entries: Mapping[str, tuple[str, str]],
    subnet: str = "10.0.0.0/24",
    name: str = "pool",
    **spec: Any,  # noqa: ANN401 - fields of the spec
) -> NvIPPool:
    """An IPPool as nv-ipam's controller leaves it: first and last address of each node."""
    allocations = tuple(
        NvIPPoolEntry(node=node, start=first, end=last)
        for node, (first, last) in sorted(entries.items())
    )
    return server.put(
        NvIPPool(
            metadata=Meta(name=name, namespace=NAMESPACE),
            spec=NvIPPoolSpec(subnet=subnet, **spec),
            status=NvIPPoolStatus(allocations=allocations),
        )
    )


def put_cidrpool(
    server: FakeApi,
    entries: Mapping[str, tuple[str, str]],
    cidr: str = "10.8.0.0/16",
    name: str = "routed",
    **spec: Any,  # noqa: ANN401 - fields of the spec
) -> NvCIDRPool:
    """A CIDRPool as nv-ipam's controller leaves it: prefix and gateway of each node."""
    allocations = tuple(
        NvCIDRPoolEntry(node=node, prefix=prefix, gateway=gateway)
        for node, (prefix, gateway) in sorted(entries.items())
    )
    return server.put(
        NvCIDRPool(
            metadata=Meta(name=name, namespace=NAMESPACE),
            spec=NvCIDRPoolSpec(cidr=cidr, **spec),
            status=NvCIDRPoolStatus(allocations=allocations),
        )
    )


class Cutter:
    """nv-ipam's controller, for one IPPool of a /24."""

    def __init__(self, server: FakeApi, size: int, name: str = "pool") -> None:
        self.server = server
        self.size = size
        self.name = name
        self.nodes: set[str] = set()
        self.valid = True
        self.entries: dict[str, int] = {}
        self.cut()

    def cut(self) -> None:
        """Bring the entries up to date."""
        grid = [1 + self.size * index for index in range(254 // self.size)]
        if not self.valid:
            self.entries = {}
        kept = {
            node: first
            for node, first in self.entries.items()
            if node in self.nodes and first in grid and self.fits(node)
        }
        for node in sorted(self.nodes - kept.keys()) if self.valid else ():
            free = [first for first in grid if first not in kept.values()]
            if free:
                kept[node] = free[0]
        self.entries = kept
        self.sizes = dict.fromkeys(kept, self.size)
        base = parse("10.0.0.0")
        put_ippool(
            self.server,
            {
                node: (text(base + first), text(base + first + self.size - 1))
                for node, first in kept.items()
            },
            name=self.name,
        )

    def fits(self, node: str) -> bool:
        """Whether the node's entry has the size that the spec says."""
        return self.sizes.get(node) == self.size


class NodeVerbs:
    """The verbs of a node's plugin."""

    name: str
    boot: str
    directory: Path
    files: StoreFiles

    @property
    def plugin(self) -> AddressPlugin:
        """A new one for each call, as for each process."""
        raise NotImplementedError

    @property
    def store(self) -> SqliteStore:
        return SqliteStore(self.files, self.boot)

    def result(self, pod: str, ipam: Mapping[str, object] | None = None, **how: Any) -> Result:  # noqa: ANN401
        """ADD for a new sandbox of the pod."""
        keys = {"type": "nv-ipam", "poolName": "pool"} | dict(ipam or {})
        container = how.pop("container", f"{pod}-1")
        asked = request("ADD", keys, container, pod=pod, **{"network": NETWORK} | how)
        result = self.plugin.add(asked)
        assert isinstance(result, Result)
        return result

    def add(self, pod: str, ipam: Mapping[str, object] | None = None, **how: Any) -> list[str]:  # noqa: ANN401
        """ADD; the addresses with their prefixes."""
        return [ip.address for ip in self.result(pod, ipam, **how).ips]

    def delete(self, pod: str) -> None:
        """DEL of the pod's sandbox, with nothing but what the runtime must send."""
        self.plugin.delete(request("DEL", {"type": "nv-ipam"}, f"{pod}-1", network=NETWORK))

    def held(self) -> set[str]:
        """The addresses that its pods hold."""
        return {each.address for each in self.store.reservations()}


class Looked:
    """A watch of a pool's shares that is never late."""

    def __init__(self, server: FakeApi, key: str) -> None:
        self.server = server
        self.key = key

    def items(self) -> tuple[AddressShare, ...]:
        return self.server.look_at_all(AddressShare, {"spec.pool": self.key}).items

    def close(self) -> None:
        pass


class FollowingNode(NodeVerbs):
    """A node: its store, its follower without a thread, and the verbs of the plugin.

    `machine` is the machine that has the node's name; its Node object is there.
    """

    def __init__(
        self,
        server: FakeApi,
        directory: Path,
        name: str,
        *,
        clock: Clock | None = None,
        faults: Faults | None = None,
        machine: str = "",
    ) -> None:
        self.server = server
        self.name = name
        self.clock = clock or Clock()
        self.api = server.client(name, faults)
        self.machine = machine or f"machine-of-{name}"
        self.directory = directory / self.machine
        self.boot = f"boot-1 of {machine}" if machine else "boot-1"
        if name not in server.machines:
            self.join()
        self.restart()

    def join(self) -> None:
        """The kubelet makes the Node object, as this machine's."""
        self.server.add_node(self.name, self.machine, f"{self.machine}-uuid", self.boot)

    def restart(self, *, follows: bool = True) -> None:
        """A new agent process."""
        self.files = StoreFiles(self.directory, report=lambda line: None, kept=False)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.follower = PoolFollower(
            self.api,
            self.files,
            self.name,
            self.boot,
            (self.ippools, self.cidrpools),
            self.watched,
            self.clock,
            leases=LeasedBeside(self.api, NAMESPACE, self.clock, follows=True),
        )
        self.nv_ipam = NvIpam(
            self.directory,
            self.directory / "nv-ipam.conf",
            self.follower if follows else None,
            self.clock,
        )

    def watched(self, key: str) -> SharesWatch:
        """What a watch of a pool's shares shows."""
        return Looked(self.server, key)

    def ippools(self) -> tuple[NvIPPool, ...] | None:
        """What a watch shows; None while the API server is away."""
        return None if self.api.down or self.server.down else self._listed(NvIPPool)

    def cidrpools(self) -> tuple[NvCIDRPool, ...] | None:
        return None if self.api.down or self.server.down else self._listed(NvCIDRPool)

    def _listed(self, kind: Any) -> Any:  # noqa: ANN401 - either kind
        return self.server.look_at_all(kind, namespace=NAMESPACE).items

    @property
    def plugin(self) -> AddressPlugin:
        return AddressPlugin(Stores(self.files), lambda: self.boot, nv_ipam=lambda: self.nv_ipam)

    def step(self, seconds: float = 5.0) -> float:
        """One look of the follower, a while later."""
        self.clock.now += seconds
        return self.follower.step()


def duplicates(nodes: Iterable[NodeVerbs]) -> dict[str, list[str]]:
    """Addresses that pods of two nodes hold."""
    found: dict[str, list[str]] = defaultdict(list)
    for node in nodes:
        for held in node.store.reservations():
            found[f"{held.domain} {held.address}"].append(node.name)
    return {address: names for address, names in found.items() if len(names) > 1}


def known_to(node: NodeVerbs) -> Mapping[str, NodePool]:
    """What its file says; nothing if it is damaged."""
    try:
        return (PoolsFile(node.directory).read() or NodePools()).pools
    except CNIError:
        return {}


def broken(server: FakeApi, nodes: Iterable[FollowingNode]) -> list[str]:
    """What must not be: a machine hands out what its share does not protect, or two the same."""
    found = []
    given: dict[tuple[str, int], str] = {}
    for node in nodes:
        for key, pool in known_to(node).items():
            if not pool.is_confirmed(node.boot, node.clock()):
                continue
            mine = [
                each
                for each in server.look_at_all(AddressShare, {"spec.pool": key}).items
                if each.metadata.uid == pool.share and each.holder.boot == node.boot
            ]
            kept = [parse_interval(run) for each in mine for run in each.spec.ranges]
            for run in map(parse_interval, (*pool.usable, *pool.beside)):
                for address in range(run.first, run.last + 1):
                    if not any(one.first <= address <= one.last for one in kept):
                        found.append(f"{node.machine}: {text(address)} is in no share of it")
                    other = given.setdefault((key, address), node.machine)
                    if other != node.machine:
                        found.append(f"{node.machine} and {other} have {text(address)}")
    return found


def share_of(server: FakeApi, node: str, key: str = "ippool/pool") -> Any:  # noqa: ANN401
    """A node's only share of a pool; None without one."""
    shares = server.look_at_all(AddressShare, {"spec.node": node, "spec.pool": key}).items
    assert len(shares) <= 1
    return shares[0] if shares else None
