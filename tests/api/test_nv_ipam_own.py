"""nv-ipam's IPPools as podfabric's own on a real API server, with tokens and rights of agents."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cni.spec.errors import CNIError, Code
from ipam.cluster.controller.rounds import Rounds, read_world
from ipam.cluster.nv_ipam.own_claims import OwnClaims
from ipam.cluster.nv_ipam.service import OwnPoolService
from ipam.cluster.objects import AddressBlock, AddressPool, AddressShare
from ipam.confirmed import boottime
from ipam.nv_ipam.own import OwnNvIpam
from ipam.plugin import AddressPlugin
from ipam.scope import Stores
from tests.api import nv_ipam
from tests.api.nv_ipam import NAMESPACE, put_entries, put_pool
from tests.api.server import ApiServer, name
from tests.api.test_nodes import RealNode
from tests.unit.ipam.cluster.nv_ipam.nodes import NodeVerbs, duplicates
from tests.waiting import until


class OwnApiNode(NodeVerbs):
    """A node whose pools are followed by threads of their own, and whose lessee has its token.

    `clock` is that of its ADDs, if not the lessee's.
    """

    def __init__(
        self,
        server: ApiServer,
        directory: Path,
        node: str,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.leases = RealNode(server, directory / node, node)
        self.name, self.boot = node, self.leases.boot
        self.files = self.leases.files
        self.service = OwnPoolService(
            self.leases.client,
            self.files,
            node,
            self.boot,
            NAMESPACE,
            directory / node / "nv-ipam/store",
        )
        claims = OwnClaims(self.leases.lessee, self.service.owner.why_not)
        conf = directory / "nv-ipam.conf"
        self.nv_ipam = OwnNvIpam(
            directory / node,
            conf,
            claims,
            self.service.follower,
            clock=clock or self.leases.clock,
        )
        self.service.start()

    @property
    def plugin(self) -> AddressPlugin:
        return AddressPlugin(Stores(self.files), lambda: self.boot, nv_ipam=lambda: self.nv_ipam)


@pytest.fixture
def kinds(server: ApiServer) -> Iterator[ApiServer]:
    """The server, with nv-ipam's kinds; without what the test made, as others count it."""
    if server.send("GET", f"/api/v1/namespaces/{NAMESPACE}")[0] != 200:
        nv_ipam.install(server)
    nv_ipam.remove_pools(server)
    yield server
    nv_ipam.remove_pools(server)
    for pool in server.admin.list(AddressPool).items:
        if pool.spec.network_name.startswith("nv-ipam/"):
            for block in server.admin.list(AddressBlock, {"spec.pool": pool.metadata.name}).items:
                server.admin.delete(block)
            server.admin.delete(pool)
    for share in server.admin.list(AddressShare).items:
        server.admin.delete(share)


