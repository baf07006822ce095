"""Nodes that serve nv-ipam's pools, and podfabric's controller, in one process."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from cni.spec.errors import CNIError, Code
from cni.spec.result import Result
from ipam.leases.objects import AddressPool
from ipam.nv_ipam.importing import FollowedPools
from ipam.nv_ipam.pool_import import (
    NodePart,
    NvCIDRPool,
    NvIPPool,
    NvPool,
    NvPools,
    NvPoolSpec,
    NvPoolStatus,
)
from kube.client import ClusterApi
from kube.resources import Meta
from tests.fake_api import FakeApi
from tests.unit.ipam.calls import Json, request
from tests.unit.ipam.controller.cluster import Cluster
from tests.unit.ipam.leases.nodes import ClusterNode

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
        NodePart(node=node, start=first, end=last)
        for node, (first, last) in sorted(entries.items())
    )
    return server.put(
        NvIPPool(
            metadata=Meta(name=name, namespace=NAMESPACE),
            spec=NvPoolSpec(subnet=subnet, **spec),
            status=NvPoolStatus(allocations=allocations),
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
        NodePart(node=node, prefix=prefix, gateway=gateway)
        for node, (prefix, gateway) in sorted(entries.items())
    )
    return server.put(
        NvCIDRPool(
            metadata=Meta(name=name, namespace=NAMESPACE),
            spec=NvPoolSpec(cidr=cidr, **spec),
            status=NvPoolStatus(allocations=allocations),
        )
    )


def all_pools(server: FakeApi) -> tuple[NvPool, ...]:
    return tuple(
        pool
        for kind in (NvIPPool, NvCIDRPool)
        for pool in server.look_at_all(kind, namespace=NAMESPACE).items
    )


class NvNode(ClusterNode):
    """A node with what it knows of the pools, which are followed without threads."""

    def __init__(
        self,
        server: FakeApi | ClusterApi,
        directory: Path,
        name: str,
        **how: Any,  # noqa: ANN401
    ) -> None:
        self.state = directory / f"{name}-cni"
        self.state.mkdir(parents=True, exist_ok=True)
        (directory / name).mkdir(parents=True, exist_ok=True)
        super().__init__(server, directory / name, name, **how)

    def restart(self, boot: str = "") -> None:
        """A new agent process."""
        super().restart(boot)
        self.pools = self.follow()

    def follow(self) -> FollowedPools:
        """The pools, as watches show them."""
        pools = FollowedPools(
            self.api,
            self.files,
            self.name,
            self.boot,
            NAMESPACE,
            self.daemon_store,
            self.clock,
        )
        for kind in ("ippool", "cidrpool"):
            pools.sources[kind] = partial(self.seen, kind)
        return pools

    @property
    def daemon_store(self) -> Path:
        """The file of nv-ipam's daemon, on this node."""
        return self.state / "nv-ipam/store"

    def seen(self, kind: str) -> tuple[NvPool, ...] | None:
        """The pools that a watch shows, or `None` while the API server is down."""
        if self.api.down or self.server.down:
            return None
        return tuple(each for each in all_pools(self.server) if each.key.startswith(f"{kind}/"))

    def step(self, seconds: float = 5.0) -> None:
        """Run one step of the agent, after `seconds`."""
        self.clock.now += seconds
        self.pools.step()
        self.lessee.step()

    def result(self, pod: str, ipam: Json | None = None, **how: Any) -> Result:  # noqa: ANN401
        """ADD for a new sandbox of the pod."""
        keys = {"type": "nv-ipam", "poolName": "pool"} | dict(ipam or {})
        container = how.pop("container", f"{pod}-1")
        asked = request("ADD", keys, container, pod=pod, **{"network": NETWORK} | how)
        return self.plugin.reserve(asked)[0]

    def add(self, pod: str, ipam: Json | None = None, **how: Any) -> list[str]:  # noqa: ANN401
        """ADD; the addresses with their prefixes."""
        return [ip.address for ip in self.result(pod, ipam, **how).ips]

    def delete(
        self, pod: str, container: str = "", ipam: Json | None = None, *, ifname: str = "eth0"
    ) -> None:
        """DEL of the pod's sandbox, with nothing but what the runtime must send."""
        asked = request(
            "DEL", {"type": "nv-ipam"}, container or f"{pod}-1", network=NETWORK, ifname=ifname
        )
        self.plugin.delete(asked)


class World:
    """An API server, the controller, and nodes."""

    def __init__(self, directory: Path) -> None:
        self.controller = Cluster()
        self.server, self.clock = self.controller.api, self.controller.clock
        pools = NvPools(self.controller.client, lambda: all_pools(self.server))
        self.controller.other_pools = pools
        self.controller.new_leader()
        self.directory = directory
        self.nodes: dict[str, NvNode] = {}

    def node(self, name: str) -> NvNode:
        self.nodes[name] = NvNode(self.server, self.directory, name, clock=self.clock)
        return self.nodes[name]

    def settle(self, rounds: int = 3, seconds: float = 5.0) -> None:
        """Run rounds of the controller and steps of the agents."""
        for _ in range(rounds):
            self.controller.round()
            for node in self.nodes.values():
                node.step(seconds)

    def add(self, node: NvNode, pod: str, ipam: Mapping[str, object] | None = None) -> list[str]:
        """ADD, which asks each second while it waits."""
        for _ in range(10):
            try:
                return node.add(pod, ipam)
            except CNIError as error:
                if error.code != Code.TRY_AGAIN:
                    raise
            self.settle(1, 1.0)
        return node.add(pod, ipam)


def checksummed(document: dict[str, object]) -> bytes:
    """The document as nv-ipam writes it: the checksum is of the text that has 0 in its place."""
    text = json.dumps({**document, "checksum": 0}, separators=(",", ":")).encode()
    found = 2166136261
    for byte in text:
        found = (found ^ byte) * 16777619 % (1 << 32)
    return text.replace(b'"checksum":0', b'"checksum":%d' % found, 1)


def daemon_writes(
    node: NvNode, *addresses: str, subnet: str = "10.0.0.0/24", pool: str = "pool"
) -> None:
    """nv-ipam's daemon had given these to pods of the node."""
    snapshot = json.dumps({"subnet": subnet})
    entries = {
        f"old{address}_net1": {
            "container_id": f"old{address}",
            "interface_name": "net1",
            "ip_address": address,
            "metadata": {"pod_name": f"old-{address}", "pool_config_snapshot": snapshot},
        }
        for address in addresses
    }
    pools = {pool: {"name": pool, "entries": entries}} if addresses else {}
    node.daemon_store.parent.mkdir(exist_ok=True)
    node.daemon_store.write_bytes(checksummed({"version": 1, "checksum": 0, "pools": pools}))


def duplicates(nodes: Iterable[NvNode]) -> dict[str, list[str]]:
    """Addresses that pods of two nodes hold."""
    found: dict[str, list[str]] = defaultdict(list)
    for node in nodes:
        for held in node.store.reservations():
            found[f"{held.domain} {held.address}"].append(node.name)
    return {address: names for address, names in found.items() if len(names) > 1}


def own_pool(server: FakeApi) -> AddressPool:
    """The only AddressPool."""
    (pool,) = server.look_at_all(AddressPool).items
    return pool
