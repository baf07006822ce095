"""A range that whereabouts cuts into slices: a node of podfabric beside the real whereabouts.

Its plugin finds its slice in the NodeSlicePool, by the name of its node. The object is as its slice
controller writes it (pkg/node-controller/controller.go).
"""

from collections.abc import Iterator
from contextlib import closing
from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest

from ipam.cluster.kubernetes_api import KubernetesApi
from ipam.cluster.lessee import FOREIGN_EVERY, HEED_AFTER
from ipam.cluster.objects import AddressBlock
from ipam.cluster.whereabouts import placeholders
from ipam.cluster.whereabouts.objects import IPPool, NodeSlicePool, PoolEntry, entries
from tests.api.server import ApiServer, name
from tests.api.test_coexist import Theirs
from tests.api.whereabouts import GROUP, NAMESPACE, MovingNode, install_kinds, ready_pool
from tests.cluster import programs
from tests.cluster.peers import WHEREABOUTS
from tests.waiting import until

RANGE, POOL = "10.91.0.0/26", "10.91.0.0-26"
IPAM = {"range": RANGE, "node_slice_size": "/28"}
OTHER = "other"  # a node of whereabouts
SLICES = [f"10.91.0.{first}/28" for first in (0, 16, 32, 48)]


@pytest.fixture
def node(server: ApiServer, node_a: KubernetesApi, tmp_path: Path) -> Iterator[MovingNode]:
    """A node of ours that has the second slice; the first one is OTHER's."""
    install_kinds(server)
    ours = name("sliced")
    given = zip((OTHER, ours, "", ""), SLICES, strict=True)
    server.make(
        f"/apis/{GROUP}/v1alpha1/namespaces/{NAMESPACE}/nodeslicepools",
        {
            "apiVersion": f"{GROUP}/v1alpha1",
            "kind": "NodeSlicePool",
            "metadata": {"name": "n1"},
            "spec": {"range": RANGE, "sliceSize": "/28"},
            "status": {
                "allocations": [{"nodeName": each, "sliceRange": cut} for each, cut in given]
            },
        },
    )
    with (
        ready_pool(server, RANGE, 4, "Coexist"),
        closing(MovingNode(server.node(ours), tmp_path / ours, ours, "Coexist")) as node,
    ):
        yield node
    server.admin.delete(server.admin.get(NodeSlicePool, "n1", NAMESPACE))


def test_neither_side_gives_an_address_of_the_other(
    server: ApiServer, node: MovingNode, tmp_path: Path
) -> None:
    (built,) = programs.build([WHEREABOUTS])
    admin = server.plane.kubeconfig("admin")
    here, other = (
        Theirs(built / "whereabouts", admin, tmp_path, IPAM, each) for each in (node.name, OTHER)
    )
    before = {here.add(f"before{number}") for number in range(2)}
    ours = {node.add(f"p{number}", dict(IPAM))[0] for number in range(8)}
    assert all(ip_address(each) in ip_network(SLICES[1]) for each in ours)
    assert len(ours) == 8
    assert not ours & before
    # The node goes back to whereabouts, while pods of ours are still there.
    after: set[str] = set()
    while (address := here.add(f"after{len(after)}")) is not None:
        assert address not in after
        after.add(address)
    assert not after & (ours | before)
    assert other.add("q0") == "10.91.0.1"
    assert {each.allocation.is_placeholder for each in _entries(server, OTHER, 0)} == {False}
    for number in range(8):
        node.delete(f"p{number}", ipam=IPAM)
    node.lessee.leaving = True
    node.steps(20, 15.0)
    assert server.admin.list(AddressBlock, {"spec.pool": POOL}).items == ()
    left = _entries(server, node.name, 1)
    assert {str(ip_address(each.address & 0xFFFFFFFF)) for each in left} == before | after
    last = here.add("last")
    assert last is not None
    assert last not in before | after


@pytest.mark.usefixtures("node_a")
def test_a_range_that_comes_later_and_a_slice_that_goes_have_placeholders_soon(
    server: ApiServer, node: MovingNode
) -> None:
    """The agent's watches, with its rights. The clock moves by less than a confirmation takes."""
    node.patience = 60.0
    with closing(node.lessee):
        node.lessee.start()
        given = node.add("p0", dict(IPAM))[0]
        (block,) = server.admin.list(AddressBlock, {"spec.pool": POOL}).items
        wider, moved = "10.91.0.0-24", f"{OTHER}-{SLICES[1].replace('/', '-')}"

        def is_told(name: str) -> bool:
            node.clock.now += HEED_AFTER / 200
            ippools = server.admin.list(IPPool).items
            found = (each for each in ippools if each.metadata.name == name)
            told = {placeholders.uid_of(entry) for each in found for entry in entries(each)}
            return block.metadata.uid in told

        with ready_pool(server, "10.91.0.0/24", 4, "Coexist"):
            until(lambda: is_told(wider), what=f"placeholders in {wider}")
        where = f"/apis/{GROUP}/v1alpha1/namespaces/{NAMESPACE}/nodeslicepools/n1"
        pool = server.send("GET", where)[1]
        first, second, *_ = pool["status"]["allocations"]
        first["nodeName"], second["nodeName"] = second["nodeName"], first["nodeName"]
        assert server.send("PUT", where, pool)[0] == 200
        until(lambda: is_told(moved), what=f"placeholders in {moved}")
        assert node.clock.now - 1000.0 < FOREIGN_EVERY / 2
        assert ip_address(given) in ip_network(SLICES[1])
        node.delete("p0", ipam=IPAM)


def _entries(server: ApiServer, node: str, slice_: int) -> list[PoolEntry]:
    """What the IPPool of a node's slice has."""
    written = f"{node}-{SLICES[slice_].replace('/', '-')}"
    return entries(server.admin.get(IPPool, written, NAMESPACE))