def test_nodes_lease_blocks_of_an_ippool_and_leave_alone_what_others_may_hold(
    kinds: ApiServer, tmp_path: Path
) -> None:
    pool = name("owned")
    put_pool(
        kinds,
        "ippools",
        pool,
        {
            "subnet": "10.7.0.0/26",
            "perNodeBlockSize": 12,
            "gateway": "10.7.0.1",
            "defaultGateway": True,
        },
    )
    ipam: dict[str, object] = {"poolName": pool}
    with ExitStack() as stack:
        nodes = []
        for each in ("a", "b"):
            (tmp_path / each).mkdir(exist_ok=True)
            node = OwnApiNode(kinds, tmp_path, name(each))
            stack.callback(kinds.kubectl, "delete", "node", node.name, "--ignore-not-found")
            stack.callback(node.service.close)
            nodes.append(node)
        a, b = nodes
        entry = {"nodeName": "elsewhere", "startIP": "10.7.0.2", "endIP": "10.7.0.40"}
        mine = {"nodeName": a.name, "startIP": "10.7.0.41", "endIP": "10.7.0.45"}
        put_entries(kinds, "ippools", pool, [entry, mine])
        rounds = Rounds(kinds.admin, nv_ipam=NAMESPACE)

        def settle() -> None:
            rounds.round(read_world(kinds.admin, time.monotonic, NAMESPACE))
            assert not rounds.steps.taken_errors()

        def added(node: OwnApiNode, pod: str) -> list[str]:
            found: list[str] = []

            def tried() -> bool:
                settle()
                node.leases.lessee.step()
                try:
                    found.extend(node.add(pod, ipam))
                except CNIError as error:
                    assert error.code == Code.TRY_AGAIN, error
                    return False
                return True

            until(tried, what=f"address for {pod}", pause=0.2)
            return found

        until(
            lambda: bool(kinds.admin.list(AddressShare, {"spec.node": a.name}).items),
            what="share of the node that has nothing of the daemon",
        )
        given = [added(node, f"{node.name}-{number}") for number in range(5) for node in nodes]
        last = {int(address.partition("/")[0].rpartition(".")[2]) for (address,) in given}
        assert len(last) == 10
        assert min(last) > 40
        assert {address.partition("/")[2] for (address,) in given} == {"26"}
        assert not duplicates(nodes)
        put_entries(kinds, "ippools", pool, [])
        # The rest of the pool is free now: a block is full, and the node leases another one.
        assert all(added(b, f"more-{number}") for number in range(8))
        assert not duplicates(nodes)
        result = a.result("routed", ipam)
        assert result.ips[0].gateway == "10.7.0.1"
        assert [route.dst for route in result.routes] == ["0.0.0.0/0"]


def test_an_ippool_and_a_cidrpool_that_overlap_give_no_address_twice(
    kinds: ApiServer, tmp_path: Path
) -> None:
    """With the rights of agents; the CIDRPool, which has the kind that sorts first, is older."""
    routed, pool = name("prefixes"), name("beside")
    put_pool(kinds, "cidrpools", routed, {"cidr": "10.8.0.0/28", "perNodeNetworkPrefix": 29})
    put_pool(kinds, "ippools", pool, {"subnet": "10.8.0.0/27", "perNodeBlockSize": 4})
    rounds = Rounds(kinds.admin, nv_ipam=NAMESPACE)
    with ExitStack() as stack:
        nodes = []
        for each in ("c", "d"):
            node = OwnApiNode(kinds, tmp_path, name(each))
            stack.callback(kinds.kubectl, "delete", "node", node.name, "--ignore-not-found")
            stack.callback(node.service.close)
            # Shares are confirmed by the clock of this machine: ADDs are later, by the node's own.
            node.leases.clock.now = boottime() + 600.0
            nodes.append(node)

        def fill(node: OwnApiNode, ipam: dict[str, object], pods: str) -> set[str]:
            """All that the node gets of the pool, which it is asked for until it is full."""
            found: set[str] = set()

            def is_full() -> bool:
                rounds.round(read_world(kinds.admin, time.monotonic, NAMESPACE))
                assert not rounds.steps.taken_errors()
                node.leases.lessee.step()
                try:
                    while True:
                        found.update(node.add(f"{pods}-{len(found)}", ipam))
                except CNIError as error:
                    return error.code == Code.NO_FREE_ADDRESS

            until(is_full, what=f"all addresses for {node.name}", pause=0.2)
            return {each.partition("/")[0] for each in found}

        prefixes = [fill(node, {"poolName": routed, "poolType": "cidrpool"}, "r") for node in nodes]
        assert prefixes[0] | prefixes[1] == {
            f"10.8.0.{last}" for last in (*range(1, 7), *range(9, 15))
        }
        leased = fill(nodes[1], {"poolName": pool}, "p")
        assert leased == {f"10.8.0.{last}" for last in range(16, 31)}
        (own,) = [
            each
            for each in kinds.admin.list(AddressPool).items
            if each.spec.network_name == f"nv-ipam/ippool/{pool}"
        ]
        (said,) = [each for each in own.status.conditions if each.type == "Overlap"]
        assert f"also of cidrpool/{routed}, which is older" in said.message
