"""A range that whereabouts cuts into slices: a node of podfabric beside the real whereabouts.

Its plugin finds its slice in the NodeSlicePool, by the name of its node. The object is as its slice
controller writes it (pkg/node-controller/controller.go).
"""

from collections.abc import Iterator
from contextlib import closing
from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest

from bench.cluster import WHEREABOUTS
from ipam.cluster.kubernetes_api import KubernetesApi
from ipam.cluster.objects import AddressBlock
from ipam.cluster.whereabouts.objects import IPPool, NodeSlicePool, PoolEntry, entries
from tests.api.server import ApiServer, name
from tests.api.test_coexist import Theirs
from tests.api.whereabouts import GROUP, NAMESPACE, MovingNode, install_kinds, ready_pool
from tests.cluster import programs

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


def _entries(server: ApiServer, node: str, slice_: int) -> list[PoolEntry]:
    """What the IPPool of a node's slice has."""
    written = f"{node}-{SLICES[slice_].replace('/', '-')}"
    return entries(server.admin.get(IPPool, written, NAMESPACE))
